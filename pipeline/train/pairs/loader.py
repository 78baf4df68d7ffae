"""Batches of pairs: `load_batch` reads views from the store, augments and packs them; `StepBatches`
does so for each step of a rank, ahead of the training.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Generator, List, Optional, Sequence, Tuple, Union

import numpy as np

from pipeline import distributed
from pipeline.keypoints.store import Store, View
from pipeline.params import TrainParams
from pipeline.prefetch import prefetch
from pipeline.train.pairs import workers
from pipeline.train.pairs.augmentation import Augmentation
from pipeline.train.pairs.order import NO_AUGMENTATION, PairOrder, Sample, rank_slice
from superglue_sift.geometry.two_view import compose, inverse
from superglue_sift.network.batch import Pair, PairBatch, from_pairs

NO_CHANGE = Augmentation()
# The homography of a negative pair: it maps every point far outside the other view.
APART = np.array([[1.0, 0.0, 1e6], [0.0, 1.0, 1e6], [0.0, 0.0, 1.0]])


def load_batch(
    store: Store,
    samples: Sequence[Sample],
    keypoints: Union[int, Tuple[int, int]],
    augmentation: Augmentation = NO_CHANGE,
) -> PairBatch:
    """The PairBatch of these samples, in order, with homographies; no samples give an empty batch.

    Args:
        keypoints: largest number of keypoints of a view; those of the two views of every pair, or
            one number, up to which the augmentation draws those of each pair. The first are kept.
        augmentation: random changes of each pair, by its `sample.seed`, unless that is
            NO_AUGMENTATION.
    """
    if not samples:
        return from_pairs([], np.zeros((0, 3, 3)), store.dtype, cells=np.zeros((0, 2, 3, 3)))
    changes = [NO_CHANGE if sample.seed == NO_AUGMENTATION else augmentation for sample in samples]
    images1 = [
        change.second_image(sample.image, len(store), sample.seed)
        for change, sample in zip(changes, samples)
    ]
    sides: Tuple[List[View], List[View]] = ([], [])
    for change, sample, image1 in zip(changes, samples, images1):
        others = functools.partial(_another_view, store, (sample.image, image1))
        shown = store.view(sample.image, sample.view0), store.view(image1, sample.view1)
        limits = keypoints
        if isinstance(limits, int):
            limits = change.counts(limits, sample.seed)
        for side, view in enumerate(shown):
            view = change.apply(view, sample.seed, side, others, store.min_scale, limits[side])
            sides[side].append(view)
    # one call for all: one by one, 64 of them take 1 ms of a batch
    to0, to1 = (np.stack([view.H_image_to_view for view in views]) for views in sides)
    H_0to1 = compose(to1, inverse(to0))
    H_0to1[[image1 != sample.image for image1, sample in zip(images1, samples)]] = APART
    cells = np.array([[one.cell, other.cell] for one, other in zip(*sides)])
    pairs = [Pair(one.records, other.records, one.size, other.size) for one, other in zip(*sides)]
    return from_pairs(pairs, H_0to1, cells=cells)


def _another_view(
    store: Store, shown: Tuple[int, int], random: np.random.Generator
) -> Optional[View]:
    """A random view of a random image; None if it is one of those `shown`."""
    image = int(random.integers(len(store)))
    view = int(random.integers(store.views_per_image))
    return None if image in shown else store.view(image, view)


def split_evenly(samples: List[Sample], parts: int) -> List[List[Sample]]:
    """`samples` in `parts` contiguous groups whose sizes differ by at most one (micro-batches)."""
    return [samples[rank_slice(len(samples), part, parts)] for part in range(parts)]


class StepBatches:
    """The micro-batches of every step on this rank: which pairs, who loads them, on which device.

    All are functions of the step alone, without state.

    pairs: of a step over all ranks (`setup.global_batch`).
    """

    def __init__(
        self, train: TrainParams, store: Store, pairs: int, context: distributed.Context
    ) -> None:
        self.train = train
        self.store = store
        self.pairs = pairs
        self.context = context
        self._order = PairOrder(train.seed, len(store), store.views_per_image)
        self._augmentation = Augmentation.of(train)
        most = min(train.max_keypoints, int(store.counts.max(initial=1)))
        share = -(-pairs // context.world_size)
        size = workers.StepSize(share, most, store.dtype.itemsize, train.accumulate)
        self._processes = workers.choose_processes(context.device, size)

    def samples(self, step: int) -> List[List[Sample]]:
        """This rank's pairs of global step `step`, in micro-batches."""
        mine = rank_slice(self.pairs, self.context.rank, self.context.world_size)
        return split_evenly(self._order.step(step, self.pairs)[mine], self.train.accumulate)

    def load(self, step: int) -> List[PairBatch]:
        """The PairBatches of `samples`, on the host.

        All pairs of a step have the same numbers of keypoints: a GPU computes them padded to the
        largest, which would be seven times the work if each pair had its own.
        """
        limit = self.train.max_keypoints
        counts = self._augmentation.counts(limit, self.train.seed, step)
        return [
            load_batch(self.store, part, counts, self._augmentation) for part in self.samples(step)
        ]

    def prefetch(self, steps: Sequence[int]) -> Generator[List[PairBatch], None, None]:
        """`load` of each of `steps`, in advance, on the device of this rank.

        Processes load for a GPU, else a thread. Closing it ends them.
        """
        if self._processes:
            ahead = workers.prefetch(self.load, steps, self._processes)
        else:
            ahead = prefetch(self._load_for_device, steps)
        with contextlib.closing(ahead):
            for batches in ahead:
                yield [batch.to(self.context.device) for batch in batches]

    def _load_for_device(self, step: int) -> List[PairBatch]:
        """`load`, for a GPU into page-locked memory: the step does not wait for the copy."""
        batches = self.load(step)
        if self.context.device.type == "cuda":
            return [batch.pin_memory() for batch in batches]
        return batches
