"""Prefetching: results are computed in advance and yielded in the order of their items.

The number of results that wait is limited.
"""

from __future__ import annotations

import functools
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Deque, Generator, Iterable, TypeVar

Result = TypeVar("Result")


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
            # Submit first, so that up to `ahead` items are computed while the caller works
            waiting.append(submit(item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        # all items are submitted
        while waiting:
            yield waiting.popleft().result()
    finally:
        # the caller has closed the iterator, or an item has failed
        for future in waiting:
            future.cancel()


def prefetch(
    make: Callable[[Any], Result], items: Iterable[Any], ahead: int = 2, threads: int = 1
) -> Generator[Result, None, None]:
    """Yield `make(item)` for each item. Threads compute it up to `ahead` items in advance.

    Closing the iterator ends the threads, when each has finished the item that it works on.
    """
    with ThreadPoolExecutor(threads, "prefetch") as pool:
        yield from in_order(functools.partial(pool.submit, make), items, ahead)
