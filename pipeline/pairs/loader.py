"""From the store to batches: views are read, changed as the augmentation says, packed with their truth, made ahead."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Callable, Deque, Generator, List, Optional, Sequence, Tuple, TypeVar

import numpy as np
import torch
from numpy.linalg import inv
from torch.utils.data import DataLoader

from pipeline.features.store import Store, View
from pipeline.pairs.augmentation import PLAIN, Augmentation
from pipeline.pairs.order import Sample, rank_slice
from superglue_sift.batch import Pair, PairBatch, from_pairs
from superglue_sift.geometry import normalized

Made = TypeVar("Made")

# Processes that make batches for a GPU, and the shared memory that those on their way may need: three of 128 pairs of
# 1,024 keypoints each.
MOST_WORKERS, SHARED_BYTES = 4, 1 << 30

CLOSE_S = 5.0  # that the end of a training waits for a batch that is being made

# The homography of a pair that shows nothing in common: no point comes near the other view.
APART = np.array([[1.0, 0.0, 1e6], [0.0, 1.0, 1e6], [0.0, 0.0, 1.0]])


def load_batch(
    store: Store, samples: Sequence[Sample], max_keypoints: int, augmentation: Augmentation = PLAIN
) -> PairBatch:
    """The PairBatch of these samples, in order; an empty list gives a batch of no pairs with homographies.

    Args:
        max_keypoints: the strongest so many of each view are kept.
        augmentation: what changes about each pair, by its `sample.seed`.
    """
    if not samples:
        return from_pairs([], np.zeros((0, 3, 3)), store.dtype)
    images1 = [augmentation.second_image(sample.image, len(store), sample.seed) for sample in samples]
    views0, views1 = [], []
    for sample, image1 in zip(samples, images1):
        others = functools.partial(_another_view, store, (sample.image, image1))
        shown = store.view(sample.image, sample.view0), store.view(image1, sample.view1)
        for side, (views, view) in enumerate(zip((views0, views1), shown)):
            views.append(augmentation.apply(view, sample.seed, side, others, store.least_scale))
    # inverted together, since 64 small inversions one by one cost a batch 1 ms
    to0, to1 = (np.stack([view.H_image_to_view for view in side]) for side in (views0, views1))
    H_0to1 = normalized(to1 @ inv(to0))
    H_0to1[[image1 != sample.image for image1, sample in zip(images1, samples)]] = APART
    pairs = []
    for sample, view0, view1 in zip(samples, views0, views1):
        count0, count1 = augmentation.counts(max_keypoints, sample.seed)
        pairs.append(Pair(view0.records[:count0], view1.records[:count1], view0.size, view1.size))
    return from_pairs(pairs, H_0to1)


def _another_view(store: Store, shown: Tuple[int, int], random: np.random.Generator) -> Optional[View]:
    """A random view of a random image; None where that is one of those `shown`."""
    image, view = int(random.integers(len(store))), int(random.integers(store.views_per_image))
    return None if image in shown else store.view(image, view)


def split_evenly(samples: List[Sample], parts: int) -> List[List[Sample]]:
    """`samples` in `parts` contiguous groups whose sizes differ by at most one (micro-batches)."""
    return [samples[rank_slice(len(samples), part, parts)] for part in range(parts)]


def prefetched(make: Callable[[int], Made], steps: Sequence[int], ahead: int = 2) -> Generator[Made, None, None]:
    """`make(step)` for each of `steps`, computed up to `ahead` steps before it is asked for.

    In one thread: on a CPU the step itself takes the cores, and handing a batch between processes would cost more than
    making it. An exception in `make` is raised here, at its step. Closing the iterator ends the thread, and
    waits no longer than CLOSE_S for a read that hangs.
    """
    asked: SimpleQueue[Optional[Tuple[int, Future[Made]]]] = SimpleQueue()
    waiting: Deque[Future[Made]] = deque()
    # no executor: its threads are waited for when the process ends, however long
    thread = threading.Thread(target=_make_each, args=(make, asked), name="pair-prefetch", daemon=True)
    thread.start()
    try:
        for step in steps:
            waiting.append(Future())
            asked.put((step, waiting[-1]))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        asked.put(None)
        thread.join(CLOSE_S)


def _make_each(make: Callable[[int], Made], asked: SimpleQueue[Optional[Tuple[int, Future[Made]]]]) -> None:
    for step, future in iter(asked.get, None):
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(make(step))
            except BaseException as error:  # raised again by whoever asks for the result
                future.set_exception(error)


def prefetched_page_locked(
    make: Callable[[int], List[PairBatch]], steps: Sequence[int]
) -> Generator[List[PairBatch], None, None]:
    """As `prefetched`, in page-locked memory, which the thread fills: the step does not wait for a copy to the GPU."""
    return prefetched(lambda step: [batch.pin_memory() for batch in make(step)], steps)


class _Steps(torch.utils.data.Dataset):
    def __init__(self, make: Callable[[int], Any], steps: Sequence[int]) -> None:
        self.make, self.steps = make, steps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, place: int) -> Any:
        return self.make(self.steps[place])


def prefetched_by_processes(
    make: Callable[[int], Made], steps: Sequence[int], workers: int
) -> Generator[Made, None, None]:
    """As `prefetched`, by `workers` processes, in page-locked memory where there is a GPU.

    For a GPU, which waits for Python to launch its kernels: a thread that makes batches would take turns with that.
    """
    pin = torch.cuda.is_available()
    yield from DataLoader(_Steps(make, steps), batch_size=None, num_workers=workers, pin_memory=pin)


def _workers(device: Optional[torch.device]) -> int:
    """Processes that make batches for `device`; 0: a thread does, also where shared memory has no room."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) // ranks
    if device is None or device.type == "cpu" or cores < 2 or shutil.disk_usage("/dev/shm").free < SHARED_BYTES * ranks:
        return 0
    return min(MOST_WORKERS, cores - 1)


def choose(name: str, device: Optional[torch.device]) -> Tuple[Callable[..., PairBatch], Callable[..., Generator]]:
    """(load_batch, prefetched) of `train.loader`: plain, dali or synthetic; all have the plain one's signatures.

    Raises RequestError: dali is asked for and not installed.
    """
    by_thread = prefetched_page_locked if device is not None and device.type == "cuda" else prefetched
    if name == "synthetic":
        from pipeline.pairs import synthetic

        return synthetic.load_batch, by_thread
    if name == "dali":
        from pipeline.pairs import dali

        dali.require()
        return load_batch, lambda make, steps, ahead=2: dali.carried(prefetched(make, steps, ahead), device, ahead)
    workers = _workers(device)
    return load_batch, functools.partial(prefetched_by_processes, workers=workers) if workers else by_thread
