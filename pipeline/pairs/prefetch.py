"""Batches made ahead of the step that asks for them.

One thread, not worker processes: a batch is a few memory copies, and handing it between processes would cost more than
making it.
"""

from __future__ import annotations

import queue
import threading
from typing import Callable, Generator, Sequence, TypeVar

Made = TypeVar("Made")
_END = object()


def prefetched(make: Callable[[int], Made], steps: Sequence[int], ahead: int = 2) -> Generator[Made, None, None]:
    """`make(step)` for each of `steps`, computed up to `ahead` steps before it is asked for, in a thread.

    An exception in `make` is raised here, at its step. Closing the iterator ends the thread.
    """
    ready: queue.Queue = queue.Queue(maxsize=ahead)
    stop = threading.Event()

    def put(item) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for step in steps:
                if not put(make(step)):
                    return
            put(_END)
        except BaseException as error:  # handed to the consumer, which raises it
            put(error)

    thread = threading.Thread(target=work, name="pair-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if item is _END:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join(timeout=5)
