"""Work cut into units, shared out over processes, gathered in order: the same results for any number of processes.

Each process takes every n-th unit, and after each round all of them hear the results of all: nothing is computed twice
or padded.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence, TypeVar

from pipeline.errors import RequestError
from pipeline.runtime import distributed

Unit = TypeVar("Unit")
MOST_THREADS = 8


def share_out(
    units: Sequence[Unit],
    nothing: Unit,
    prepare: Callable[[Unit], Any],
    match: Callable[[Any], Any],
    score: Callable[[Any], Any],
    context: Optional[distributed.Context] = None,
) -> Iterator[Any]:
    """`score(match(prepare(unit)))` of every unit, in their order, on every process of the group.

    prepare and score run in threads, a little ahead and behind; match in turn. nothing: the unit of a process that has
    none left in the last round. Raises RequestError on all processes when `prepare` raises one on any.
    """
    rank, world_size = (context.rank, context.world_size) if context else (0, 1)
    rounds = range(-(-len(units) // world_size))
    mine = [
        units[index] if index < len(units) else nothing for index in (n * world_size + rank for n in rounds)
    ]
    workers = max(1, min((os.cpu_count() or 1) // world_size, MOST_THREADS))
    matched = in_turn(mine, prepare, match, workers)
    for scored in ahead(lambda found: found if isinstance(found, str) else score(found), matched, workers):
        for part in distributed.all_gather(scored()):
            if isinstance(part, str):
                leave_together()
                raise RequestError(part)
            yield part
    leave_together()


def in_turn(
    units: Sequence[Unit], prepare: Callable[[Unit], Any], match: Callable[[Any], Any], workers: int
) -> Iterator[Any]:
    """`match(prepare(unit))` of each; a message in place of one whose request was wrong, for all to hear."""
    for ready in ahead(prepare, units, workers):
        try:
            prepared = ready()
        except RequestError as error:
            yield str(error)
            return
        yield match(prepared)


def ahead(work: Callable, items: Iterable, workers: int) -> Iterator[Callable]:
    """A callable with the result of `work(item)` for each item, computed by threads a little before it is asked for.

    Threads, not processes: decoding, warping, SIFT and robust estimators all release Python's lock, and nothing need
    be copied.
    """
    with ThreadPoolExecutor(max_workers=workers) as pool:
        waiting: deque = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > workers:
                yield waiting.popleft().result
        while waiting:
            yield waiting.popleft().result


def leave_together() -> None:
    """Wait until all processes have heard the last results: who leaves early takes the connection along.

    By then nothing can be lost any more, so a peer that has left this barrier first is no failure.
    """
    with contextlib.suppress(RuntimeError):
        distributed.barrier()
