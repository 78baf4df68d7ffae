"""Match confidence against truth: precision and recall over every threshold, and calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

import numpy as np

from pipeline.evaluate.scoring import ScoredMatches

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))  # of precision_recall.csv
RECALLS = tuple(round(0.01 * step, 2) for step in range(101))  # of precision_at_recall.csv


@dataclass(frozen=True)
class Sweep:
    """Means over pairs above each confidence threshold that occurs, falling.

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
    parts: List[Tuple[np.ndarray, ...]] = [
        (np.zeros(0), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    ]
    for number, matches in enumerate(scored):
        order = np.argsort(-matches.scores, kind="stable")
        precision = np.cumsum(matches.correct[order]) / np.arange(1, len(order) + 1)
        recall = np.cumsum(matches.found[order]) / max(matches.truth, 1)
        increments = (np.diff(curve, prepend=0.0) for curve in (precision, recall))
        parts.append((matches.scores[order], np.full(len(order), number), *increments))
    confidence, pair, precision, recall = (np.concatenate(column) for column in zip(*parts))
    order = np.argsort(-confidence, kind="stable")
    return confidence[order], pair[order], precision[order], recall[order]


def sweep(scored: Sequence[ScoredMatches]) -> Sweep:
    """The sweep of one network. scored: all matches of each pair, whatever their scores."""
    confidence, _, precision, recall = steps(scored)
    # Of equal confidences
    last = np.flatnonzero(np.append(confidence[1:] != confidence[:-1], True)[: len(confidence)])
    recall_pairs = sum(matches.truth > 0 for matches in scored)
    return Sweep(
        confidence=confidence[last],
        precision=np.cumsum(precision)[last] / max(len(scored), 1),
        recall=np.cumsum(recall)[last] / (recall_pairs or np.nan),
        matches=(last + 1) / max(len(scored), 1),
        pairs=len(scored),
        recall_pairs=recall_pairs,
    )


def recall_at_precision(precision: np.ndarray, recall: np.ndarray, least: np.ndarray) -> np.ndarray:
    """The highest recall with a precision of at least `least`, 0 without any.

    precision, recall: (..., T); least: (...). Exchange the two arguments for the precision at a
    recall.
    """
    reached = precision >= np.expand_dims(least, -1) - 1e-12  # rounding of float64 sums
    return np.where(reached, recall, 0.0).max(axis=-1, initial=0.0)


def threshold_curve(
    swept: Sweep, thresholds: Sequence[float] = THRESHOLDS
) -> List[Dict[str, float]]:
    """Mean precision, recall and matches above each threshold, with the number of pairs in each
    mean.
    """
    lines = []
    for threshold in thresholds:
        index = int((swept.confidence > threshold).sum()) - 1  # -1: no match is left
        empty = {
            "precision": 0.0 if swept.pairs else np.nan,
            "recall": 0.0 if swept.recall_pairs else np.nan,
        }
        means = {
            name: float(getattr(swept, name)[index])
            for name in ("precision", "recall", "matches")
            if index >= 0
        }
        line = {"threshold": float(threshold), **(means or {**empty, "matches": 0.0})}
        lines.append({**line, "pairs": swept.pairs, "recall_pairs": swept.recall_pairs})
    return lines


def calibration(scored: Sequence[ScoredMatches], bins: int = 10) -> List[Dict[str, float]]:
    """Fraction of correct matches in each of `bins` equal ranges of the score 0..1; empty bins are
    left out.
    """
    scores = np.concatenate([[], *(matches.scores for matches in scored)])
    correct = np.concatenate([[], *(matches.correct for matches in scored)])
    part = np.minimum((scores * bins).astype(int), bins - 1)
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
    total = sum(line["matches"] for line in lines) or float("nan")
    return (
        sum(abs(line["confidence"] - line["precision"]) * line["matches"] for line in lines) / total
    )
