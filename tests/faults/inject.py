"""Fault injection: `install` patches the stage of this process, which a test started.

SG_FAULT="kill:rank=1,step=7,phase=ckpt_replace;nan:step=3" names faults of a training, each a kind
and a place (rank, step and phase may be left out). SG_FAULT_ONCE names a folder in which each fault
leaves a mark, so that it does not strike again after a restart.

Kinds: a signal to itself (kill, term, int, usr1, stop), group-term (or another) to its process
group, full (disk full), nan (a loss that is not a number), scale
(a weight of this rank times 1.5 after the step).
Phases, in the order of a step: `PHASES`. `scale` has the phase `stepped`.
"""

import errno
import functools
import math
import os
import signal
from pathlib import Path

PHASES = ("load_batch", "forward", "backward", "opt_step", "eval")
PHASES += ("ckpt_fsync", "ckpt_replace", "ckpt_prune")

_now = {"step": 0, "saving": False}


def at(phase, step=None):
    """Inject the faults planned for this place. True if the caller has to carry one out (nan,
    scale).

    Raises KeyError for a kind that is not known.
    """
    here = {"rank": os.environ.get("RANK", "0"), "phase": phase}
    here["step"] = str(_now["step"] if step is None else step)
    struck = False
    for index, part in enumerate(os.environ["SG_FAULT"].split(";")):
        kind, _, rest = part.partition(":")
        # a fault without a phase strikes at the start of the forward pass
        wanted = {"phase": "forward", **dict(item.split("=") for item in rest.split(",") if item)}
        if all(here[name] == value for name, value in wanted.items()) and _is_first_time(index):
            struck |= _strike(kind)
    return struck


def _is_first_time(index):
    if "SG_FAULT_ONCE" not in os.environ:
        return True
    # a fault without a rank strikes every rank once
    name = f"fault-{index}-rank-{os.environ.get('RANK', '0')}"
    mark = Path(os.environ["SG_FAULT_ONCE"], name)
    is_first = not mark.exists()
    mark.touch()
    return is_first


def _strike(kind):
    if kind in ("nan", "scale"):
        return True
    if kind == "full":
        raise OSError(errno.ENOSPC, "No space left on device (a fault on purpose)")
    # a signal to this process, or to all of its group
    name = kind.rpartition("-")[2]
    number = signal.Signals[f"SIG{name.upper()}"]
    os.kill(os.getpid() if name == kind else 0, number)
    return False


def install():
    """Patch this process, if SG_FAULT names faults."""
    if not os.environ.get("SG_FAULT"):
        return
    from pipeline.train import checkpoint, data, loss, train

    _wrap(data.StepBatches, "load", lambda inner, self, n: (at("load_batch", n), inner(self, n))[1])
    _wrap(train, "compute_learning_rate", _begin_step)
    _wrap(train, "train_step", _step)
    _wrap(
        loss.Validation,
        "compute_metrics",
        lambda inner, *arguments: (at("eval"), inner(*arguments))[1],
    )
    _wrap(loss.MatchingObjective, "forward", _forward)
    for name in ("save", "save_best", "publish_best"):
        _wrap(checkpoint, name, _save)
    for owner, name, phase in (
        (os, "fsync", "ckpt_fsync"),
        (os, "replace", "ckpt_replace"),
        (Path, "unlink", "ckpt_prune"),  # of the oldest of three
    ):
        _wrap(owner, name, functools.partial(_write, phase))


def _wrap(owner, name, around):
    """Replace `owner.name` by a function that calls `around(the function, its arguments)`."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*arguments, **named):
        return around(inner, *arguments, **named)

    setattr(owner, name, wrapped)


def _begin_step(inner, train, run, step, *arguments):
    _now["step"] = step
    return inner(train, run, step, *arguments)


def _step(inner, objective, optimizer, *arguments):
    if "step" not in vars(optimizer):
        _wrap(optimizer, "step", lambda step, *given: (at("opt_step"), step(*given))[1])
    results = inner(objective, optimizer, *arguments)
    if at("stepped"):
        dict(objective.named_parameters())["module.model.dustbin"].data.mul_(1.5)
    return results


def _forward(inner, *arguments):
    is_poisoned = at("forward")
    total, parts = inner(*arguments)
    at("backward")
    if is_poisoned:
        total = total * math.nan
        parts["loss"] = parts["loss"] * math.nan
    return total, parts


def _save(inner, *arguments, **named):
    _now["saving"] = True
    try:
        return inner(*arguments, **named)
    finally:
        _now["saving"] = False


def _write(phase, inner, first, *arguments, **named):
    if _now["saving"] and (phase != "ckpt_prune" or first.name.startswith("step-")):
        at(phase)
    return inner(first, *arguments, **named)
