"""One optimiser step: the gradient of the mean loss over all pairs of all ranks, clipping and
update.
"""

from __future__ import annotations

import contextlib
import math
from typing import Dict, List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor, nn

from superglue_sift.network.batch import PairBatch

CLIP_NORM = 1.0  # largest norm of the gradient: no single batch moves the weights far


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
) -> StepResult:
    """One step over this rank's micro-batches; a gradient that is not finite is not applied.

    Each rank computes the gradient of (sum of its losses) * world size / (pairs of all ranks), and
    DistributedDataParallel averages these. The result is the gradient of one process with the whole
    batch, also if the ranks have different numbers of pairs, or none.

    Args:
        objective: MatchingObjective, in DistributedDataParallel if there are several processes.
        scaler: torch's GradScaler, enabled for float16 only.
        micro_batches: one or more PairBatches, on the device; gradients are exchanged with the
            last.
        pairs: pairs in this step over all ranks and micro-batches.
    """
    # running statistics of `norm: batch`, which a gradient that is not finite leaves as they were
    statistics = [b for b in objective.buffers() if b.is_floating_point()]
    before = [b.clone() for b in statistics]
    for wait in _attempts(micro_batches[0].device):
        optimizer.zero_grad()
        names, values = backward(objective, scaler, micro_batches, world_size / pairs, wait)
        totals = clip_and_sum(values, optimizer, scaler)
        grad_norm, *sums = totals.tolist()  # the only device-to-host synchronisation of a step
        # taken after the exchange, so that all ranks decide alike
        applied = math.isfinite(grad_norm)
        if applied:
            optimizer.step()  # `scaler.step` would read whether the gradient is finite once more
        else:
            for statistic, old in zip(statistics, before):
                statistic.copy_(old)
        scaler.update()
        if applied:
            break
    losses = values[names.index("loss")]
    bad = [] if applied else torch.nonzero(~torch.isfinite(losses))[:, 0].tolist()
    all_sums = {**dict(zip(names, sums)), "pairs": float(losses.numel())}
    return StepResult(all_sums, grad_norm, applied, bad)


def _attempts(device: torch.device) -> Tuple[bool, ...]:
    """`wait` of each attempt: a GPU waits only if the gradient of the first is not finite."""
    return (True,) if device.type == "cpu" else (False, True)


def backward(
    objective: nn.Module, scaler, micro_batches: Sequence[PairBatch], weight: float, wait: bool
) -> Tuple[List[str], Tensor]:
    """Add the gradient of the sum of losses, times `weight`, of all micro-batches.

    Returns the names of the V values of a pair (see MatchingObjective), and the values, (V, B).
    """
    values: Dict[str, List[Tensor]] = {}
    no_sync = getattr(objective, "no_sync", contextlib.nullcontext)
    for number, batch in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else no_sync():
            total, parts = objective(batch, wait)
            scaler.scale(total.sum() * weight).backward()
        for name, value in parts.items():
            values.setdefault(name, []).append(value)
    joined = torch.cat([value for each in values.values() for value in each])
    return list(values), joined.view(len(values), -1)


def clip_and_sum(values: Tensor, optimizer: torch.optim.Optimizer, scaler) -> Tensor:
    """Clip the gradient and add up the logged values (V, B), so that the host reads the GPU once.

    Returns (1 + V,) float64: the norm of the gradient before clipping, and the sum of each value.
    """
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
    return torch.cat([norm.reshape(1), values.sum(1)]).double()
