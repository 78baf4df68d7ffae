"""Match confidence against truth: precision and recall over every threshold, and calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

import numpy as np
from numpy.typing import ArrayLike

from pipeline.evaluate.scoring import ScoredMatches

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))  # of precision_recall.csv
BINS = 10  # of calibration.csv
MEANS = ("precision", "recall", "matches")
RECALLS = tuple(round(0.01 * step, 2) for step in range(101))  # of precision_at_recall.csv


@dataclass(frozen=True)
class Sweep:
    """Means over pairs above each confidence threshold that occurs, falling, first above all.

    confidence, precision, recall, matches: (T,) float64. Precision is over all `pairs`, 0 for one
    without matches; recall over the `recall_pairs` with true matches, NaN without any.
    """

    confidence: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    matches: np.ndarray
    pairs: int
    recall_pairs: int


def steps(scored: Sequence[ScoredMatches]) -> Tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Confidence, pair number, and increments of that pair's precision and recall, by falling
    confidence; (E,) each.
    """
    parts = [(np.zeros(0), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))]
    for number, matches in enumerate(scored):
        order = np.argsort(-matches.scores, kind="stable")
        precision = np.cumsum(matches.correct[order]) / np.arange(1, len(order) + 1)
        recall = np.cumsum(matches.found[order]) / max(matches.truth, 1)
        precision_steps = np.diff(precision, prepend=0.0)
        recall_steps = np.diff(recall, prepend=0.0)
        numbers = np.full(len(order), number)
        parts.append((matches.scores[order], numbers, precision_steps, recall_steps))
    scores, numbers, precision_steps, recall_steps = map(np.concatenate, zip(*parts))
    order = np.argsort(-scores, kind="stable")
    return scores[order], numbers[order], precision_steps[order], recall_steps[order]


def sweep(scored: Sequence[ScoredMatches]) -> Sweep:
    """The sweep of one network. scored: all matches of each pair, whatever their scores."""
    confidence, _, precision, recall = steps(scored)
    # the last of equal confidences
    last = np.append(np.flatnonzero(np.diff(confidence)), len(confidence) - 1)[: len(confidence)]
    recall_pairs = sum(matches.truth > 0 for matches in scored)

    def mean(sums: np.ndarray, pairs: float) -> np.ndarray:
        return np.append(0.0, sums[last]) / (pairs or np.nan)

    return Sweep(
        np.append(np.inf, confidence[last]),
        mean(np.cumsum(precision), len(scored)),
        mean(np.cumsum(recall), recall_pairs),
        mean(np.arange(1.0, len(confidence) + 1), len(scored)),
        len(scored),
        recall_pairs,
    )


def recall_at_precision(precision: np.ndarray, recall: np.ndarray, least: ArrayLike) -> np.ndarray:
    """The highest recall with a precision of at least `least`, 0 without any.

    precision, recall: (..., T); least: (...). Exchange the two arguments for the precision at a
    recall.
    """
    reached = precision >= np.expand_dims(least, -1) - 1e-12  # rounding of float64 sums
    return np.where(reached, recall, 0.0).max(axis=-1, initial=0.0)


def threshold_curve(
    swept: Sweep, thresholds: Sequence[float] = THRESHOLDS
) -> List[Dict[str, float]]:
    """Mean precision, recall and matches above each threshold."""
    lines = []
    for threshold in thresholds:
        at = int((swept.confidence > threshold).sum()) - 1
        means = {name: float(getattr(swept, name)[at]) for name in MEANS}
        lines.append({"threshold": threshold, **means})
    return lines


def calibration(scored: Sequence[ScoredMatches]) -> List[Dict[str, float]]:
    """Fraction of correct matches in each of BINS equal ranges of the score 0..1; empty bins are
    left out.
    """
    scores = np.concatenate([[], *(matches.scores for matches in scored)])
    correct = np.concatenate([[], *(matches.correct for matches in scored)])
    part = np.minimum((scores * BINS).astype(int), BINS - 1)
    return [
        {
            "confidence": float(scores[part == index].mean()),
            "precision": float(correct[part == index].mean()),
            "matches": int((part == index).sum()),
        }
        for index in np.unique(part)
    ]


def calibration_error(lines: Sequence[Dict[str, float]]) -> float:
    """Expected calibration error: mean of |confidence - precision|, weighted by matches (Guo et al.
    2017).
    """
    gaps = [abs(line["confidence"] - line["precision"]) * line["matches"] for line in lines]
    return sum(gaps) / (sum(line["matches"] for line in lines) or np.nan)
