"""Prefetching: results are computed in advance and yielded in the order of their items.

The number of results that wait is limited.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Callable, Deque, Generator, Iterable, TypeVar

Result = TypeVar("Result")

CLOSE_S = 5.0  # seconds that closing waits for a thread that hangs


def in_order(
    submit: Callable[[Any], Future[Result]], items: Iterable[Any], ahead: int
) -> Generator[Result, None, None]:
    """Yield the result of each item. `submit` gets the items, up to `ahead` of them in advance.

    An exception of the work is raised here, when its item comes. Closing the iterator cancels the
    work that has not started.
    """
    waiting: Deque[Future[Result]] = deque()
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


def prefetch(
    make: Callable[[Any], Result], items: Iterable[Any], ahead: int = 2, threads: int = 1
) -> Generator[Result, None, None]:
    """Yield `make(item)` for each item. Threads compute it up to `ahead` items in advance.

    Closing the iterator ends the threads. It waits at most CLOSE_S for a thread that hangs.
    """
    queue: SimpleQueue = SimpleQueue()
    # These are plain threads. The end of the process would wait for the threads of an executor.
    started = [
        threading.Thread(target=_work, args=(make, queue), name="prefetch", daemon=True)
        for _ in range(threads)
    ]

    def submit(item: Any) -> Future[Result]:
        future: Future[Result] = Future()
        queue.put((item, future))
        return future

    for thread in started:
        thread.start()
    try:
        yield from in_order(submit, items, ahead)
    finally:
        for _ in started:
            queue.put(None)
        for thread in started:
            thread.join(CLOSE_S)


def _work(make: Callable[[Any], Any], queue: SimpleQueue) -> None:
    for item, future in iter(queue.get, None):
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(make(item))
            except BaseException as error:  # it is raised again where the result is read
                future.set_exception(error)
