"""The content of a report: everything that its tables, files and page show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from pipeline.report.rows import Measure, Row, Table, table_of

Line = Mapping[str, Any]
TEXT = "report.txt"  # what the evaluation printed
PAGE = "index.html"


class Picture(NamedTuple):
    """A pair with the matches of ours and of the ratio test. pixels: (H, W, 3) uint8 BGR."""

    name: str
    caption: str
    pixels: np.ndarray


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
