"""Validation on held-out pairs, sharded over the ranks: every rank sums its share, one reduction, then division."""

from __future__ import annotations

from typing import Dict, List

import torch

from pipeline.features.store import Store
from pipeline.pairs.loader import load_batch
from pipeline.pairs.order import Sample, rank_slice
from pipeline.runtime import distributed
from pipeline.training.objective import MatchingObjective, validation_sums

MATCH_THRESHOLD = 0.2  # the paper's, for precision and recall


def validate(
    objective: MatchingObjective,
    store: Store,
    samples: List[Sample],
    max_keypoints: int,
    context: distributed.Context,
    batch: int = 16,
) -> Dict[str, float]:
    """Loss and its parts, precision, recall and their harmonic mean `f1` over all `samples`, on every rank.

    The same figures for any number of processes, to rounding. `pairs` is the number behind the means.
    """
    share = samples[rank_slice(len(samples), context.rank, context.world_size)]
    model = objective.model
    was_training = model.training
    model.eval()
    # sums of nothing, so that a rank without a pair has every name too
    empty = load_batch(store, [], max_keypoints).to(context.device)
    sums = validation_sums(objective, empty, MATCH_THRESHOLD)
    with torch.no_grad():
        for start in range(0, len(share), batch):
            pairs = load_batch(store, share[start : start + batch], max_keypoints).to(context.device)
            for name, value in validation_sums(objective, pairs, MATCH_THRESHOLD).items():
                sums[name] += value
    model.train(was_training)
    return _figures(distributed.reduce_dict(sums))


def _figures(sums: Dict[str, float]) -> Dict[str, float]:
    pairs = max(sums["pairs"], 1.0)
    precision = sums["correct"] / max(sums["predicted"], 1.0)
    recall = sums["correct"] / max(sums["true"], 1.0)
    return {
        "loss": sums["loss"] / pairs,
        "loss_positive": sums["loss_positive"] / pairs,
        "loss_unmatched": sums["loss_unmatched"] / pairs,
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / max(precision + recall, 1e-12),
        "pairs": sums["pairs"],
    }
