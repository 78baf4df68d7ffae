"""Replicas of a training on the ranks: one state at the start, and the same bits later."""

from __future__ import annotations

import zlib
from typing import Any, Dict, NamedTuple, Optional, Tuple

from torch import Tensor

from pipeline.errors import WorkError
from pipeline.processes import distributed
from pipeline.train.identity import Fingerprint, changed_keys
from pipeline.train.optimization import optimizer_tensors
from pipeline.train.state import TrainState

Saved = Tuple[Dict[str, Tensor], Dict[str, Any]]  # tensors and JSON of a checkpoint


class Writes(NamedTuple):
    """Whether this rank writes checkpoints and curves: one rank for each folder, always rank 0."""

    checkpoints: bool
    curves: bool


def disagreement(ours: Fingerprint) -> str:
    """How another rank's fingerprint differs from that of rank 0, as text; "" if all are equal."""
    first, *others = distributed.all_gather(ours)
    for rank, other in enumerate(others, 1):
        for key in changed_keys(first, other):
            return f"rank {rank} has {key}: {other.get(key)}, rank 0 {first.get(key)}"
    return ""


def furthest(step: int) -> Optional[int]:
    """The first rank with the checkpoint of most steps; None if no rank has one (-1)."""
    steps = distributed.all_gather(step)
    return steps.index(max(steps)) if max(steps) >= 0 else None


def shared(saved: Optional[Saved], source: int) -> Saved:
    """The checkpoint of rank `source`, on every rank."""
    tensors, info = saved or ({}, {})
    return distributed.broadcast_tensors(tensors, source), distributed.broadcast(info, source)


def digest(state: TrainState) -> int:
    """CRC-32 of all parameters and of the optimiser's state, without buffers: unsynchronised
    statistics differ.
    """
    named: Dict[str, Tensor] = {
        **dict(state.model.named_parameters()),
        **optimizer_tensors(state.optimizer),
    }
    crc = 0
    for _, tensor in sorted(named.items()):
        crc = zlib.crc32(tensor.detach().cpu().contiguous().numpy().data, crc)
    return crc


def check(state: TrainState, is_main: bool) -> None:
    """Raises WorkError on rank 0, SystemExit on the others, if the bits of weights or optimiser
    differ between ranks.

    All ranks call it: one collective of two numbers.
    """
    crc = digest(state) if distributed.several() else 0
    if distributed.all_equal(crc):
        return
    first, *others = distributed.all_gather(crc)
    if not is_main:
        raise SystemExit(1)
    wrong = ", ".join(f"rank {rank}" for rank, other in enumerate(others, 1) if other != first)
    raise WorkError(
        f"step {state.step}: weights or optimiser of {wrong} differ from those of rank 0: memory or"
        " network may be at fault. No checkpoint of this step was saved; the same command resumes"
        " from the previous one"
    )
