"""Processes that load batches for a GPU: their number, their shared memory, their end.

A thread that loads batches would compete with the Python code that launches kernels. The processes
ignore SIGTERM, SIGINT and SIGUSR1, which may go to all processes of a job, and end with the
training. A killed one counts as a lost rank: torch's DataLoader raises in the middle of a step,
whose result cannot be used.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import os
import resource
import shutil
import sys
from multiprocessing.context import BaseContext
from typing import Any, Callable, Generator, NamedTuple, Sequence, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from pipeline import signals
from pipeline.distributed import shared_memory_needed
from pipeline.errors import read_number
from pipeline.files import format_bytes

Made = TypeVar("Made")

# of a GPU; steps that each loads in advance
MAX_PROCESSES = 4
AHEAD = 2
# Steps that the training holds: the current one and the next, which it takes before it frees the
# current
HELD = 2
TENSORS = 8  # of a PairBatch; each is a file in shared memory, of whole pages
PAGE = 4096
OTHER_FILES = 128
SHARED = "/dev/shm"
# Environment: processes of each rank; 0: a thread; auto or unset: MAX_PROCESSES for a GPU
NUMBER = "SG_LOADER_PROCESSES"

# The processes inherit the mapped store and start in milliseconds. Python 3.14's default is
# forkserver, whose server dies of a SIGTERM to all processes and loses their exit codes.
START_METHOD = "fork"


class StepSize(NamedTuple):
    """Size of one rank's step: pairs, most keypoints of a view, bytes of a keypoint's record,
    micro-batches.
    """

    pairs: int
    keypoints: int
    record: int
    parts: int = 1

    @property
    def bytes(self) -> int:
        """Shared memory of the batches: for each pair records of two views, counts, sizes,
        homography, cells.
        """
        return (
            self.pairs * (2 * (self.keypoints * self.record + 8 + 8 + 72) + 72)
            + self.parts * TENSORS * PAGE
        )

    @property
    def files(self) -> int:
        return self.parts * TENSORS


def steps_in_memory(processes: int) -> int:
    """Most steps whose batches are in shared memory at a time."""
    return processes * AHEAD + HELD


def fit(wanted: int, step: StepSize, memory: int, files: int) -> int:
    """The number of processes, up to `wanted`, whose batches fit into `memory` bytes of shared
    memory and `files` open files; 0: a thread loads the batches.
    """
    steps = min(memory // step.bytes, (files - OTHER_FILES) // step.files)
    return max(min(wanted, (steps - HELD) // AHEAD), 0)


def read_wanted(on_gpu: bool, ranks: int) -> int:
    """Processes of each of `ranks` ranks on this machine, before memory limits.

    On a CPU none: the step needs the cores, and handing a batch between processes takes longer than
    loading it. Raises RequestError if SG_LOADER_PROCESSES is not a number.
    """
    if os.environ.get(NUMBER, "") not in ("", "auto"):
        return read_number(NUMBER, 0)
    return max(min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // ranks - 1), 0) if on_gpu else 0


def memory_of_rank(on_gpu: bool, ranks: int) -> int:
    """Bytes of shared memory for the batches of each of `ranks` ranks on this machine."""
    with contextlib.suppress(OSError):
        needed = shared_memory_needed(ranks * on_gpu)
        return max(shutil.disk_usage(SHARED).free - needed, 0) // ranks
    return 0


def choose_processes(device: torch.device, step: StepSize) -> int:
    """How many processes load this rank's batches, 0: a thread; prints a line if shared memory or
    open files limit them.
    """
    on_gpu = device.type == "cuda"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wanted = read_wanted(on_gpu, ranks)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    chosen = fit(wanted, step, memory_of_rank(on_gpu, ranks), files)
    if chosen < wanted and os.environ.get("RANK", "0") == "0":
        instead = f"{chosen} process(es)" if chosen else "a thread"
        needed = format_bytes(steps_in_memory(wanted) * step.bytes * ranks)
        print(
            f"batches are loaded by {instead} instead of {wanted}, which need {needed} of {SHARED}"
            " (docker run --shm-size), or more open files (ulimit -n)"
        )
    return chosen


class _Flag:
    """A multiprocessing.Event without the lock, which a process killed in `is_set` would keep: the
    main process would wait for it forever.
    """

    def __init__(self, context: BaseContext) -> None:
        self._value = context.RawValue("b", 0)

    def set(self) -> None:
        self._value.value = 1

    def is_set(self) -> bool:
        return self._value.value == 1


def _context(start_method: str) -> BaseContext:
    """A context of this start method whose `Event`, which tells the processes to end, is a
    `_Flag`.
    """
    context = copy.copy(multiprocessing.get_context(start_method))
    context.Event = functools.partial(_Flag, context)  # type: ignore[method-assign]
    return context


class _Steps(Dataset):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __getitem__(self, step: int) -> Any:
        return self.make(step)


def _begin(worker: int, parent: int) -> None:
    signals.serve(parent)
    sys.excepthook = _silent_about_the_end


def _silent_about_the_end(kind, error, trace) -> None:
    """Print no traceback when the main process ends and closes a connection.

    DataLoader sends exceptions of `make` to the main process. Only multiprocessing's thread that
    hands over a batch's file descriptors calls this.
    """
    if not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, trace)


def prefetch(
    make: Callable[[int], Made],
    steps: Sequence[int],
    processes: int,
    start_method: str = START_METHOD,
) -> Generator[Made, None, None]:
    """`make(step)` for each of `steps`, computed in advance by processes, in page-locked memory if
    there is a GPU.

    start_method: fork, or spawn, which serialises `make`: a `Store` in it opens its files again.

    If a process is killed, RuntimeError (see `a_process_died`) is raised anywhere in the main
    thread.
    """
    before = set(multiprocessing.active_children())
    loader = DataLoader(
        _Steps(make),
        sampler=steps,
        batch_size=None,
        num_workers=processes,
        prefetch_factor=AHEAD,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context=_context(start_method),
        worker_init_fn=functools.partial(_begin, parent=os.getpid()),
        # A draw from the global one would change the checkpoint at each start
        generator=torch.Generator(),
    )
    with signals.block():
        batches: Any = iter(loader)  # Any: `_shutdown_workers` is not in the stubs
    started = set(multiprocessing.active_children()) - before
    try:
        yield from batches
    finally:
        batches._shutdown_workers()  # not left to __del__, which the traceback of an error delays
        for process in started:
            process.kill()  # one that hangs in a read ignores SIGTERM


def a_process_died(error: BaseException) -> bool:
    """Whether torch's DataLoader raised this because one of its processes was killed."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")
