"""One optimiser step: the gradient of the mean loss over all pairs of all ranks, and what is done with it."""

from __future__ import annotations

import contextlib
from typing import Dict, NamedTuple, Sequence

import torch
from torch import nn


class StepResult(NamedTuple):
    """sums: this rank's sums by name (see MatchingObjective); grad_norm before clipping; applied: False if skipped."""

    sums: Dict[str, float]
    grad_norm: float
    applied: bool


def train_step(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler,
    micro_batches: Sequence,
    pairs: int,
    world_size: int,
    clip_norm: float,
) -> StepResult:
    """One step over this rank's micro-batches.

    Each rank weighs its gradient by its own number of pairs: the sum of its losses times world size over the
    pairs of all ranks, of which DistributedDataParallel then takes the mean. That is the gradient of one
    process with the whole batch, also when the ranks' shares are uneven or empty.

    A gradient that is not finite is not applied. Its norm is computed after the all-reduce, so every rank
    sees the same norm and all skip the same step without asking each other.

    Args:
        objective: MatchingObjective, perhaps wrapped for several processes.
        scaler: torch.cuda.amp.GradScaler, enabled for float16 only.
        micro_batches: one or more PairBatches, on the device; gradients are exchanged with the last.
        pairs: pairs in this step over all ranks and micro-batches.
        clip_norm: largest norm of the gradient; 0 does not clip.
    """
    optimizer.zero_grad()
    sums: Dict[str, torch.Tensor] = {}
    last = len(micro_batches) - 1
    for i, batch in enumerate(micro_batches):
        wait = objective.no_sync() if i < last and hasattr(objective, "no_sync") else contextlib.nullcontext()
        with wait:
            total, parts = objective(batch)
            scaler.scale(total * (world_size / pairs)).backward()
        for name, value in parts.items():
            sums[name] = sums.get(name, 0.0) + value
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm if clip_norm > 0 else float("inf"))
    grad_norm = float(norm)
    finite = grad_norm == grad_norm and grad_norm != float("inf")
    if finite:
        scaler.step(optimizer)
    scaler.update()
    return StepResult({name: float(value) for name, value in sums.items()}, grad_norm, finite)
