"""Work on several pairs at once, each by one of torch's threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, List, Sequence

import torch


def each(work: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
    """`work(*item)` of each, without gradients; on a CPU as many at a time as torch has threads.

    Meanwhile torch's number of threads is 1 for the whole process: one of your own threads that calls torch for the
    first time just then keeps it.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < 2:
        return [work(*item) for item in items]

    def alone(item: Any) -> Any:
        torch.set_num_threads(
            1
        )  # OpenMP counts for each of Python's threads, MKL for all: the caller only waits
        with torch.no_grad():
            return work(*item)

    try:
        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            return list(pool.map(alone, items))
    finally:
        torch.set_num_threads(threads)
