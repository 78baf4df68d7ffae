"""report.json: the content of the page, the same in every clone."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from pipeline.errors import RequestError
from pipeline.files import read_json

Line = Mapping[str, Any]
JSON = "report.json"
ELSEWHERE = ("pairs", "scenes", "bad")  # long tables, only in their CSV files


@dataclass(frozen=True)
class Picture:
    """A pair and its matches.

    jpeg: both images side by side, base64, of width x height pixels; matches: by matcher, rows of
    x0, y0, x1, y1 in these pixels, score and 1 (correct) or 0.
    """

    name: str
    caption: str
    jpeg: str
    width: int
    height: int
    matches: Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Content:
    """Everything in the report: the lines of each file, and the page. unit: what intervals resample
    (photographs).
    """

    title: str  # where the pairs come from
    metrics: Dict[str, Optional[float]]
    intervals: Sequence[Line]
    differences: Sequence[Line]
    curves: Mapping[str, Sequence[Line]]  # by file name
    robustness: Sequence[Line]
    pictures: Sequence[Picture]
    protocol: Mapping[str, Any]
    pairs: Sequence[Line] = ()
    scenes: Sequence[Line] = ()
    bad: Sequence[Line] = ()
    notes: List[str] = field(default_factory=list)
    unit: str = "scenes"


def save(folder: Path, content: Content) -> None:
    """Write report.json."""
    values = {
        name: value for name, value in dataclasses.asdict(content).items() if name not in ELSEWHERE
    }
    (folder / JSON).write_text(json.dumps(values) + "\n", encoding="utf-8")


def load(folder: Path) -> Content:
    """Read report.json. Raises RequestError for one that is missing or damaged."""
    values = read_json(folder / JSON, "no such file; `make repro` makes it")
    try:
        return Content(
            **{**values, "pictures": [Picture(**picture) for picture in values["pictures"]]}
        )
    except (TypeError, KeyError) as error:
        raise RequestError(
            f"{folder / JSON}: cannot be read: {error}; run the evaluation again"
        ) from None
