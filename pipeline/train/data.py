"""Choose the pairs of each step, and load them as batches from the store of keypoints.

The order of the pairs is a pure function of the seed and the position. A run that resumes at step
s, with any number of processes, sees exactly the pairs of the uninterrupted run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from dataclasses import dataclass
from typing import Any, Callable, Generator, List, NamedTuple, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset

from pipeline import workers
from pipeline.distributed import Context
from pipeline.errors import read_environment_number
from pipeline.keypoints.store import KeypointStore
from pipeline.params import Augmentation, RunParams, TrainParams
from pipeline.train.augmentation import (
    NO_AUGMENTATION,
    NO_CHANGE,
    choose_second_image,
    draw_counts,
    read_changed_view,
)
from pipeline.workers import prefetch
from superglue_sift.features.features import Features
from superglue_sift.files import GIB
from superglue_sift.geometry.two_view import compose, inverse
from superglue_sift.network.batch import (
    group_pairs,
    make_batch,
    map_tensors,
    pad_images,
    select_images,
)

# Numbers of separate streams of random numbers
_SHUFFLE = 1
_DRAW = 2
_VALIDATION = 3
# The homography of a negative pair. It maps every point far outside the other view, so that no
# keypoint has a true match.
APART = np.array([[1.0, 0.0, 1e6], [0.0, 1.0, 1e6], [0.0, 0.0, 1.0]])

# Largest number of processes that load batches for a GPU. Each holds a few steps in shared memory,
# for which 1 GiB is enough.
MAX_PROCESSES = 4
SHARED_MEMORY = "/dev/shm"  # Folder of shared memory
# Environment variable: number of processes of each rank that load. 0 means that a thread loads.
# "auto" or unset means up to MAX_PROCESSES for a GPU, and a thread for a CPU.
LOADER_PROCESSES = "SG_LOADER_PROCESSES"


class Sample(NamedTuple):
    """One pair to train on.

    Attributes:
        image: index of the image.
        view0: index of the first view of the image.
        view1: index of the second view. In a negative pair it is a view of another image.
        seed: the seed of the augmentation of the pair.
    """

    image: int
    view0: int
    view1: int
    seed: int


@dataclass(frozen=True)
class PairBatch:
    """B pairs to train on.

    Attributes:
        images0, images1: the images of the pairs, with M and N keypoints.
        H_0to1: (B, 3, 3) float64, maps pixels of image 0 to image 1.
        cells: (B, 2, 3, 3) float64, the cell of each view of each pair (`find_true_matches`).
    """

    images0: Features
    images1: Features
    H_0to1: Tensor
    cells: Tensor

    def __len__(self) -> int:
        """Return the number of pairs, B."""
        return len(self.H_0to1)

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.H_0to1.device

    def to(self, device: Union[str, torch.device]) -> PairBatch:
        """Return the batch on `device`: itself if it is there, otherwise a copy."""
        if torch.device(device) == self.device:
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PairBatch:
        """Copy the batch to page-locked memory, from which copies to a GPU are asynchronous."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> PairBatch:
        """Return a batch with the results of `function` as its tensors."""
        images0 = map_tensors(function, self.images0)
        images1 = map_tensors(function, self.images1)
        return PairBatch(images0, images1, function(self.H_0to1), function(self.cells))

    def select(self, pairs: List[int]) -> PairBatch:
        """Return a batch of the pairs at these indices, with as little padding as they need."""
        if pairs == list(range(len(self))):
            return self
        images0 = select_images(self.images0, pairs)
        images1 = select_images(self.images1, pairs)
        return PairBatch(images0, images1, self.H_0to1[pairs], self.cells[pairs])

    def pad(self, pairs: int, keypoints: int) -> PairBatch:
        """Return a batch padded to `pairs` pairs with `keypoints` keypoints of each image.

        The added pairs have no keypoints, and come last.
        """
        images0 = pad_images(self.images0, pairs, keypoints)
        images1 = pad_images(self.images1, pairs, keypoints)
        added = pairs - len(self)
        H_0to1 = pad(self.H_0to1, [0, 0, 0, 0, 0, added])
        cells = pad(self.cells, [0, 0, 0, 0, 0, 0, 0, added])
        return PairBatch(images0, images1, H_0to1, cells)

    def split_by_size(self) -> Tuple[List[int], List[PairBatch]]:
        """Split into batches of pairs with similar numbers of keypoints (`group_pairs`).

        Returns:
            The indices of the pairs in the order of the batches, and the batches.
        """
        groups = group_pairs(self.images0, self.images1)
        return [pair for group in groups for pair in group], [self.select(g) for g in groups]


def draw_training_pairs(seed: int, images: int, views: int, start: int, stop: int) -> List[Sample]:
    """Return the pairs at the positions `start` to `stop` - 1 of an endless sequence.

    Position p belongs to epoch p // images. Each epoch shuffles the images. In every epoch each
    image gives one ordered pair of its views, drawn by (seed, epoch, image).

    Args:
        seed: the key `train.seed`.
        images: number of images.
        views: number of views of each image.
        start: the first position.
        stop: the position after the last one.
    """
    samples = []
    for position in range(start, stop):
        epoch, index = divmod(position, images)
        image = int(_shuffle_images(seed, epoch, images)[index])
        rng = _make_generator(seed, _DRAW, epoch, image)
        view0, view1 = rng.choice(views, size=2, replace=False)
        samples.append(Sample(image, int(view0), int(view1), int(rng.integers(2**31))))
    return samples


def draw_validation_pairs(seed: int, images: int, views: int, count: int) -> List[Sample]:
    """Return a fixed list of pairs, spread evenly over the images.

    Every second pair is augmented. The validation thus has both augmented pairs, as in training,
    and pairs as they are stored.

    Args:
        seed: the key `train.seed`.
        images: number of images.
        views: number of views of each image.
        count: largest number of pairs. There are no more than ordered pairs of views.
    """
    samples = []
    for index in range(min(count, images * views * (views - 1))):
        rng = _make_generator(seed, _VALIDATION, index)
        view0, view1 = rng.choice(views, size=2, replace=False)
        image = index * images // count if count < images else index % images
        # An image that gives pairs in several rounds gives both kinds of pairs.
        is_augmented = (index % images + index // images) % 2 == 1
        pair_seed = int(rng.integers(2**31)) if is_augmented else NO_AUGMENTATION
        samples.append(Sample(image, int(view0), int(view1), pair_seed))
    return samples


def _make_generator(*key: int) -> np.random.Generator:
    """Return the generator of a key, such as (seed, stream, epoch, image)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@functools.lru_cache(maxsize=1)  # For the order of the latest epoch
def _shuffle_images(seed: int, epoch: int, images: int) -> np.ndarray:
    """Return the indices of all images in the order of this epoch, (images,) int64."""
    return _make_generator(seed, _SHUFFLE, epoch).permutation(images)


def slice_for_rank(count: int, rank: int, world_size: int) -> slice:
    """Return the contiguous part of `count` items for `rank`. Sizes differ by at most one."""
    return slice(count * rank // world_size, count * (rank + 1) // world_size)


def split_evenly(samples: List[Sample], parts: int) -> List[List[Sample]]:
    """Split `samples` into `parts` contiguous micro-batches whose sizes differ by at most one."""
    return [samples[slice_for_rank(len(samples), index, parts)] for index in range(parts)]


def load_batch(
    store: KeypointStore,
    samples: Sequence[Sample],
    keypoints: Union[int, Tuple[int, int]],
    augmentation: Augmentation = NO_CHANGE,
) -> PairBatch:
    """Load the PairBatch of these samples, in order, with their homographies.

    Args:
        store: the keypoints.
        samples: the pairs. If there are none, the batch is empty.
        keypoints: largest numbers of keypoints of the two views, the same for every pair. If it is
            one number, the augmentation draws the numbers of each pair, up to this one. A view
            keeps its first keypoints.
        augmentation: random changes of each pair, determined by its `sample.seed`. A pair with the
            seed NO_AUGMENTATION is not changed.
    """
    if not samples:
        return load_batch(store, [Sample(0, 0, 1, NO_AUGMENTATION)], 1).select([])
    pairs = []
    is_negative = []
    for sample in samples:
        changes = NO_CHANGE if sample.seed == NO_AUGMENTATION else augmentation
        image1 = choose_second_image(changes, sample.image, len(store), sample.seed)
        limits = keypoints
        if isinstance(limits, int):
            limits = draw_counts(changes, limits, sample.seed)
        images = sample.image, image1
        pairs.append(
            [
                read_changed_view(store, images, index, view, changes, sample.seed, limits[index])
                for index, view in enumerate((sample.view0, sample.view1))
            ]
        )
        is_negative.append(image1 != sample.image)
    # (B, 3, 3): one call composes all homographies. For 64 pairs, single calls would take 1 ms.
    to0, to1 = (np.stack([view.H_image_to_view for view in views]) for views in zip(*pairs))
    H_0to1 = compose(to1, inverse(to0))
    H_0to1[is_negative] = APART
    # (B, 2, 3, 3): the cell of each view of each pair
    cells = np.array([[view.cell for view in pair] for pair in pairs])
    images0, images1 = (make_batch([view.features for view in views]) for views in zip(*pairs))
    return PairBatch(images0, images1, torch.from_numpy(H_0to1), torch.from_numpy(cells))


class StepBatches(Dataset):
    """The micro-batches of every step on this rank. Each is a function of the step alone.

    Attributes:
        train: the section `train`.
        store: the keypoints.
        pairs: number of pairs of a step over all ranks.
        context: this process among the ranks.
        parts: number of micro-batches of a step on this rank.
    """

    def __init__(
        self, train: TrainParams, run: RunParams, store: KeypointStore, pairs: int, context: Context
    ) -> None:
        self.train = train
        self.store = store
        self.pairs = pairs
        self.context = context
        self.parts = run.accumulate

    def draw_samples(self, step: int) -> List[List[Sample]]:
        """Return this rank's pairs of a step, split into micro-batches.

        All ranks draw the pairs of the whole step, and each takes its part.
        """
        store = self.store
        bounds = step * self.pairs, (step + 1) * self.pairs
        pairs = draw_training_pairs(self.train.seed, len(store), store.views_per_image, *bounds)
        rank_part = slice_for_rank(self.pairs, self.context.rank, self.context.world_size)
        return split_evenly(pairs[rank_part], self.parts)

    def load(self, step: int) -> List[PairBatch]:
        """Load this rank's micro-batches of a step into the memory of the host.

        All pairs of a step have the same numbers of keypoints. A GPU pads all pairs to the largest
        number, and different numbers for each pair would make this seven times the work.
        """
        limit = self.train.max_keypoints
        counts = draw_counts(self.train.augmentation, limit, self.train.seed, step)
        return [
            load_batch(self.store, part, counts, self.train.augmentation)
            for part in self.draw_samples(step)
        ]

    def __getitem__(self, step: int) -> List[PairBatch]:
        return self.load(step)

    def prefetch(self, steps: Sequence[int]) -> Generator[List[PairBatch], None, None]:
        """Yield this rank's micro-batches of each step, loaded in advance, on its device.

        For a GPU, processes load the batches, otherwise a thread. Closing the generator ends them.
        """
        on_gpu = self.context.device.type == "cuda"
        processes = choose_loader_processes(self.context.device)
        if processes:
            ahead = self._prefetch_by_processes(steps, processes)
        else:
            # From page-locked memory, a copy to the GPU needs no waiting.
            ahead = prefetch(
                lambda step: [b.pin_memory() if on_gpu else b for b in self.load(step)], steps
            )
        with contextlib.closing(ahead):
            for batches in ahead:
                yield [batch.to(self.context.device) for batch in batches]

    def _prefetch_by_processes(
        self, steps: Sequence[int], processes: int
    ) -> Generator[List[PairBatch], None, None]:
        """Yield `load(step)` of each step, computed by processes, page-locked if there is a GPU.

        A thread would compete with the Python code that launches kernels. If a process is killed,
        torch raises an error in the main thread, and the same command resumes the training.
        """
        loader = DataLoader(
            self,
            sampler=steps,
            batch_size=None,
            num_workers=processes,
            pin_memory=torch.cuda.is_available(),
            # The processes inherit the mapped store and start in milliseconds. Python 3.14's
            # default is forkserver, whose server dies of a SIGTERM to all processes.
            multiprocessing_context="fork",
            worker_init_fn=functools.partial(workers.ignore_signals, parent_id=os.getpid()),
            # A draw from the global generator would change the state that a checkpoint holds.
            generator=torch.Generator(),
        )
        with workers.block_signals():
            batches: Any = iter(loader)  # The stubs lack `_shutdown_workers`
        try:
            yield from batches
        finally:
            # Otherwise `__del__` would do it, which runs when the traceback of an error is freed.
            batches._shutdown_workers()


def choose_loader_processes(device: torch.device) -> int:
    """Choose how many processes load this rank's batches. If the result is 0, a thread loads them.

    Without SG_LOADER_PROCESSES, a thread loads them for a CPU: the step needs the cores, and
    sending a batch between processes takes longer than loading it.

    Raises:
        RequestError: If SG_LOADER_PROCESSES is not a number.
    """
    if os.environ.get(LOADER_PROCESSES, "") not in ("", "auto"):
        return read_environment_number(LOADER_PROCESSES, 0)
    if device.type == "cpu":
        return 0
    ranks = read_environment_number("LOCAL_WORLD_SIZE", 1)
    cores = len(os.sched_getaffinity(0)) // ranks
    return min(
        MAX_PROCESSES, max(cores - 1, 0), shutil.disk_usage(SHARED_MEMORY).free // GIB // ranks
    )
