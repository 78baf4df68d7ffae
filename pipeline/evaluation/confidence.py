"""How match confidence relates to truth: precision and recall over the threshold, and calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Sequence

import numpy as np

from pipeline.evaluation import metrics
from pipeline.evaluation.matchers import PairMatches
from pipeline.evaluation.pairs import Pair
from pipeline.evaluation.scoring import matched_points


@dataclass(frozen=True)
class Judged:
    """All K matches of one pair, whatever their scores. correct, found: (K,) bool; truth: a count."""

    scores: np.ndarray
    correct: np.ndarray
    found: np.ndarray
    truth: int


def judge(pair: Pair, answer: PairMatches, truth0: np.ndarray, correct_px: float) -> Judged:
    """Right or wrong for each match of `answer`; truth0 (M,) from `scoring.true_matches`."""
    points0, points1, scores = matched_points(pair, answer)
    index0 = np.flatnonzero(answer.matches0 > metrics.UNMATCHED)
    errors = metrics.reprojection_errors(points0, points1, pair.H_0to1)
    return Judged(
        scores=scores,
        correct=errors < correct_px,
        found=truth0[index0] == answer.matches0[index0],
        truth=int((truth0 > metrics.UNMATCHED).sum()),
    )


def counts_above(judged: Judged, threshold: float) -> metrics.MatchCounts:
    """Counts of one pair when only scores above `threshold` are matches."""
    keep = judged.scores > threshold
    return metrics.MatchCounts(
        matches=int(keep.sum()),
        correct=int((judged.correct & keep).sum()),
        truth=judged.truth,
        found=int((judged.found & keep).sum()),
    )


def threshold_curve(judged: Sequence[Judged], thresholds: Sequence[float]) -> List[Dict[str, float]]:
    """Mean precision, recall and matches at each threshold, with the number of pairs in each mean."""
    lines = []
    for threshold in thresholds:
        counts = [counts_above(one, threshold) for one in judged]
        precision, pairs = metrics.mean_finite([count.precision for count in counts])
        recall, recall_pairs = metrics.mean_finite([count.recall for count in counts])
        matches, _ = metrics.mean_finite([count.matches for count in counts])
        lines.append(
            {
                "threshold": float(threshold),
                "precision": precision,
                "recall": recall,
                "matches": matches,
                "pairs": pairs,
                "recall_pairs": recall_pairs,
            }
        )
    return lines


def calibration(judged: Sequence[Judged], bins: int = 10) -> List[Dict[str, float]]:
    """Share of correct matches among those whose score falls in each of `bins` equal parts of 0..1.

    A calibrated matcher has confidence equal to precision in every line. Empty parts are left out.
    """
    scores = np.concatenate([one.scores for one in judged]) if judged else np.zeros(0)
    correct = np.concatenate([one.correct for one in judged]) if judged else np.zeros(0, bool)
    part = np.minimum((scores * bins).astype(int), bins - 1)
    lines = []
    for index in range(bins):
        inside = part == index
        if inside.any():
            lines.append(
                {
                    "confidence": float(scores[inside].mean()),
                    "precision": float(correct[inside].mean()),
                    "matches": int(inside.sum()),
                }
            )
    return lines


def calibration_error(lines: Sequence[Dict[str, float]]) -> float:
    """Expected calibration error: mean of |confidence - precision|, weighted by matches (Guo et al. 2017)."""
    total = sum(line["matches"] for line in lines)
    if not total:
        return float("nan")
    return sum(abs(line["confidence"] - line["precision"]) * line["matches"] for line in lines) / total
