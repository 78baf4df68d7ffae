"""What a matcher is judged by: precision, recall, corner error and the area under its recall curve.

Pure numpy, no I/O. Every definition is written out, with its source, in docs/evaluation.md.
Sources: Sarlin et al., "SuperGlue", CVPR 2020, sections 5.1 and 5.2 (arXiv 1911.11763).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence, Tuple, Union

import numpy as np

from superglue_sift import geometry


@dataclass(frozen=True)
class MatchCounts:
    """Counts of one pair, from which precision and recall follow.

    matches: predicted matches; correct: those whose reprojection error is under the limit;
    truth: pairs of keypoints that truly belong together; found: those of them predicted exactly.
    """

    matches: int
    correct: int
    truth: int
    found: int

    @property
    def precision(self) -> float:
        """correct / matches; 0 when nothing was matched: a matcher that says nothing has failed."""
        return self.correct / self.matches if self.matches else 0.0

    @property
    def recall(self) -> float:
        """found / truth; NaN when the pair has no true match: then every matcher's mean leaves it out."""
        return self.found / self.truth if self.truth else float("nan")


def reprojection_errors(points0: np.ndarray, points1: np.ndarray, H_0to1: np.ndarray) -> np.ndarray:
    """Distance in pixels between matched points, the larger of the two directions.

    points0, points1: (K, 2) pixels; H_0to1: (3, 3). Returns (K,) float64, inf where a point maps to infinity.
    The larger direction, as in the ground truth: one rule for training and for judging.
    """
    points0 = np.asarray(points0, dtype=np.float64).reshape(-1, 2)
    points1 = np.asarray(points1, dtype=np.float64).reshape(-1, 2)
    H_0to1 = np.asarray(H_0to1, dtype=np.float64)
    with np.errstate(all="ignore"):
        forward = np.linalg.norm(geometry.transform(points0, H_0to1) - points1, axis=-1)
        backward = np.linalg.norm(geometry.transform(points1, np.linalg.inv(H_0to1)) - points0, axis=-1)
        worst = np.maximum(forward, backward)
    return np.where(np.isfinite(worst), worst, np.inf)


def auc_by_pair(errors: Sequence[float], threshold: float) -> np.ndarray:
    """What each pair adds to the area under the recall curve up to `threshold`; the AUC is their mean, 0 to 1.

    errors: one per pair, inf (or NaN) for a pair without an estimate, which is a failure and stays in the mean.
    Recall(t) is the share of pairs with an error of at most t: a staircase, so its area divided by `threshold` is
    exactly the mean of max(0, 1 - error / threshold).
    """
    values = np.asarray(errors, dtype=np.float64)
    if threshold <= 0:
        raise ValueError(f"threshold must be positive, not {threshold}")
    if np.any(values < 0):
        raise ValueError("errors must not be negative")
    return np.maximum(0.0, 1.0 - np.where(np.isnan(values), np.inf, values) / threshold)


def recall_curve(errors: Sequence[float], limits: Sequence[float]) -> np.ndarray:
    """Share of pairs with an error of at most each limit. errors: (P,), limits: (L,); returns (L,)."""
    values = np.asarray(errors, dtype=np.float64)
    values = np.sort(np.where(np.isnan(values), np.inf, values))
    if values.size == 0:
        return np.full(len(limits), np.nan)
    return np.searchsorted(values, np.asarray(limits, dtype=np.float64), side="right") / values.size


def mean_finite(values: Union[Sequence[float], np.ndarray]) -> Tuple[float, int]:
    """Mean of the finite values and how many they are; (NaN, 0) when there is none."""
    given = np.asarray(values, dtype=np.float64)
    finite = given[np.isfinite(given)]
    return (float(finite.mean()), int(finite.size)) if finite.size else (float("nan"), 0)
