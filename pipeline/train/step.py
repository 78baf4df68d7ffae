"""One optimiser step: the gradient of the mean loss over all pairs of all ranks, clipping and
update.
"""

from __future__ import annotations

import contextlib
import math
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor, nn

from pipeline import compat
from superglue_sift.batch import PairBatch

CLIP_NORM = 1.0  # largest norm of the gradient: no single batch moves the weights far

Values = Dict[str, List[Tensor]]  # by name: for each micro-batch the values of its pairs


class StepResult(NamedTuple):
    """Result of a step.

    sums: this rank's sums by name (see MatchingObjective) and its number of `pairs`; grad_norm:
    before clipping; applied: False if the gradient was not finite; bad_pairs: indices of this
    rank's pairs with a loss that was not.
    """

    sums: Dict[str, float]
    grad_norm: float
    applied: bool
    bad_pairs: List[int]


def train_step(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler,
    micro_batches: Sequence[PairBatch],
    pairs: int,
    world_size: int,
    clip_norm: float,
) -> StepResult:
    """One step over this rank's micro-batches.

    Each rank computes the gradient of (sum of its losses) * world size / (pairs of all ranks), and
    DistributedDataParallel averages these. The result is the gradient of one process with the whole
    batch, also if the ranks have different numbers of pairs, or none.

    Args:
        objective: MatchingObjective, in DistributedDataParallel if there are several processes.
        scaler: torch's GradScaler, enabled for float16 only.
        micro_batches: one or more PairBatches, on the device; gradients are exchanged with the
            last.
        pairs: pairs in this step over all ranks and micro-batches.
        clip_norm: largest norm of the gradient; 0: no clipping.
    """
    last = len(micro_batches) - 1

    def gradient(wait: bool) -> Values:
        values: Values = {}
        optimizer.zero_grad()
        no_sync = getattr(objective, "no_sync", contextlib.nullcontext)
        for i, batch in enumerate(micro_batches):
            with no_sync() if i < last else contextlib.nullcontext():
                _backward(objective, batch, wait, scaler, world_size / pairs, values)
        return values

    return _stepped(gradient, objective, optimizer, scaler, clip_norm, micro_batches[0].device)


def _parameters(optimizer: torch.optim.Optimizer) -> List[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _statistics(objective: nn.Module) -> List[Tensor]:
    return [b for b in objective.buffers() if b.is_floating_point()]


def _copy(sources: List[Tensor], targets: List[Tensor]) -> None:
    for source, target in zip(sources, targets):
        target.copy_(source)


def _backward(
    objective: nn.Module, batch: PairBatch, wait: bool, scaler, weight: float, values: Values
) -> None:
    total, parts = objective(batch, wait)
    scaler.scale(total.sum() * weight).backward()
    for name, value in parts.items():
        values.setdefault(name, []).append(value)


def _attempts(device: torch.device) -> Tuple[bool, ...]:
    """`wait` of each attempt: a GPU waits only if the gradient of the first is not finite."""
    return (True,) if device.type == "cpu" else (False, True)


def _stepped(
    gradient: Callable[[bool], Values],
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler,
    clip_norm: float,
    device: torch.device,
) -> StepResult:
    """Clip and step, unless the gradient is not finite, which leaves running statistics as they
    were.

    The norm is computed after the exchange: it is the same on every rank, and so is the decision.
    """
    statistics = _statistics(objective)
    before = [b.clone() for b in statistics]
    for wait in _attempts(device):
        joined, totals = _enqueued(gradient(wait), optimizer, scaler, clip_norm)
        grad_norm, *sums = totals.tolist()  # the only device-to-host synchronisation of a step
        applied = math.isfinite(grad_norm)
        if applied:
            break
        _copy(before, statistics)
        scaler.update()
    if applied:
        scaler.step(optimizer)
        scaler.update()
    losses = joined["loss"]
    bad = [] if applied else torch.nonzero(~torch.isfinite(losses))[:, 0].tolist()
    return StepResult(
        {**dict(zip(joined, sums)), "pairs": float(losses.numel())}, grad_norm, applied, bad
    )


def _enqueued(
    values: Values, optimizer: torch.optim.Optimizer, scaler, clip_norm: float
) -> Tuple[Dict[str, Tensor], Tensor]:
    """Clip the gradient. Returns the values by name, and (1 + names,) float64: norm before
    clipping, sums.
    """
    scaler.unscale_(optimizer)
    norm = compat.clip_grad_norm_(_parameters(optimizer), clip_norm if clip_norm > 0 else math.inf)
    joined = torch.cat([part for parts in values.values() for part in parts]).view(len(values), -1)
    return dict(zip(values, joined)), torch.cat([norm.reshape(1), joined.sum(1)]).double()
