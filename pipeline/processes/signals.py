"""Being asked to stop: noted, and acted on between two steps, when a checkpoint can be saved; ending with a parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from typing import Iterator, Optional

ASKED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the container, Ctrl-C, SLURM before preemption
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_parent(number: int = signal.SIGKILL, parent: Optional[int] = None) -> None:
    """Ask Linux to send this process the signal when its parent ends, however that ends.

    parent: its id, where that is known; a parent that has ended already takes this process with it at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)  # it ended before this process could ask to be told


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Within, the signals wait, also in processes started here until they call `serve`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED_BY)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(parent: int) -> None:
    """In a process that works for process `parent`: leave the signals to it, and end with it, however it ends."""
    for number in ASKED_BY:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED_BY)
    end_with_parent(parent=parent)


class Stop:
    """`requested` turns True when one of the signals has come; a second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.requested = False

    def _note(self, number: int, frame) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@contextlib.contextmanager
def deferred() -> Iterator[Stop]:
    """Within, the signals only set the flag; afterwards they do what they did before."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Python lets the main thread alone handle signals
        return
    before = {number: signal.signal(number, stop._note) for number in ASKED_BY}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
