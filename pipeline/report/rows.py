"""The row of every table and file of an evaluation: a value, and what it measures."""

from __future__ import annotations

from typing import Dict, Iterable, Mapping, NamedTuple, Optional

TITLES = {
    "superglue": "SuperGlue (ours)",
    "superglue_scene": "SuperGlue, scenes",
    "nn": "nearest neighbour",
    "mutual_nn": "mutual nearest neighbour",
    "ratio_test": "ratio test, mutual",
    "true_matches": "true matches (bound)",
}
ALIGNED = "aligned"  # matches whose positions were moved by the pixels around them


class Measure(NamedTuple):
    """What a value measures. estimator, aligned, limit: of errors and of the AUC up to a limit."""

    metric: str
    estimator: str = ""
    aligned: bool = False
    limit: int = 0  # px, of poses degrees

    @property
    def name(self) -> str:
        """The name in files, DVC and MLflow, such as auc_ransac_aligned_5: nothing reads it."""
        words = (self.metric, self.estimator, ALIGNED * self.aligned, str(self.limit or ""))
        return "_".join(filter(None, words))

    @property
    def method(self) -> str:
        """`RANSAC`, or `RANSAC aligned`."""
        return self.estimator.upper() + f" {ALIGNED}" * self.aligned

    @property
    def title(self) -> str:
        """`AUC@5 RANSAC aligned`; the name of other metrics as words."""
        if self.metric == "auc":
            return f"AUC@{self.limit} {self.method}"
        return self.name.replace("_at_ratio_", " at the ratio test's ").replace("_", " ")


class Row(NamedTuple):
    """A value of a matcher, or the difference of ours from a baseline.

    low, high: its 95 % interval. pairs: number in its mean, None for a value without an interval.
    """

    matcher: str
    measure: Measure
    value: Optional[float]
    low: Optional[float] = None
    high: Optional[float] = None
    pairs: Optional[int] = None
    baseline: str = ""
    verdict: str = ""

    @property
    def name(self) -> str:
        """The name in metrics.json: `superglue.precision`."""
        return ".".join(filter(None, (self.matcher, self.measure.name)))


Values = Mapping[Measure, Optional[float]]
Table = Mapping[str, Values]  # by matcher


def table_of(rows: Iterable[Row]) -> Dict[str, Dict[Measure, Optional[float]]]:
    """The values by matcher and measure, in the order of the rows."""
    table: Dict[str, Dict[Measure, Optional[float]]] = {}
    for row in rows:
        table.setdefault(row.matcher, {})[row.measure] = row.value
    return table


def title(matcher: str) -> str:
    """A matcher's display name."""
    return TITLES.get(matcher, matcher)
