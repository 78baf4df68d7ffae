"""The content of a report: everything that its tables, files and page show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from pipeline.report.rows import Measure, Row, Table, table_of

Line = Mapping[str, Any]
TEXT = "report.txt"  # what the evaluation printed
PAGE = "index.html"


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


class Condition(NamedTuple):
    """Values of ours and of the ratio test on pairs of one difficulty; `pairs` of no matcher."""

    condition: str
    level: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Content:
    """Everything in the report.

    differences: ours minus the best baseline, then minus each further model. unit: what intervals
    resample (photographs), clusters: their number.
    """

    title: str  # where the pairs come from
    rows: Sequence[Row]
    differences: Sequence[Row]
    errors: Sequence[Tuple[Measure, Sequence[Line]]]  # fraction of pairs within each error
    curves: Mapping[str, Sequence[Line]]  # other curves by file name
    robustness: Sequence[Condition]
    pictures: Sequence[Picture]
    protocol: Mapping[str, Any]
    pairs: Sequence[Line] = ()
    scenes: Sequence[Tuple[str, Table]] = ()
    bad: Sequence[Line] = ()
    notes: List[str] = field(default_factory=list)
    unit: str = "scenes"
    clusters: int = 0

    @property
    def table(self) -> Table:
        """The values by matcher and measure."""
        return table_of(self.rows)

    @property
    def intervals(self) -> Dict[Tuple[str, Measure], Row]:
        """The rows with an interval, by matcher and measure."""
        return {row[:2]: row for row in self.rows if row.pairs is not None}
