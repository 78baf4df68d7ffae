"""Validation on held-out pairs, sharded over the ranks: sums and counts first, one exchange, then division."""

from __future__ import annotations

from typing import Dict, List

import numpy as np
import torch

from pipeline.features.store import Store
from pipeline.pairs.loader import load_batch
from pipeline.pairs.order import Sample, rank_slice
from pipeline.runtime import distributed
from pipeline.training.objective import MatchingObjective, validation_sums

CHUNK = 8  # pairs computed together, fixed so that the figures do not depend on the number of processes

# The threshold a model is given weighs precision twice as much as recall: an estimator suffers more from a wrong match
# than from a missing one.
THRESHOLD_BETA = 0.5


def validate(
    objective: MatchingObjective,
    store: Store,
    samples: List[Sample],
    max_keypoints: int,
    context: distributed.Context,
) -> Dict[str, float]:
    """Loss and its parts, and how well the matches are told apart, over all `samples`, on every rank.

    `f1` is the largest harmonic mean of precision and recall over all thresholds of the confidence: a fixed one would
    rather measure where the confidences lie, which moves all through a training. `threshold` is that of the best F0.5,
    and `precision` and `recall` are those there. The same figures for any number of processes. `pairs` is the number
    behind the means.
    """
    chunks = [samples[start : start + CHUNK] for start in range(0, len(samples), CHUNK)]
    model = objective.model
    was_training = model.training
    model.eval()
    own = []
    with torch.no_grad():
        for chunk in chunks[rank_slice(len(chunks), context.rank, context.world_size)]:
            batch = load_batch(store, chunk, max_keypoints).to(context.device)
            own.append(validation_sums(objective, batch))
    model.train(was_training)
    sums: Dict[str, np.ndarray] = {}
    # every rank adds the same chunks in the same order: not a bit depends on the number of processes
    for part in [part for parts in distributed.all_gather(own) for part in parts]:
        for name, value in part.items():
            sums[name] = sums.get(name, np.float64(0.0)) + value
    return _figures(sums)


def _figures(sums: Dict[str, np.ndarray]) -> Dict[str, float]:
    pairs = max(float(sums["pairs"]), 1.0)
    # at the lower edge of each bin of confidence
    correct, predicted = (np.cumsum(sums[name][::-1])[::-1] for name in ("correct", "predicted"))
    precision = correct / np.maximum(predicted, 1.0)
    recall = correct / max(float(sums["true"]), 1.0)
    chosen = int(_f_score(precision, recall, THRESHOLD_BETA).argmax())
    return {
        "loss": float(sums["loss"]) / pairs,
        "loss_positive": float(sums["loss_positive"]) / pairs,
        "loss_unmatched": float(sums["loss_unmatched"]) / pairs,
        "precision": float(precision[chosen]),
        "recall": float(recall[chosen]),
        "f1": float(_f_score(precision, recall, 1.0).max()),
        "threshold": chosen / len(precision),
        "pairs": float(sums["pairs"]),
    }


def _f_score(precision: np.ndarray, recall: np.ndarray, beta: float) -> np.ndarray:
    """Recall counts `beta` times as much as precision (van Rijsbergen 1979, chapter 7)."""
    return (1 + beta**2) * precision * recall / np.maximum(beta**2 * precision + recall, 1e-12)
