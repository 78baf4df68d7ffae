"""Validation on held-out pairs, sharded over the ranks: sums and counts first, one exchange, then division."""

from __future__ import annotations

from typing import Dict, List

import numpy as np
import torch
from torch import Tensor

from pipeline.features.store import Store
from pipeline.pairs.loader import load_batch
from pipeline.pairs.order import Sample, rank_slice
from pipeline.runtime import distributed
from pipeline.training.objective import MatchingObjective, assignment_loss
from superglue_sift.batch import PairBatch
from superglue_sift.superglue import mutual_matches
from superglue_sift.truth import IGNORED, ground_truth

CONFIDENCE_BINS = 500  # of the histograms from which a threshold is chosen: steps of 0.002
CHUNK = 8  # pairs computed together, fixed so that the figures do not depend on the number of processes

# Photographs from which a threshold can be chosen; of fewer it is noise, and that of the weights begun from stays.
ENOUGH_IMAGES = 16


def validate(
    objective: MatchingObjective, store: Store, samples: List[Sample], max_keypoints: int, context: distributed.Context
) -> Dict[str, float]:
    """Loss and its parts, and how well matches are separated, over all `samples`, on every rank.

    `f1` is the largest harmonic mean of precision and recall over all thresholds of the confidence: a fixed one would
    rather measure where the confidences lie, which moves all through a training. `threshold`, `precision` and `recall`
    are those there. The same figures for any number of processes. `pairs` is the number behind the means.
    """
    chunks = [samples[start : start + CHUNK] for start in range(0, len(samples), CHUNK)]
    model = objective.model
    was_training = model.training
    model.eval()
    own = []
    with torch.no_grad():
        for chunk in chunks[rank_slice(len(chunks), context.rank, context.world_size)]:
            batch = load_batch(store, chunk, max_keypoints).to(context.device)
            own.append(_sums(objective, batch))
    model.train(was_training)
    sums: Dict[str, np.ndarray] = {}
    # every rank adds the same chunks in the same order: not a bit depends on the number of processes
    for part in [part for parts in distributed.all_gather(own) for part in parts]:
        for name, value in part.items():
            sums[name] = sums.get(name, np.float64(0.0)) + value
    return _figures(sums)


@torch.no_grad()
def _sums(objective: MatchingObjective, batch: PairBatch) -> Dict[str, np.ndarray]:
    """Sums of a batch from which the loss, and precision and recall at any threshold, of any set of batches follow.

    Returns:
        () float64 each: `pairs`, `true` matches in the truth, and the sums of `MatchingObjective.forward`; and
        (CONFIDENCE_BINS,) float64, by confidence: `predicted`, mutual best matches whose keypoint in image 0 is not
        ignored by the truth, and `correct`, those of them equal to the truth.
    """
    log_assignments = objective.model(batch)
    truth = ground_truth(batch, objective.positive_px, objective.negative_px)
    losses = assignment_loss(log_assignments, truth)
    size = (batch.records0.shape[1], batch.records1.shape[1])
    answers = mutual_matches(log_assignments, size, threshold=0.0)
    judged = (answers.matches0 >= 0) & (truth.matches0 != IGNORED)
    correct = judged & (answers.matches0 == truth.matches0)
    scores = answers.matching_scores0
    return {
        "pairs": np.asarray(float(len(batch))),
        "true": (truth.matches0 >= 0).sum().cpu().numpy().astype(np.float64),
        "predicted": _histogram(scores[judged]),
        "correct": _histogram(scores[correct]),
        "loss": losses.total.sum().double().cpu().numpy(),
        "loss_positive": losses.positive.sum().double().cpu().numpy(),
        "loss_unmatched": ((losses.unmatched0.sum() + losses.unmatched1.sum()) / 2).double().cpu().numpy(),
    }


def _histogram(confidences: Tensor) -> np.ndarray:
    return np.histogram(confidences.float().cpu().numpy(), CONFIDENCE_BINS, (0.0, 1.0))[0].astype(np.float64)


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
        "threshold": best / len(precision),
        "pairs": float(sums["pairs"]),
    }
