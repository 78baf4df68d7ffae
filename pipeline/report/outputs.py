"""The files of a report: tables as CSV, metrics and content as JSON, the page.

Only here do the names of metrics leave the program; no other module reads them back.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from pipeline.files import write_atomic, write_csv
from pipeline.report import document, page, summary
from pipeline.report.rows import Row, Table

CSV = ("pairs", "matchers", "scenes", "intervals", "differences", "robustness", "bad_images")
FILES = (
    "metrics.json",
    "summary.json",
    "protocol.json",
    page.PAGE,
    document.JSON,
    *(f"{name}.csv" for name in CSV),
)
FOLDERS = ("curves", "pictures")
# Decimals and significant digits of a value in a file. Intervals of some hundred pairs are wider
# than a tenth of a percent; further digits differ between processors and mean nothing. Tables are
# printed from values with more digits, so that none is rounded twice.
DIGITS = 4
COLUMNS = {
    "bad_images": ("file", "reason"),
    "calibration": ("confidence", "precision", "matches"),
}  # of files that may have no line


def write(out: Path, content: document.Content, training: Optional[Path] = None) -> None:
    """Write all files but the pictures, and remove those of an earlier evaluation.

    training: folder of its curves.
    """
    write_json(out / "metrics.json", {row.name: shorten(row.value) for row in content.rows})
    headline = summary.headline(content)
    write_json(out / "summary.json", {name: shorten(value) for name, value in headline.items()})
    write_json(out / "protocol.json", content.protocol)
    for name, lines in zip(CSV, list_lines(content)):
        write_lines(out / f"{name}.csv", lines)
    for folder in FOLDERS:
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir(parents=True)
    errors = {measure.name: lines for measure, lines in content.errors}
    for name, lines in {**errors, **content.curves}.items():
        write_lines(out / "curves" / f"{name}.csv", lines)
    document.save(out, content)
    page.write(out, training)


def write_variants(out: Path, contents: Mapping[str, document.Content]) -> None:
    """Write metrics.json, protocols.csv and a page of several evaluations, by name."""
    values = {}
    lines = []
    for name, content in contents.items():
        values.update({f"{name}.{row.name}": shorten(row.value) for row in content.rows})
        lines += list_matchers(content.table, protocol=name)
    write_json(out / "metrics.json", values)
    write_lines(out / "protocols.csv", lines)
    title = "Evaluation: the paper's protocol and its variants"
    text = page.template().render(title=title, parts=contents)
    (out / page.PAGE).write_text(text, encoding="utf-8")


def list_lines(content: document.Content) -> List[Sequence[document.Line]]:
    """The lines of each file of `CSV`."""
    return [
        content.pairs,
        list_matchers(content.table),
        [line for name, table in content.scenes for line in list_matchers(table, scene=name)],
        [
            {"matcher": row.matcher, **interval(row), "clusters": content.clusters}
            for row in content.intervals.values()
        ],
        [
            {**interval(row), "clusters": content.clusters, "verdict": row.verdict}
            for row in content.differences
        ],
        [
            {"condition": name, "level": level, **{row.name: row.value for row in rows}}
            for name, level, rows in content.robustness
        ],
        content.bad,
    ]


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


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write indented JSON with a final newline; creates the folder."""
    write_atomic(path, json.dumps(values, indent=2) + "\n")
