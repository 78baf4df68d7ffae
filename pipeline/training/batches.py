"""What a rank trains on at each step: its share of the batch, cut into micro-batches, read in the loader's thread."""

from __future__ import annotations

from typing import Generator, List, Sequence

from pipeline.features.store import Store
from pipeline.pairs.loader import choose, split_evenly
from pipeline.pairs.order import PairOrder, Sample, rank_slice
from pipeline.runtime import distributed, faults
from pipeline.training import setup
from superglue_sift.batch import PairBatch


class StepBatches:
    """The micro-batches of every step, a function of the step alone.

    Args:
        train: the section `train`.
        pairs: of a step over all ranks (`setup.global_batch`).
    """

    def __init__(self, train, store: Store, pairs: int, context: distributed.Context) -> None:
        self.train, self.store, self.pairs, self.context = train, store, pairs, context
        self._order = PairOrder(train.seed, len(store), store.views_per_image)
        self._augmentation = setup.augmentation(train)
        self._load, self._prefetched = choose(train.loader, context.device)

    def samples(self, step: int) -> List[List[Sample]]:
        """This rank's share of global step `step`, in micro-batches."""
        samples, context = self._order.step(step, self.pairs), self.context
        if self.train.bitwise_elastic:
            parts = split_evenly(samples, setup.elastic_parts(self.pairs))
            return parts[rank_slice(len(parts), context.rank, context.world_size)]
        own = samples[rank_slice(self.pairs, context.rank, context.world_size)]
        return split_evenly(own, self.train.accumulate)

    def load(self, step: int) -> List[PairBatch]:
        """The PairBatches of `samples`, on the host; page-locked for a GPU."""
        faults.at("load_batch", step)
        train = self.train
        batches = [
            self._load(self.store, part, train.max_keypoints, self._augmentation)
            for part in self.samples(step)
        ]
        pin = self.context.device.type == "cuda" and train.loader != "dali"  # which copies by itself
        return [batch.pinned() for batch in batches] if pin else batches

    def prefetched(self, steps: Sequence[int]) -> Generator[List[PairBatch], None, None]:
        """`load` of each of `steps`, made in a thread before it is asked for; closing it ends the thread."""
        return self._prefetched(self.load, steps)
