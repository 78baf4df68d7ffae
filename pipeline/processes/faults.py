"""Fault injection for tests; nothing happens unless SG_FAULT is set.

SG_FAULT="kill:rank=1,step=7,phase=ckpt_replace;nan:step=3" names faults, each a kind and a place (rank, step and phase
may be left out). SG_FAULT_ONCE names a folder in which each fault leaves a mark, so that it does not strike again after
a restart.

Kinds: a signal of `SIGNALS` to itself, group-term (or another) to its process group, torchrun (SIGKILL the parent), oom
(CUDA's out-of-memory error), full (disk full), nan (a loss that is not a number). Phases, in the order of a step:
`PHASES`.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Dict, List, NamedTuple, Optional

SIGNALS = {name: getattr(signal, f"SIG{name.upper()}") for name in ("kill", "term", "int", "usr1", "stop")}
GROUP = "group-"
KINDS = (*SIGNALS, *(GROUP + name for name in SIGNALS), "torchrun", "oom", "full", "nan")
PHASES = (
    "load_batch", "forward", "backward", "opt_step", "eval", "ckpt_tmp", "ckpt_fsync", "ckpt_replace", "ckpt_prune",
)  # fmt: skip

_position = {"step": 0}


class Fault(NamedTuple):
    """One fault of SG_FAULT: its kind and its conditions by name."""

    kind: str
    conditions: Dict[str, str]
    index: int


def parse(text: str) -> List[Fault]:
    """The faults named by `text`. Raises ValueError."""
    faults = []
    for index, part in enumerate(filter(None, text.split(";"))):
        kind, _, rest = part.strip().partition(":")
        conditions = dict(item.split("=", 1) for item in rest.split(",") if item)
        if kind not in KINDS or not set(conditions) <= {"rank", "step", "phase"}:
            raise ValueError(f"SG_FAULT: {part!r}: must be one of {', '.join(KINDS)} with rank, step, phase")
        if conditions.get("phase", PHASES[0]) not in PHASES:
            raise ValueError(f"SG_FAULT: phase {conditions['phase']!r}: must be one of {', '.join(PHASES)}")
        faults.append(Fault(kind, conditions, index))
    return faults


def at_step(step: int) -> None:
    """Set the current global step of the training."""
    _position["step"] = step


def at(phase: str, step: Optional[int] = None) -> bool:
    """Inject the fault planned for this place; True if the caller has to carry it out (nan).

    step: for code that runs ahead of the training, such as the loader.
    """
    text = os.environ.get("SG_FAULT")
    if not text:
        return False
    here = {"rank": os.environ.get("RANK", "0"), "phase": phase}
    here["step"] = str(_position["step"] if step is None else step)
    struck = False
    for fault in parse(text):
        # a fault without a phase strikes at the start of the forward pass
        wanted = {"phase": "forward", **fault.conditions}
        if all(here[name] == value for name, value in wanted.items()) and _first_time(fault):
            struck = _strike(fault.kind) or struck
    return struck


def _first_time(fault: Fault) -> bool:
    folder = os.environ.get("SG_FAULT_ONCE")
    if not folder:
        return True
    # a fault without a rank strikes every rank once
    mark = os.path.join(folder, f"fault-{fault.index}-rank-{os.environ.get('RANK', '0')}")
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _strike(kind: str) -> bool:
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind.startswith(GROUP):
        os.killpg(0, SIGNALS[kind[len(GROUP) :]])
    elif kind == "torchrun":
        os.kill(os.getppid(), signal.SIGKILL)
    elif kind == "oom":
        raise RuntimeError("CUDA out of memory (a fault on purpose)")
    elif kind == "full":
        raise OSError(errno.ENOSPC, "No space left on device (a fault on purpose)")
    return kind == "nan"
