"""Signals: a request to stop between two steps, and the end of a process with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from typing import Iterator, Optional

# Signals that containers, Ctrl-C, and SLURM before preemption send
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # the number of the option in linux/prctl.h


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


@contextlib.contextmanager
def block() -> Iterator[None]:
    """Block the signals, also in processes started in this context, until they call `serve`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(worker: int, parent: int) -> None:
    """Let a process that loads batches ignore the signals, and end with the training `parent`.

    A signal may go to all processes of a job. The training needs the batches of its last step.
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

    def _note(self, number: int, frame) -> None:
        if self.interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        self.interrupted |= number == signal.SIGINT


@contextlib.contextmanager
def defer() -> Iterator[Stop]:
    """Let the signals only set the flag in this context. Their handlers are restored afterwards."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread can handle signals
        return
    # from here on a signal only sets the flag
    before = {number: signal.signal(number, stop._note) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
