"""Results computed before they are asked for, in the order of their items, with a bounded number under way."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Callable, Deque, Generator, Iterable, TypeVar

Made = TypeVar("Made")

CLOSE_S = 5.0  # that closing waits for a thread whose work hangs


def in_order(submit: Callable[[Any], Future[Made]], items: Iterable[Any], ahead: int) -> Generator[Made, None, None]:
    """The result of each item, which `submit` gets up to `ahead` items earlier.

    An exception of the work is raised here, at its item. Closing the iterator cancels what has not begun.
    """
    waiting: Deque[Future[Made]] = deque()
    try:
        for item in items:
            waiting.append(submit(item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def prefetched(
    make: Callable[[Any], Made], items: Iterable[Any], ahead: int = 2, threads: int = 1
) -> Generator[Made, None, None]:
    """`make(item)` of each item, computed by threads up to `ahead` items before it is asked for.

    Closing the iterator ends the threads, and waits no longer than CLOSE_S for one that hangs.
    """
    asked: SimpleQueue = SimpleQueue()
    # no executor: its threads are waited for when the process ends, however long
    started = [threading.Thread(target=_work, args=(make, asked), name="prefetch", daemon=True) for _ in range(threads)]

    def submit(item: Any) -> Future[Made]:
        future: Future[Made] = Future()
        asked.put((item, future))
        return future

    for thread in started:
        thread.start()
    try:
        yield from in_order(submit, items, ahead)
    finally:
        for _ in started:
            asked.put(None)
        for thread in started:
            thread.join(CLOSE_S)


def _work(make: Callable[[Any], Any], asked: SimpleQueue) -> None:
    for item, future in iter(asked.get, None):
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(make(item))
            except BaseException as error:  # raised again by whoever asks for the result
                future.set_exception(error)
