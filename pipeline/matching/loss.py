"""The loss: negative log-likelihood of the true assignment (SuperGlue, equation 10), balanced.

loss of a pair = 1/2 mean over matches of -log P_ij
               + 1/4 mean over unmatched of image 0 of -log P_i,dustbin
               + 1/4 mean over unmatched of image 1 of -log P_dustbin,j

A mean over nothing is 0. The equation's plain sum would let the unmatched, which are many, outweigh the
matches. Ignored keypoints do not count. Only these entries are gathered: no dense target is made.
"""

from __future__ import annotations

from typing import List, NamedTuple

import torch
from torch import Tensor

from pipeline.matching.truth import UNMATCHED, Truth


class PairLoss(NamedTuple):
    """Per pair, (B,) float32 each. `total` is differentiable; the parts are its means, detached."""

    total: Tensor
    positive: Tensor
    unmatched0: Tensor
    unmatched1: Tensor


def _mean(values: Tensor) -> Tensor:
    return values.sum() / max(values.numel(), 1)


def assignment_loss(log_assignments: List[Tensor], truths: List[Truth]) -> PairLoss:
    """Loss of each pair.

    Args:
        log_assignments: B matrices (m_i + 1, n_i + 1), dustbins last.
        truths: B ground truths.

    Returns:
        PairLoss; a pair without any keypoint has loss 0.
    """
    rows = []
    for log_P, truth in zip(log_assignments, truths):
        left = torch.nonzero(truth.matches0 >= 0)[:, 0]
        positive = _mean(-log_P[left, truth.matches0[left]])
        unmatched0 = _mean(-log_P[:-1, -1][truth.matches0 == UNMATCHED])
        unmatched1 = _mean(-log_P[-1, :-1][truth.matches1 == UNMATCHED])
        rows.append(torch.stack([positive, unmatched0, unmatched1]))
    if not rows:
        empty = torch.zeros(0)
        return PairLoss(empty, empty, empty, empty)
    parts = torch.stack(rows)
    total = parts @ parts.new_tensor([0.5, 0.25, 0.25])
    positive, unmatched0, unmatched1 = parts.detach().unbind(1)
    return PairLoss(total, positive, unmatched0, unmatched1)
