"""From a batch to its loss, in one module, so that DistributedDataParallel sees the whole forward pass.

The loss of a pair is the negative log-likelihood of its true assignment (SuperGlue, equation 10), divided by the
number of terms of the sum: the mean of -log P_ij over the matches, -log P_i,dustbin over the unmatched keypoints of
image 0 and -log P_dustbin,j over those of image 1. Ignored keypoints do not count; without any term the loss is 0.
Half of the weight for the matches and half for the unmatched teaches less (docs/recipe.md). Only these entries are
gathered; there is no dense target.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from superglue_sift.batch import ON_HOST, PairBatch
from superglue_sift.network.packing import Assignments, Layout
from superglue_sift.network.superglue import SuperGlue
from superglue_sift.torch_compat import autocast
from superglue_sift.truth import UNMATCHED, Truth, ground_truth


class PairLoss(NamedTuple):
    """Losses of the pairs, (B,) float32 each. `total` is differentiable; its parts are detached."""

    total: Tensor
    positive: Tensor
    unmatched0: Tensor
    unmatched1: Tensor


def assignment_loss(log_assignments: Assignments, truth: Truth) -> PairLoss:
    """Loss of each pair.

    Args:
        log_assignments: of B pairs, the output of `SuperGlue`.
        truth: of the batch, (B, M) and (B, N).

    Returns:
        PairLoss; a pair without any keypoint has loss 0.
    """
    losses = -log_assignments.at(truth.matches0, truth.matches1)  # (B, M + N)
    M = truth.matches0.shape[1]
    matches = torch.cat([truth.matches0, truth.matches1], 1)
    matched, unmatched = matches[:, :M] >= 0, matches == UNMATCHED
    none = losses.new_zeros(())
    right = torch.where(matched, losses[:, :M], none)
    lost = torch.where(unmatched, losses, none).split([M, losses.shape[1] - M], 1)
    sums = torch.stack([part.sum(1) for part in (right, *lost)])
    numbers = torch.stack([matched.sum(1), unmatched[:, :M].sum(1), unmatched[:, M:].sum(1)])
    means = sums / numbers.clamp(min=1)
    total = sums.sum(0) / numbers.sum(0).clamp(min=1)
    return PairLoss(total, *means.detach())


class MatchingObjective(nn.Module):
    """SuperGlue with its ground truth and loss."""

    def __init__(self, model: SuperGlue, positive_px: float, negative_px: float, precision: str = "float32") -> None:
        super().__init__()
        # DistributedDataParallel fills its buckets in the order in which modules are registered
        self.in_order = nn.ModuleList(model.in_order)
        self.model = model
        self.positive_px, self.negative_px, self.precision = positive_px, negative_px, precision

    def forward(
        self, batch: PairBatch, wait: bool = True, layout: Optional[Layout] = None
    ) -> Tuple[Tensor, Dict[str, Tensor]]:
        """Loss of a batch with homographies, any number of pairs, none included.

        Args:
            layout: of the batch, if it is sorted as `Layout.sorted` does; None: sort it.
            wait: compute pairs that overflow float32 in the log domain, for which the host waits for the GPU;
                otherwise their loss and the gradient are nan.

        Returns:
            The sum (not the mean) of the pairs' losses, (1,) float32, since this rank does not know the number of
            pairs of the whole step; and the values of each pair by name, (B,).
        """
        if layout is None:
            batch, layout = Layout.sorted(batch)
        # before the network: its large matrices are freed before activations take memory
        truth = ground_truth(batch, self.positive_px, self.negative_px, layout)
        with autocast(layout.device.type, self.precision):
            descriptors = self.model.matching_descriptors(batch, layout)
            finite = None
            if wait:
                log_assignments = self.model.assign(descriptors, layout)
            else:
                log_assignments, finite = self.model.transport(descriptors, layout)
        losses = assignment_loss(log_assignments, truth)
        if finite is not None:
            one_or_nan = losses.total.new_ones(()).masked_fill(~finite, math.nan)
            losses = losses._replace(total=losses.total * one_or_nan)
        # Every rank needs every parameter in its graph, even without a match to learn from: otherwise the other ranks
        # wait for a gradient that this one does not compute.
        total = losses.total.sum()
        if wait or not layout.sizes:  # else the gradient of `transport` reaches every parameter
            total = total + 0.0 * (descriptors.float().sum() + self.model.dustbin)
        values = {
            "loss": losses.total.detach(),
            "loss_positive": losses.positive,
            "loss_unmatched": (losses.unmatched0 + losses.unmatched1) / 2,
        }
        return total.reshape(1), {name: layout.unsorted(value) for name, value in values.items()}


class DataParallelObjective(nn.Module):
    """The objective over all GPUs of one process (torch's DataParallel), to compare with one process per GPU.

    DataParallel scatters only tensors, so a batch is passed as its tensors.
    """

    def __init__(self, objective: MatchingObjective) -> None:
        super().__init__()
        self.parallel = nn.DataParallel(_FromTensors(objective))

    def forward(self, batch: PairBatch, wait: bool = True) -> Tuple[Tensor, Dict[str, Tensor]]:
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
