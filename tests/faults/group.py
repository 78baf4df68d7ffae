"""Trainings that are killed, in processes forked from this one: no interpreter starts, so a kill
costs a second.

A group is started as by torchrun (RANK, WORLD_SIZE, a gloo group over loopback). `until_done`
restarts it from the newest checkpoint whenever a process died, as the launcher does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from faults import inject
from pipeline import errors, tracking
from pipeline.launch import free_port
from pipeline.processes.signals import STOP_SIGNALS
from pipeline.tracking.run import NullRun
from pipeline.train import __main__ as train
from superglue_sift.weights import load_model_file

HANG_SECONDS = 60


class Outcome(NamedTuple):
    """One start of a group: exit code of each rank (negative: the signal), and whether one had to
    be killed.
    """

    codes: List[int]
    hung: bool


def fork(
    main: Callable[..., int],
    arguments: Sequence[str],
    log: Path,
    folder: Optional[Path] = None,
    environment: Sequence[Tuple[str, str]] = (),
    tracked: bool = False,
) -> int:
    """Fork a process that becomes a command: `main(arguments)` in `folder`, printing into `log`;
    its id.

    tracked: with MLflow, which has tests of its own.
    """
    # A signal finds the command, not what becomes it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    code = 1
    try:
        os.setsid()  # as torchrun's ranks have it
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        # pytest has replaced them
        # As stderr is
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, errors="backslashreplace")
        os.chdir(folder or ".")
        os.environ.update(environment)
        inject.install()
        torch.set_num_threads(1)
        if not tracked:
            tracking.open_run = lambda *_, **__: NullRun()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = errors.run(main, list(arguments))
    except SystemExit as end:  # what a rank ends with when another one says why
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def start(world_size: int, arguments: Sequence[str], log: Path, **environment: str) -> List[int]:
    """Fork the ranks of a training; their process ids."""
    group = {"WORLD_SIZE": str(world_size), **rendezvous(), **environment}
    return [
        fork(
            train.main,
            arguments,
            log,
            None,
            list({"RANK": str(i), "LOCAL_RANK": str(i), **group}.items()),
        )
        for i in range(world_size)
    ]


def rendezvous() -> Dict[str, str]:
    """Where the ranks of a group meet: a free port of this machine."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SG_TIMEOUT": "20"}


def wait(pids: List[int], limit: float = HANG_SECONDS) -> Outcome:
    """Wait for all ranks; those that are still there after `limit` seconds are killed, and that
    counts as a hang.
    """
    codes = {}
    deadline = time.monotonic() + limit
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = (
                    -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                )
        time.sleep(0.02)
    hung = len(codes) < len(pids)
    for pid in set(pids) - set(codes):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[pid] = -signal.SIGKILL
    return Outcome([codes[pid] for pid in pids], hung)


class Killed(NamedTuple):
    """A training carried to its end through faults: digest of its last checkpoint, starts it took,
    hangs seen.
    """

    digest: str
    starts: int
    hung: int
    codes: List[List[int]]


def until_done(
    folder: Path,
    arguments: Sequence[str],
    world_sizes: Sequence[int],
    fault: str,
    limit: int = 12,
    seconds: float = HANG_SECONDS,
    environment: Sequence[Tuple[str, str]] = (),
) -> Killed:
    """Start a group again and again until the training is done. Start i has world_sizes[i] ranks,
    then the last.

    A start that takes more than `seconds` hangs. AssertionError when it is not done after `limit`
    starts.
    """
    marks = folder / "marks"
    out = folder / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    marks.mkdir(parents=True)
    whole = [*arguments, "--out", str(out), "--reports", str(folder / "reports")]
    seen: List[Outcome] = []
    while not seen or any(seen[-1].codes):
        assert len(seen) < limit, (
            f"not done after {limit} starts: {seen}\n{(folder / 'log').read_text()[-3000:]}"
        )
        world_size = world_sizes[min(len(seen), len(world_sizes) - 1)]
        pids = start(
            world_size,
            whole,
            folder / "log",
            SG_FAULT=fault,
            SG_FAULT_ONCE=str(marks),
            **dict(environment),
        )
        seen.append(wait(pids, seconds))
    hung = sum(outcome.hung for outcome in seen)
    return Killed(digest(out), len(seen), hung, [outcome.codes for outcome in seen])


def digest(checkpoints: Path) -> str:
    """SHA-256 over all tensors of the newest checkpoint and of the best model."""
    newest = max(checkpoints.glob("*/step-*.safetensors"), key=lambda path: path.name)
    found = hashlib.sha256()
    for file in (newest, checkpoints / "best.safetensors"):
        for name, tensor in sorted(load_model_file(file)[0].items()):
            found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()
