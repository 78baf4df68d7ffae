"""The copies of a training that the ranks hold: one state when they begin, and still the same bits later."""

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
    """What this rank writes: checkpoints, and curves. Of each folder one rank; rank 0 always."""

    checkpoints: bool
    curves: bool


def disagreement(ours: Fingerprint) -> str:
    """What the fingerprint of another rank has else than that of rank 0, in words; "" where all are equal."""
    first, *others = distributed.all_gather(ours)
    for rank, other in enumerate(others, 1):
        for key in changed_keys(first, other):
            return f"rank {rank} has {key}: {other.get(key)}, rank 0 {first.get(key)}"
    return ""


def furthest(step: int) -> Optional[int]:
    """The rank that has the checkpoint of most steps, the first of several; None: no rank has one (-1)."""
    steps = distributed.all_gather(step)
    return steps.index(max(steps)) if max(steps) >= 0 else None


def shared(found: Optional[Saved], source: int) -> Saved:
    """The checkpoint that rank `source` found, on every rank."""
    tensors, info = found or ({}, {})
    return distributed.broadcast_tensors(tensors, source), distributed.broadcast(info, source)


def digest(state: TrainState) -> int:
    """CRC-32 of all parameters and of the optimiser's memory.

    Buffers are left out: statistics that are not synchronised are another on every rank.
    """
    named: Dict[str, Tensor] = {**dict(state.model.named_parameters()), **optimizer_tensors(state.optimizer)}
    found = 0
    for _, tensor in sorted(named.items()):
        found = zlib.crc32(tensor.detach().cpu().contiguous().numpy().data, found)
    return found


def check(state: TrainState, is_main: bool) -> None:
    """Raises WorkError on rank 0, SystemExit on the others: parameters or optimiser are not everywhere the same bits.

    All ranks call it: one collective of two numbers.
    """
    own = digest(state) if distributed.several() else 0
    if distributed.all_equal(own):
        return
    first, *others = distributed.all_gather(own)
    if not is_main:
        raise SystemExit(1)
    wrong = ", ".join(f"rank {rank}" for rank, other in enumerate(others, 1) if other != first)
    raise WorkError(
        f"step {state.step}: weights or optimiser of {wrong} differ from those of rank 0: memory or network may be at "
        "fault. No checkpoint was saved of this; the same command goes on from the one before"
    )
