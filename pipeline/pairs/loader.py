"""From the store to batches: reads records, augments coordinates, packs, and works one step ahead.

One thread, not worker processes: a batch is a few memory copies (section 3.5 of the measurements in
docs/performance.md), and handing it between processes would cost more than making it.
"""

from __future__ import annotations

import functools
import queue
import threading
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import numpy as np
from numpy.linalg import inv

from pipeline.features.store import Store
from pipeline.matching.homography import compose
from pipeline.pairs.batch import Pair, PairBatch, from_pairs
from pipeline.pairs.order import Sample


def read_pair(store: Store, sample: Sample, max_keypoints: int, drop: float = 0.0) -> Pair:
    """One pair of views from the store.

    Args:
        max_keypoints: the strongest so many of each view are kept.
        drop: up to this share of each view's keypoints is left out at random (by `sample.seed`), so that an
            epoch never repeats a pair as it was.
    """
    random = np.random.default_rng(sample.seed)
    records0, H_image_to_0, size0 = store.view(sample.image, sample.view0)
    records1, H_image_to_1, size1 = store.view(sample.image, sample.view1)
    H_0to1 = compose(H_image_to_1, inv(H_image_to_0))
    sides = []
    for records in (records0, records1):
        records = records[:max_keypoints]
        if drop > 0:
            kept = random.random(len(records)) >= drop * random.random()
            records = records[kept]
        sides.append(records)
    return Pair(sides[0], sides[1], size0, size1, H_0to1)


def load_batch(store: Store, samples: Sequence[Sample], max_keypoints: int, drop: float = 0.0) -> PairBatch:
    """The PairBatch of these samples, in order; an empty list gives a batch of no pairs with homographies."""
    return from_pairs([read_pair(store, s, max_keypoints, drop) for s in samples])


_END = object()


def prefetched(make: Callable[[int], PairBatch], steps: Sequence[int], ahead: int = 2) -> Iterator[PairBatch]:
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


def split_evenly(samples: List[Sample], parts: int) -> List[List[Sample]]:
    """`samples` in `parts` contiguous groups whose sizes differ by at most one (micro-batches)."""
    bounds = [len(samples) * i // parts for i in range(parts + 1)]
    return [samples[a:b] for a, b in zip(bounds, bounds[1:])]


def choose(name: str, device: Any) -> Tuple[Callable[..., PairBatch], Callable[..., Iterator]]:
    """(load_batch, prefetched) of `train.loader`: plain, dali or synthetic; all have the plain one's signatures.

    Raises:
        RequestError: dali is asked for and not installed.
    """
    if name == "synthetic":
        from pipeline.pairs import synthetic

        return synthetic.load_batch, prefetched
    if name == "dali":
        from pipeline.pairs import dali

        dali.require()
        return load_batch, functools.partial(dali.prefetched, device=device)
    return load_batch, prefetched
