"""The files of a report: tables as CSV, metrics as JSON, the printed text, the page.

Only here do the names of metrics leave the program; no other module reads them back.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

from pipeline.files import write_atomic, write_csv, write_json
from pipeline.report import page, summary
from pipeline.report.document import PAGE, TEXT, Content, Line
from pipeline.report.rows import Row, Table
from superglue_sift import drawing

# Decimals and significant digits of a value in a file. Intervals of some hundred pairs are wider
# than a tenth of a percent; further digits differ between processors and mean nothing. Tables are
# printed from values with more digits, so that none is rounded twice.
DIGITS = 4
COLUMNS = {
    "bad_images": ("file", "reason"),
    "calibration": ("confidence", "precision", "matches"),
}  # of files that may have no line


def write(out: Path, content: Content) -> None:
    """Write all files, and remove those of an earlier evaluation."""
    headline = summary.headline(content)
    values = {
        "metrics": {row.name: shorten(row.value) for row in content.rows},
        "summary": {name: shorten(value) for name, value in headline.items()},
        "protocol": content.protocol,
    }
    for name, value in values.items():
        write_json(out / f"{name}.json", value, indent=2)
    for folder in ("curves", "pictures"):
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir(parents=True)
    errors = {measure.name: lines for measure, lines in content.errors}
    curves = {f"curves/{name}": lines for name, lines in {**errors, **content.curves}.items()}
    for name, lines in {**tables_of(content), **curves}.items():
        write_lines(out / f"{name}.csv", lines)
    for picture in content.pictures:
        drawing.Picture(picture.pixels).save(out / "pictures" / f"{picture.name}.png")
    write_atomic(out / TEXT, summary.text(content) + "\n")
    write_atomic(out / PAGE, page.render(content))


def tables_of(content: Content) -> Dict[str, Sequence[Line]]:
    """The lines of each CSV file by its name."""
    clusters = {"clusters": content.clusters}
    return {
        "pairs": content.pairs,
        "matchers": list_matchers(content.table),
        "scenes": [
            line for name, table in content.scenes for line in list_matchers(table, scene=name)
        ],
        "intervals": [
            {"matcher": row.matcher, **interval(row), **clusters}
            for row in content.intervals.values()
        ],
        "differences": [
            {**interval(row), **clusters, "verdict": row.verdict} for row in content.differences
        ],
        "robustness": [
            {"condition": name, "level": level, **{row.name: row.value for row in rows}}
            for name, level, rows in content.robustness
        ],
        "bad_images": content.bad,
    }


def interval(row: Row) -> Dict[str, Any]:
    """The columns of a value with its interval."""
    baseline = {"baseline": row.baseline} if row.baseline else {}
    values = {name: getattr(row, name) for name in ("value", "low", "high", "pairs")}
    return {"figure": row.measure.name, **baseline, **values}


def list_matchers(table: Table, **first: str) -> List[Dict[str, Any]]:
    """One line per matcher, with a column for each measure."""
    return [
        {**first, "matcher": matcher, **{m.name: value for m, value in values.items()}}
        for matcher, values in table.items()
    ]


def shorten(value: Any) -> Any:
    """A number with DIGITS digits; anything else unchanged."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(float(f"{value:.{DIGITS}g}"), DIGITS)


def write_lines(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """Write dicts as CSV, with all keys in order of appearance as columns."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    names = names or COLUMNS.get(path.stem, [])
    write_csv(path, [names, *([shorten(line.get(name)) for name in names] for line in lines)])
