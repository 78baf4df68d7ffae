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


def validate(
    objective: MatchingObjective,
    store: Store,
    samples: List[Sample],
    max_keypoints: int,
    context: distributed.Context,
) -> Dict[str, float]:
    """Loss and its parts, and how well the matches are told apart, over all `samples`, on every rank.

    `f1` is the largest harmonic mean of precision and recall over all thresholds of the confidence; `precision`,
    `recall` and `threshold` are those it is reached at. A fixed threshold would rather measure where the confidences
    lie, which moves all through a training. The same figures for any number of processes. `pairs` is the number
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
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = int(f1.argmax())
    return {
        "loss": float(sums["loss"]) / pairs,
        "loss_positive": float(sums["loss_positive"]) / pairs,
        "loss_unmatched": float(sums["loss_unmatched"]) / pairs,
        "precision": float(precision[best]),
        "recall": float(recall[best]),
        "f1": float(f1[best]),
        "threshold": best / len(f1),
        "pairs": float(sums["pairs"]),
    }
