"""The loss: negative log-likelihood of the true assignment (SuperGlue, equation 10), balanced.

loss of a pair = 1/2 mean over matches of -log P_ij
               + 1/4 mean over unmatched of image 0 of -log P_i,dustbin
               + 1/4 mean over unmatched of image 1 of -log P_dustbin,j

A mean over nothing is 0. The equation's plain sum would let the unmatched, which are many, outweigh the
matches. Ignored keypoints do not count. Only these entries are gathered: no dense target is made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from superglue_sift.assignment import Assignments
from superglue_sift.truth import UNMATCHED, Truth


class PairLoss(NamedTuple):
    """Per pair, (B,) float32 each. `total` is differentiable; the parts are its means, detached."""

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
    dustbin = log_assignments.dustbins
    rows, columns = (torch.arange(t.shape[1], device=t.device) for t in truth)
    # where padded the dustbins' own entry is read, and does not count
    matched = truth.matches0 >= 0
    partners = torch.where(matched, truth.matches0, dustbin.column)
    found0 = log_assignments.entries(torch.minimum(rows, dustbin.row), partners)
    found1 = log_assignments.entries(
        dustbin.row.expand(truth.matches1.shape), torch.minimum(columns, dustbin.column)
    )
    positive = _mean(found0, matched)
    unmatched0, unmatched1 = (
        _mean(found, own == UNMATCHED) for found, own in ((found0, truth.matches0), (found1, truth.matches1))
    )
    total = 0.5 * positive + 0.25 * unmatched0 + 0.25 * unmatched1
    return PairLoss(total, positive.detach(), unmatched0.detach(), unmatched1.detach())


def _mean(log_P: Tensor, counted: Tensor) -> Tensor:
    """Mean of -log P over each row's `counted` entries: (B,)."""
    values = torch.where(counted, -log_P, torch.zeros_like(log_P))
    return values.sum(1) / counted.sum(1).clamp(min=1)
