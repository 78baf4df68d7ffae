"""Validation on held-out pairs, sharded over the ranks: sums and counts first, one exchange, then division."""

from __future__ import annotations

from typing import Dict, List

import torch

from pipeline.features.store import Store
from pipeline.pairs.loader import load_batch
from pipeline.pairs.order import Sample, rank_slice
from pipeline.runtime import distributed
from pipeline.training.objective import MatchingObjective, validation_sums

CHUNK = 8  # pairs computed together, fixed so that the figures do not depend on the number of processes
MATCH_THRESHOLD = 0.2  # the paper's, for precision and recall


def validate(
    objective: MatchingObjective,
    store: Store,
    samples: List[Sample],
    max_keypoints: int,
    context: distributed.Context,
) -> Dict[str, float]:
    """Loss and its parts, precision, recall and their harmonic mean `f1` over all `samples`, on every rank.

    The same figures for any number of processes. `pairs` is the number behind the means.
    """
    chunks = [samples[start : start + CHUNK] for start in range(0, len(samples), CHUNK)]
    model = objective.model
    was_training = model.training
    model.eval()
    own = []
    with torch.no_grad():
        for chunk in chunks[rank_slice(len(chunks), context.rank, context.world_size)]:
            batch = load_batch(store, chunk, max_keypoints).to(context.device)
            own.append(validation_sums(objective, batch, MATCH_THRESHOLD))
    model.train(was_training)
    sums: Dict[str, float] = {}
    # every rank adds the same chunks in the same order: not a bit depends on the number of processes
    for part in [part for parts in distributed.all_gather(own) for part in parts]:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return _figures(sums)


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
