"""The files of a report: tables as CSV, metrics and content as JSON, the page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Mapping, Optional, Sequence

from pipeline.files import write_atomic, write_csv
from pipeline.report import document, page, summary, tables

# Fields of `Content` with a CSV each
TABLES = ("pairs", "scenes", "intervals", "differences", "robustness")
FILES = (
    "metrics.json",
    "summary.json",
    "protocol.json",
    "matchers.csv",
    "bad_images.csv",
    page.PAGE,
    document.JSON,
    *(f"{name}.csv" for name in TABLES),
)
FOLDERS = ("curves", "pictures")


def write(out: Path, content: document.Content, training: Optional[Path] = None) -> None:
    """Write all files but the pictures, and remove those of an earlier evaluation. training: folder
    of its curves.
    """
    write_json(out / "metrics.json", content.metrics)
    write_json(out / "summary.json", summary.headline(content))
    write_json(out / "protocol.json", content.protocol)
    for name in TABLES:
        write_lines(out / f"{name}.csv", getattr(content, name))
    write_lines(out / "matchers.csv", tables.lines_by_matcher(content.metrics))
    write_lines(out / "bad_images.csv", content.bad, ("file", "reason"))
    for folder in FOLDERS:  # remove files of an earlier evaluation
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir(parents=True)
    for name, lines in content.curves.items():
        columns = ("confidence", "precision", "matches") if name == "calibration" else ()
        write_lines(out / "curves" / f"{name}.csv", lines, columns)
    document.save(out, content)
    page.write(out, training)


def write_lines(
    path: Path, lines: Sequence[Mapping[str, object]], columns: Sequence[str] = ()
) -> None:
    """Write dicts as CSV; columns: default all keys in order of appearance."""
    names = list(columns) or list(dict.fromkeys(name for line in lines for name in line))
    write_csv(path, [names, *([line.get(name) for name in names] for line in lines)])


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write indented JSON with a final newline; creates the folder."""
    write_atomic(path, json.dumps(values, indent=2) + "\n")
