"""From a batch to its loss, inside one module, so that DistributedDataParallel sees the whole forward pass."""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.training.loss import assignment_loss
from superglue_sift.assignment import Assignments
from superglue_sift.batch import ON_HOST, PairBatch
from superglue_sift.packing import Layout
from superglue_sift.superglue import SuperGlue, mutual_matches
from superglue_sift.torch_compat import autocast
from superglue_sift.truth import IGNORED, ground_truth


class MatchingObjective(nn.Module):
    """SuperGlue with its ground truth and loss."""

    def __init__(
        self, model: SuperGlue, positive_px: float, negative_px: float, precision: str = "float32"
    ) -> None:
        super().__init__()
        # DistributedDataParallel lays its buckets out in the order of the modules: that in which they work
        layers = (layer for pair in zip(model.self_attention, model.cross_attention) for layer in pair)
        self.in_order = nn.ModuleList(
            [model.descriptor_projection, model.keypoint_encoder, *layers, model.final_projection]
        )
        self.model = model
        self.positive_px, self.negative_px, self.precision = positive_px, negative_px, precision

    def forward(self, batch, wait: bool = True) -> Tuple[Tensor, Dict[str, Tensor]]:
        """Loss of a batch with homographies, any number of pairs, none included.

        Args:
            wait: for a GPU to say which pairs float32 cannot hold, and do these in the log domain; else their loss and
                the gradient are nan.

        Returns:
            The sum (not the mean) of the pairs' losses, (1,) float32: the caller divides by the number of
            pairs of the whole step, which this rank does not know. And by name the values of each pair, (B,).
        """
        layout = Layout(batch)
        with autocast(layout.device.type, self.precision):
            descriptors = self.model.matching_descriptors(batch, layout)
            if wait:
                log_assignments = self.model.assign(descriptors, layout)
            else:
                log_P, finite = self.model.transport(descriptors, layout)
                log_assignments = Assignments.padded(log_P, layout.sizes)
        losses = assignment_loss(log_assignments, ground_truth(batch, self.positive_px, self.negative_px))
        if not wait:
            sure = losses.total.new_ones(()).masked_fill(~finite, math.nan)
            losses = losses._replace(total=losses.total * sure)
        # every parameter joins the graph on every rank, also where no pair has a match to learn from:
        # a gradient that one rank does not compute would leave the others waiting for it
        total = losses.total.sum() + 0.0 * (descriptors.float().sum() + self.model.dustbin)
        return total.reshape(1), {
            "loss": losses.total.detach(),
            "loss_positive": losses.positive,
            "loss_unmatched": (losses.unmatched0 + losses.unmatched1) / 2,
        }


class DataParallelObjective(nn.Module):
    """The objective over all GPUs of one process (torch's DataParallel), for comparison with one process each.

    DataParallel scatters tensors and nothing else, so a batch travels as its tensors. Without several GPUs it
    is the objective itself.
    """

    def __init__(self, objective: MatchingObjective) -> None:
        super().__init__()
        self.parallel = nn.DataParallel(_FromTensors(objective))

    def forward(self, batch, wait: bool = True) -> Tuple[Tensor, Dict[str, Tensor]]:
        """As `MatchingObjective.forward`."""
        total, parts = self.parallel(*vars(batch).values(), wait=wait)
        return total.sum().reshape(1), parts


class _FromTensors(nn.Module):
    def __init__(self, objective: MatchingObjective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, *tensors: Tensor, wait: bool) -> Tuple[Tensor, Dict[str, Tensor]]:
        batch = PairBatch(*tensors)
        counts = {name: getattr(batch, name).cpu() for name in ON_HOST}
        return self.objective(dataclasses.replace(batch, **counts), wait)


CONFIDENCE_BINS = 500  # of the histograms from which a threshold is chosen: steps of 0.002


@torch.no_grad()
def validation_sums(objective: MatchingObjective, batch) -> Dict[str, np.ndarray]:
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
        "pairs": np.float64(len(batch)),
        "true": (truth.matches0 >= 0).sum().cpu().numpy().astype(np.float64),
        "predicted": _histogram(scores[judged]),
        "correct": _histogram(scores[correct]),
        "loss": losses.total.sum().double().cpu().numpy(),
        "loss_positive": losses.positive.sum().double().cpu().numpy(),
        "loss_unmatched": ((losses.unmatched0.sum() + losses.unmatched1.sum()) / 2).double().cpu().numpy(),
    }


def _histogram(confidences: Tensor) -> np.ndarray:
    return np.histogram(confidences.float().cpu().numpy(), CONFIDENCE_BINS, (0.0, 1.0))[0].astype(np.float64)
