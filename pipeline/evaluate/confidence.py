"""How match confidence relates to truth: precision and recall over every threshold, and calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

import numpy as np

from pipeline.evaluate.scoring import Judged

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))  # of precision_recall.csv
RECALLS = tuple(round(0.01 * step, 2) for step in range(101))  # of precision_at_recall.csv


@dataclass(frozen=True)
class Sweep:
    """Means over pairs when matches below a confidence are dropped, for every confidence there is, falling.

    confidence, precision, recall, matches: (T,) float64. Precision is over all `pairs`, 0 for one without matches;
    recall over the `recall_pairs` with true matches, NaN where these are none.
    """

    confidence: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    matches: np.ndarray
    pairs: int
    recall_pairs: int


def steps(judged: Sequence[Judged]) -> Tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of all E matches, the surest first: confidence, number of the pair, and what each adds to the precision and the
    recall of its pair; (E,) each."""
    parts: List[Tuple[np.ndarray, ...]] = [(np.zeros(0), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))]
    for number, one in enumerate(judged):
        order = np.argsort(-one.scores, kind="stable")
        precision = np.cumsum(one.correct[order]) / np.arange(1, len(order) + 1)
        recall = np.cumsum(one.found[order]) / max(one.truth, 1)
        differences = (np.diff(share, prepend=0.0) for share in (precision, recall))
        parts.append((one.scores[order], np.full(len(order), number), *differences))
    confidence, pair, precision, recall = (np.concatenate(column) for column in zip(*parts))
    order = np.argsort(-confidence, kind="stable")
    return confidence[order], pair[order], precision[order], recall[order]


def sweep(judged: Sequence[Judged]) -> Sweep:
    """The sweep of one network. judged: one per pair, with every match whatever its score."""
    confidence, _, precision, recall = steps(judged)
    last = np.flatnonzero(np.append(confidence[1:] != confidence[:-1], True)[: len(confidence)])
    recall_pairs = sum(one.truth > 0 for one in judged)
    return Sweep(
        confidence=confidence[last],
        precision=np.cumsum(precision)[last] / max(len(judged), 1),
        recall=np.cumsum(recall)[last] / (recall_pairs or np.nan),
        matches=(last + 1) / max(len(judged), 1),
        pairs=len(judged),
        recall_pairs=recall_pairs,
    )


def recall_at_precision(precision: np.ndarray, recall: np.ndarray, least: np.ndarray) -> np.ndarray:
    """The highest recall with a precision of at least `least`, 0 where no confidence reaches that.

    precision, recall: (..., T); least: (...). The other way round with the arguments exchanged.
    """
    reached = precision >= np.expand_dims(least, -1) - 1e-12  # sums of float64 in two orders
    return np.where(reached, recall, 0.0).max(axis=-1, initial=0.0)


def threshold_curve(found: Sweep, thresholds: Sequence[float] = THRESHOLDS) -> List[Dict[str, float]]:
    """Mean precision, recall and matches above each threshold, with the number of pairs in each mean."""
    lines = []
    for threshold in thresholds:
        place = int((found.confidence > threshold).sum()) - 1  # -1: nothing is left
        nothing = {"precision": 0.0 if found.pairs else np.nan, "recall": 0.0 if found.recall_pairs else np.nan}
        shares = {name: float(getattr(found, name)[place]) for name in ("precision", "recall", "matches") if place >= 0}
        line = {"threshold": float(threshold), **(shares or {**nothing, "matches": 0.0})}
        lines.append({**line, "pairs": found.pairs, "recall_pairs": found.recall_pairs})
    return lines


def calibration(judged: Sequence[Judged], bins: int = 10) -> List[Dict[str, float]]:
    """Share of correct matches among those whose score falls in each of `bins` equal parts of 0..1, but empty ones."""
    scores, correct = (np.concatenate([[], *(getattr(one, name) for one in judged)]) for name in ("scores", "correct"))
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
    """Expected calibration error: mean of |confidence - precision|, weighted by matches (Guo et al. 2017)."""
    total = sum(line["matches"] for line in lines) or float("nan")
    return sum(abs(line["confidence"] - line["precision"]) * line["matches"] for line in lines) / total
