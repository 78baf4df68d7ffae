"""Compute results in advance by threads and processes, and turn signals into requests to stop.

`prefetch` yields results in the order of their items. At most a fixed number of results waits. A
training reads the request to stop between two steps.
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
from typing import Any, Callable, Deque, Generator, Iterable, Iterator, List, Optional, TypeVar

PR_SET_PDEATHSIG = 1  # The number of the option in linux/prctl.h

Result = TypeVar("Result")


def _list_stop_signals() -> List[signal.Signals]:
    """Return the signals that stop a training, without SIGHUP under `nohup`, which ignores it."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Torchrun would handle it all the same, so block it here, and thereby in the ranks.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    stop_signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
    return sorted(stop_signals - signal.pthread_sigmask(signal.SIG_BLOCK, []))


# Signals that containers, Ctrl-C, SLURM before preemption, and a closed terminal send
STOP_SIGNALS = _list_stop_signals()


def yield_in_order(
    submit: Callable[[Any], Future[Result]], items: Iterable[Any], ahead: int
) -> Generator[Result, None, None]:
    """Yield the result of each item, in the order of the items.

    Closing the generator cancels the work that has not started. Close it where it is used: a Ctrl-C
    that arrives while Python deletes a generator is lost.

    Args:
        submit: starts the work on an item, as `Executor.submit` does.
        items: what to work on.
        ahead: largest number of items that are submitted before their results are asked for.

    Raises:
        Exception: Whatever the work raised, when the turn of its item comes.
    """
    waiting: Deque[Future[Result]] = deque()
    try:
        for item in items:
            # Submit first, so that up to `ahead` items are computed while the caller works.
            waiting.append(submit(item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # The caller has closed the generator, or an item has failed.
        for future in waiting:
            future.cancel()


def prefetch(
    make: Callable[[Any], Result], items: Iterable[Any], ahead: int = 2, threads: int = 1
) -> Generator[Result, None, None]:
    """Yield `make(item)` for each item, in the order of the items, computed by threads in advance.

    Closing the generator (`contextlib.closing`) ends the threads, when each has finished the item
    that it works on.

    Args:
        make: computes the result of an item.
        items: what to compute results of.
        ahead: largest number of results that are computed in advance.
        threads: number of threads.
    """
    with ThreadPoolExecutor(threads, "prefetch") as pool:
        yield from yield_in_order(functools.partial(pool.submit, make), items, ahead)


# --- signals


def end_with_parent(signal_number: int = signal.SIGKILL, parent_id: Optional[int] = None) -> None:
    """Ask Linux to send this process a signal when its parent ends.

    Args:
        signal_number: the number of the signal.
        parent_id: the id of the parent process, if it is known. If the parent has ended already,
            this process exits at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
    if parent_id is not None and os.getppid() != parent_id:
        os._exit(1)  # The parent ended before the call above


def end_with_dvc() -> None:
    """End this stage by SIGTERM when the DVC that started it ends.

    Otherwise this stage and the one that the next `dvc repro` starts would write the same files.
    The commands in dvc.yaml begin with `exec`, so that DVC is the parent, and not a shell.
    """
    if "DVC_STAGE" in os.environ:
        end_with_parent(signal.SIGTERM)


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block STOP_SIGNALS in this context, also in processes that start here.

    Such a process unblocks them by `ignore_signals` or `defer_signals`.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def ignore_signals(worker_index: int, parent_id: int) -> None:
    """Let a process that loads batches ignore STOP_SIGNALS, and end with its parent.

    A signal may go to all processes of a job, but the training needs the batches of its last step.

    Args:
        worker_index: the index that torch gives each worker. It is not used.
        parent_id: the id of the process that trains.
    """
    for signal_number in STOP_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    end_with_parent(parent_id=parent_id)


class Stop:
    """A request to stop, which a signal makes.

    A second Ctrl-C ends the process at once. A second SIGTERM does not, because schedulers send
    several signals to the same process.

    Attributes:
        requested: whether one of STOP_SIGNALS has arrived.
        interrupted: whether one of them was a Ctrl-C.
    """

    requested = False
    interrupted = False

    def _request(self, signal_number: int, frame) -> None:
        if self.interrupted and signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        self.interrupted |= signal_number == signal.SIGINT


@contextlib.contextmanager
def defer_signals() -> Iterator[Stop]:
    """Let STOP_SIGNALS only make a request to stop in this context, and yield this request.

    This includes signals that came while they were blocked. The handlers are restored afterwards.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Only the main thread can handle signals
        return
    previous_handlers = {
        signal_number: signal.signal(signal_number, stop._request) for signal_number in STOP_SIGNALS
    }
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield stop
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)
