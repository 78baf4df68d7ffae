"""From a batch to its loss, in one module, so that DistributedDataParallel sees the whole forward
pass.

The loss of a pair is the negative log-likelihood of its true assignment (SuperGlue, equation 10),
divided by the number of terms of the sum: the mean of -log P_ij over the matches, -log P_i,dustbin
over the unmatched keypoints of image 0 and -log P_dustbin,j over those of image 1. Ignored
keypoints do not count; without any term the loss is 0. Half of the weight for the matches and half
for the unmatched teaches less (docs/recipe.md). Only these entries are gathered; there is no dense
target.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from superglue_sift.network.batch import ON_HOST, PairBatch
from superglue_sift.network.ground_truth import UNMATCHED, Truth, ground_truth
from superglue_sift.network.superglue import SuperGlue


class PairLoss(NamedTuple):
    """Losses of the pairs, (B,) float32 each. `total` is differentiable; its parts are detached."""

    total: Tensor
    positive: Tensor
    unmatched0: Tensor
    unmatched1: Tensor


def assignment_loss(log_P: Tensor, truth: Truth) -> PairLoss:
    """Loss of each pair.

    Args:
        log_P: (B, M + 1, N + 1), log assignments from `SuperGlue`.
        truth: of the batch, (B, M) and (B, N).

    Returns:
        PairLoss; a pair without any keypoint has loss 0.
    """
    columns = torch.where(truth.matches0 >= 0, truth.matches0, log_P.shape[2] - 1)
    # (B, M): the match, or the dustbin. Gathered from one dimension: before torch 1.13 the gradient
    # of a gather from more dimensions has no deterministic form on a GPU.
    B, M = columns.shape
    rows = torch.arange(B * (M + 1), device=columns.device).view(B, M + 1)[:, :M]
    places = rows * log_P.shape[2] + columns
    losses0 = -log_P.flatten().gather(0, places.flatten()).view(B, M)
    losses1 = -log_P[:, -1, :-1]  # (B, N): the dustbin
    none = losses0.new_zeros(())
    terms = (
        (losses0, truth.matches0 >= 0),
        (losses0, truth.matches0 == UNMATCHED),
        (losses1, truth.matches1 == UNMATCHED),
    )
    sums = torch.stack([torch.where(counted, losses, none).sum(1) for losses, counted in terms])
    numbers = torch.stack([counted.sum(1) for _, counted in terms])
    means = sums / numbers.clamp(min=1)
    total = sums.sum(0) / numbers.sum(0).clamp(min=1)
    return PairLoss(total, *means.detach())


class MatchingObjective(nn.Module):
    """SuperGlue with its ground truth and loss."""

    def __init__(
        self, model: SuperGlue, positive_px: float, negative_px: float, precision: str = "float32"
    ) -> None:
        super().__init__()
        # DistributedDataParallel fills its buckets in the order in which modules are registered
        self.in_order = nn.ModuleList(model.in_order)
        self.model = model
        self.positive_px = positive_px
        self.negative_px = negative_px
        self.precision = precision
        # pairs, keypoints: pad each batch to these, for `compile`
        self.fixed_size: Optional[Tuple[int, int]] = None

    def forward(self, batch: PairBatch, wait: bool = True) -> Tuple[Tensor, Dict[str, Tensor]]:
        """Loss of a batch with homographies, any number of pairs, none included.

        Args:
            wait: compute pairs that overflow float32 in the log domain, for which the host waits
                for the GPU; otherwise their loss and the gradient are nan.

        Returns:
            The sum (not the mean) of the pairs' losses, (1,) float32, since this rank does not know
            the number of pairs of the whole step; and the values of each pair by name, (B,).
        """
        if self.fixed_size:  # which may end with empty pairs
            order, batches = [], [batch.pad(*self.fixed_size)]
        else:
            order, batches = batch.size_classes()
        # before the network: its large matrices are freed before activations take memory
        truths = [self.truth(part) for part in batches]
        log_P, finite = self.model.assign(batches, wait, self.precision)
        parts = [assignment_loss(*each) for each in zip(log_P, truths)]
        losses = PairLoss(*(torch.cat(values) for values in zip(*parts)))
        if not wait:
            one_or_nan = torch.ones_like(losses.total).masked_fill(~finite, math.nan)
            losses = losses._replace(total=losses.total * one_or_nan)
        values = {
            "loss": losses.total.detach(),
            "loss_positive": losses.positive,
            "loss_unmatched": (losses.unmatched0 + losses.unmatched1) / 2,
        }
        if order == sorted(order):
            values = {name: value[: len(batch)] for name, value in values.items()}
        else:
            places = torch.tensor(order).argsort()
            values = {name: value[places] for name, value in values.items()}
        return losses.total.sum().reshape(1), values

    def truth(self, batch: PairBatch) -> Truth:
        """The true matches of a batch."""
        return ground_truth(batch, self.positive_px, self.negative_px)


class DataParallelObjective(nn.Module):
    """The objective over all GPUs of one process (torch's DataParallel), to compare with one
    process per GPU.

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
