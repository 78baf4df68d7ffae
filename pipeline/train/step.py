"""One step of a training, along the gradient of the mean loss over all pairs of all ranks."""

from __future__ import annotations

import contextlib
import math
from typing import Any, List, Sequence, Tuple

import torch
from torch import Tensor, nn

from pipeline.train.checkpoint import Metrics
from pipeline.train.data import PairBatch

CLIP_NORM = 1.0  # Largest norm of the gradient, so that no single batch moves the weights far


def train_step(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    micro_batches: Sequence[PairBatch],
    pairs: int,
    world_size: int,
) -> Tuple[Metrics, float, Tensor]:
    """Do one step over this rank's micro-batches. A gradient that is not finite is not applied.

    Each rank computes the gradient of (sum of its losses) * world size / (pairs of all ranks), and
    DistributedDataParallel averages these. The result is the gradient of one process with the whole
    batch, also if the ranks have different numbers of pairs, or none.

    Args:
        objective: MatchingObjective, in DistributedDataParallel if there are several processes.
        optimizer: what changes the weights.
        scaler: torch's GradScaler, enabled for float16 only.
        micro_batches: one or more PairBatches, on the device. Gradients are exchanged with the
            last.
        pairs: number of pairs in this step over all ranks and micro-batches.
        world_size: number of ranks.

    Returns:
        Three values. The first has this rank's sums of the values of `MatchingObjective.forward`,
        by name, and its number of `pairs`. The second is the norm of the gradient before clipping.
        The gradient was applied if this norm is finite. The third, (B,), is the loss of each of
        this rank's pairs. It stays on the device, and is not read.
    """
    # A gradient that is not finite must not change the running statistics of `norm: batch`.
    statistics = [b for b in objective.buffers() if b.is_floating_point()]
    saved_statistics = [b.clone() for b in statistics]
    for repair_overflow in _list_attempts(micro_batches[0].device):
        weight = world_size / pairs
        names, totals, losses = compute_clipped_gradient(
            objective, optimizer, scaler, micro_batches, weight, repair_overflow
        )
        grad_norm, *sums = totals.tolist()  # The only device-to-host synchronization of a step
        # The norm is taken after the exchange of gradients, so all ranks decide alike.
        if math.isfinite(grad_norm):
            optimizer.step()  # Method `scaler.step` would wait for the GPU once more
            scaler.update()
            break
        for statistic, saved in zip(statistics, saved_statistics):
            statistic.copy_(saved)
        scaler.update()
    pairs_here = sum(len(batch) for batch in micro_batches)
    return {**dict(zip(names, sums)), "pairs": float(pairs_here)}, grad_norm, losses


def _list_attempts(device: torch.device) -> Tuple[bool, ...]:
    """Return whether each attempt at a step repairs overflow.

    On a GPU only the second attempt does, since the host would wait for the GPU.
    """
    return (True,) if device.type == "cpu" else (False, True)


def compute_clipped_gradient(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    micro_batches: Sequence[PairBatch],
    weight: float,
    repair_overflow: bool,
) -> Tuple[List[str], Tensor, Tensor]:
    """Compute the gradient of the sum of all losses, times `weight`, and clip it.

    Args:
        objective: MatchingObjective, in DistributedDataParallel if there are several processes.
        optimizer: has the parameters, whose gradients are set.
        scaler: torch's GradScaler, enabled for float16 only.
        micro_batches: one or more PairBatches, on the device.
        weight: factor of the losses.
        repair_overflow: as in `MatchingObjective.forward`.

    Returns:
        Three values. The first has the names of the V values of a pair (`MatchingObjective`). The
        second is (1 + V,) float64: the norm of the gradient before clipping, and the sum of each
        value over all pairs. The third, (B,), is the loss of each pair.
    """
    optimizer.zero_grad()
    values = []  # The values of each micro-batch, by name
    no_sync = getattr(objective, "no_sync", contextlib.nullcontext)
    for position, batch in enumerate(micro_batches, 1):
        is_last = position == len(micro_batches)
        # Only the last micro-batch exchanges gradients between the ranks.
        with contextlib.nullcontext() if is_last else no_sync():
            total, pair_values = objective(batch, repair_overflow)
            scaler.scale(total.sum() * weight).backward()
        values.append(pair_values)
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
    # (V, B): one tensor for all micro-batches, so that the host reads the GPU once
    names = list(values[0])
    joined = torch.cat([pair_values[name] for name in names for pair_values in values]).view(
        len(names), -1
    )
    totals = torch.cat([norm.reshape(1), joined.sum(1)]).double()
    return names, totals, joined[names.index("loss")]
