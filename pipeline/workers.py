"""Compute results in advance by threads and processes, and turn signals into requests to stop.

`prefetch` yields results in the order of their items. The number of results that wait is limited. A
signal becomes a request to stop between two steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Deque, Generator, Iterable, Iterator, Optional, TypeVar

# Signals that containers, Ctrl-C, and SLURM before preemption send
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # the number of the option in linux/prctl.h

Result = TypeVar("Result")


def yield_in_order(
    submit: Callable[[Any], Future[Result]], items: Iterable[Any], ahead: int
) -> Generator[Result, None, None]:
    """Yield the result of each item. `submit` gets the items, up to `ahead` of them in advance.

    An exception of the work is raised here, when its item comes. Closing the iterator cancels the
    work that has not started.
    """
    waiting: Deque[Future[Result]] = deque()
    try:
        for item in items:
            # Submit first, so that up to `ahead` items are computed while the caller works.
            waiting.append(submit(item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        # All items are submitted.
        while waiting:
            yield waiting.popleft().result()
    finally:
        # The caller has closed the iterator, or an item has failed.
        for future in waiting:
            future.cancel()


def prefetch(
    make: Callable[[Any], Result], items: Iterable[Any], ahead: int = 2, threads: int = 1
) -> Generator[Result, None, None]:
    """Yield `make(item)` for each item. Threads compute it up to `ahead` items in advance.

    Closing the iterator ends the threads, when each has finished the item that it works on.
    """
    with ThreadPoolExecutor(threads, "prefetch") as pool:
        yield from yield_in_order(functools.partial(pool.submit, make), items, ahead)


# --- signals


def end_with_parent(number: int = signal.SIGKILL, parent: Optional[int] = None) -> None:
    """Ask Linux to send this process the signal `number` when its parent ends.

    Args:
        parent: the id of the parent, if it is known. If the parent has ended already, this process
            exits at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)  # the parent ended before the call above


def end_with_dvc() -> None:
    """End this stage by SIGTERM when the DVC that started it ends.

    Else it would write its files beside the stage that the next `dvc repro` starts. The commands in
    dvc.yaml begin with `exec`, so that DVC is the parent, and not a shell.
    """
    if "DVC_STAGE" in os.environ:
        end_with_parent(signal.SIGTERM)


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block STOP_SIGNALS here, and in processes started here until they call `ignore_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals(worker: int, parent: int) -> None:
    """Let a process that loads batches ignore STOP_SIGNALS, and end with the process `parent`.

    A signal may go to all processes of a job, but the training needs the batches of its last step.
    `worker` is the number of the process, which torch gives.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    end_with_parent(parent=parent)


class Stop:
    """A request to stop. `requested` becomes True when one of the signals arrives.

    A second Ctrl-C ends the process at once. SIGTERM does not count as one, because schedulers send
    several signals to the same process.
    """

    requested = False
    interrupted = False

    def _request(self, number: int, frame) -> None:
        if self.interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        self.interrupted |= number == signal.SIGINT


@contextlib.contextmanager
def defer_signals() -> Iterator[Stop]:
    """Let STOP_SIGNALS only set a flag in this context. Their handlers are restored afterwards."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread can handle signals
        return
    before = {number: signal.signal(number, stop._request) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
