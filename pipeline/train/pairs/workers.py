"""Batches made by processes, for a GPU: how many processes, what shared memory they take, how they end.

A GPU waits for Python to launch its kernels, and a thread that makes batches would take turns with that. The processes
leave SIGTERM, SIGINT and SIGUSR1 to the training, which may be sent to all of a job, and end with it. One that is
killed is a lost rank: torch's DataLoader raises in the middle of a step, whose result cannot be used.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import resource
import shutil
from typing import Any, Callable, Generator, NamedTuple, Optional, Sequence, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from pipeline.errors import RequestError
from pipeline.processes import machine, signals

Made = TypeVar("Made")

MOST, AHEAD = 4, 2  # processes for a GPU, and steps that each makes before they are asked for
HELD = 2  # steps in the training's hands: the one it computes, and the one it takes while that is not yet freed
TENSORS = 7  # of a PairBatch, each a file of its own in shared memory, of whole pages
PAGE, OTHER_FILES = 4096, 128
SHARED = "/dev/shm"
NUMBER = "SG_LOADER_PROCESSES"  # environment: processes of each rank; 0: a thread; auto or unset: `MOST` for a GPU

# The store is inherited, mapped as it is, and a start costs milliseconds. Named here since Python 3.14 has another
# default: forkserver, whose server dies of a SIGTERM to all processes and takes the processes' exit codes with it.
START_METHOD = "fork"


class StepSize(NamedTuple):
    """Of one rank's step: pairs, keypoints of a view at most, bytes of a keypoint's record, micro-batches."""

    pairs: int
    keypoints: int
    record: int
    parts: int = 1

    @property
    def bytes(self) -> int:
        """Shared memory of the step's batches: two views of records a pair, counts, sizes, homographies."""
        return self.pairs * (2 * (self.keypoints * self.record + 8 + 8) + 72) + self.parts * TENSORS * PAGE

    @property
    def files(self) -> int:
        return self.parts * TENSORS


class Plan(NamedTuple):
    """So many processes, each so many steps ahead; no process: a thread makes the batches."""

    processes: int
    ahead: int

    def shared(self, step: StepSize) -> int:
        """Bytes of shared memory that one rank takes at most."""
        return (self.processes * self.ahead + HELD) * step.bytes if self.processes else 0

    def files(self, step: StepSize) -> int:
        return (self.processes * self.ahead + HELD) * step.files + OTHER_FILES if self.processes else 0


BY_THREAD = Plan(0, 0)


def wanted(on_gpu: bool, ranks: int) -> int:
    """Processes of each of `ranks` ranks on this machine, where nothing is short.

    Raises RequestError: SG_LOADER_PROCESSES is no number.
    """
    text = os.environ.get(NUMBER, "auto").strip()
    if text != "auto":
        if not text.isdigit():
            raise RequestError(f"{NUMBER}={text!r}: must be a whole number from 0 on, or auto")
        return int(text)
    return max(min(MOST, len(os.sched_getaffinity(0)) // ranks - 1), 0) if on_gpu else 0


def fitting(most: int, step: StepSize, room: int, files: int) -> Plan:
    """The plan of up to `most` processes that fits into `room` bytes of shared memory and `files` open files."""
    plans = [Plan(most, AHEAD)] + [Plan(fewer, 1) for fewer in range(most, 0, -1)]
    fits = (plan for plan in plans if plan.shared(step) <= room and plan.files(step) <= files)
    return next(fits, BY_THREAD) if most else BY_THREAD


def room_of_rank(on_gpu: bool, ranks: int) -> int:
    """Bytes of shared memory for the batches of each of `ranks` ranks on this machine."""
    with contextlib.suppress(OSError):
        return max(shutil.disk_usage(SHARED).free - machine.shared_memory_needed(ranks * on_gpu), 0) // ranks
    return 0


def plan(device: Optional[torch.device], step: StepSize) -> Plan:
    """How the batches of this rank are made; one line where there is less room than wanted."""
    on_gpu, ranks = device is not None and device.type == "cuda", int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    most = wanted(on_gpu, ranks)
    room = room_of_rank(on_gpu, ranks)
    found = fitting(most, step, room, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if found.processes < most and os.environ.get("RANK", "0") == "0":
        instead = f"{found.processes} process(es)" if found.processes else "a thread"
        short = f"{machine.size(Plan(most, 1).shared(step) * ranks)} of {SHARED}, or more open files, are wanted"
        print(f"batches are made by {instead} instead of {most}: {short} (`python -m pipeline.doctor` names the fix)")
    return found


class _Steps(Dataset):
    def __init__(self, make: Callable[[int], Any], steps: Sequence[int]) -> None:
        self.make, self.steps = make, steps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, place: int) -> Any:
        return self.make(self.steps[place])


def _begin(worker: int, parent: int) -> None:
    signals.serve(parent)


def prefetched(
    make: Callable[[int], Made], steps: Sequence[int], plan: Plan, start_method: str = START_METHOD
) -> Generator[Made, None, None]:
    """`make(step)` for each of `steps`, made ahead by processes, in page-locked memory where there is a GPU.

    start_method: fork, or spawn, which serialises `make`: a `Store` in it opens its files again.

    Raises RuntimeError: what `a_process_died` knows, at any place in the main thread, where a process was killed.
    """
    before = set(multiprocessing.active_children())
    loader = DataLoader(
        _Steps(make, steps),
        batch_size=None,
        num_workers=plan.processes,
        prefetch_factor=plan.ahead,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context=start_method,
        worker_init_fn=functools.partial(_begin, parent=os.getpid()),
        generator=torch.Generator(),  # a draw from the global one would be in the checkpoint, one more each start
    )
    with signals.blocked():
        batches: Any = iter(loader)  # `_shutdown_workers` is that of its subclass
    started = set(multiprocessing.active_children()) - before
    try:
        yield from batches
    finally:
        batches._shutdown_workers()  # not left to __del__: the traceback of an error would hold it off
        for process in started:
            process.kill()  # one that hangs in a read is deaf to SIGTERM, and would be waited for


def a_process_died(error: BaseException) -> bool:
    """Is this torch's DataLoader, one of whose processes was killed?"""
    return isinstance(error, RuntimeError) and re.match(r"DataLoader worker \(pid", str(error)) is not None
