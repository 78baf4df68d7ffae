"""From the store of keypoints to the batches of each step: which pairs, who loads them, on which
device.

The order of the pairs is a pure function of the seed and the position. A run that resumes at step
s, with any number of processes, sees exactly the pairs of the uninterrupted run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import os
import resource
import shutil
import sys
from typing import (
    Any,
    Callable,
    Generator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    Union,
)

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pipeline import signals
from pipeline.distributed import Context, shared_memory_needed
from pipeline.errors import read_number
from pipeline.files import format_bytes
from pipeline.keypoints.store import Store, View
from pipeline.params import RunParams, TrainParams
from pipeline.prefetch import prefetch
from pipeline.train.augmentation import NO_AUGMENTATION, NO_CHANGE, Augmentation
from superglue_sift.geometry.two_view import compose, inverse
from superglue_sift.network.batch import Pair, PairBatch, from_pairs

Made = TypeVar("Made")

# separate streams of random numbers
_SHUFFLE = 1
_DRAW = 2
_VALIDATION = 3
# The homography of a negative pair. It maps every point far outside the other view, so that no
# keypoint has a true match.
APART = np.array([[1.0, 0.0, 1e6], [0.0, 1.0, 1e6], [0.0, 0.0, 1.0]])

# Largest number of processes that load batches for a GPU, and the steps that each loads in advance
MAX_PROCESSES = 4
AHEAD = 2
# Steps whose batches the training itself holds: the current step and the next one, because it takes
# the next before it frees the current
HELD = 2
TENSORS = 8  # tensors of a PairBatch; each is a file in shared memory and fills whole pages
PAGE = 4096  # bytes of a page of memory
OTHER_FILES = 128  # files that the rest of the training may have open
SHARED = "/dev/shm"
# Environment variable: the number of loading processes of each rank. 0 means that a thread loads.
# "auto" or unset means up to MAX_PROCESSES for a GPU, and a thread for a CPU.
NUMBER = "SG_LOADER_PROCESSES"
# The processes inherit the mapped store and start in milliseconds. Python 3.14's default is
# forkserver, whose server dies of a SIGTERM to all processes and loses their exit codes.
START_METHOD = "fork"


class Sample(NamedTuple):
    """One pair to train on: two views of one image, and the seed of its own augmentation."""

    image: int
    view0: int
    view1: int
    seed: int


def training_pairs(
    seed: int, images: int, views: int, start: int, stop: Optional[int] = None
) -> List[Sample]:
    """Return the pairs at the positions `start` to `stop` - 1 of an endless sequence.

    Without `stop`, return only the pair at `start`. Position p belongs to epoch p // images. Each
    epoch shuffles the images. In every epoch each image gives one ordered pair of its `views`,
    drawn by (seed, epoch, image).
    """
    samples = []
    for position in range(start, start + 1 if stop is None else stop):
        epoch, place = divmod(position, images)
        image = int(_shuffle(seed, epoch, images)[place])
        draw = _generator(seed, _DRAW, epoch, image)
        view0, view1 = draw.choice(views, size=2, replace=False)
        samples.append(Sample(image, int(view0), int(view1), int(draw.integers(2**31))))
    return samples


def validation_pairs(seed: int, images: int, views: int, count: int) -> List[Sample]:
    """Return a fixed list of at most `count` pairs, spread evenly over the images.

    Every second pair is augmented. The validation thus shows both augmented pairs, as in training,
    and pairs as they are stored.
    """
    samples = []
    for i in range(min(count, images * views * (views - 1))):
        draw = _generator(seed, _VALIDATION, i)
        view0, view1 = draw.choice(views, size=2, replace=False)
        image = i * images // count if count < images else i % images
        # An image may give pairs in several rounds. Over the rounds it has both kinds of pairs.
        augmented = (i % images + i // images) % 2 == 1
        own = int(draw.integers(2**31)) if augmented else NO_AUGMENTATION
        samples.append(Sample(image, int(view0), int(view1), own))
    return samples


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@functools.lru_cache(maxsize=1)  # keeps the order of the latest epoch only
def _shuffle(seed: int, epoch: int, images: int) -> np.ndarray:
    """Return the indices of all images in the order of this epoch, (images,) int64."""
    return _generator(seed, _SHUFFLE, epoch).permutation(images)


def rank_slice(count: int, rank: int, world_size: int) -> slice:
    """Return the contiguous part of `count` items for `rank`. Sizes differ by at most one."""
    return slice(count * rank // world_size, count * (rank + 1) // world_size)


def split_evenly(samples: List[Sample], parts: int) -> List[List[Sample]]:
    """Split `samples` into `parts` contiguous micro-batches whose sizes differ by at most one."""
    return [samples[rank_slice(len(samples), part, parts)] for part in range(parts)]


def load_batch(
    store: Store,
    samples: Sequence[Sample],
    keypoints: Union[int, Tuple[int, int]],
    augmentation: Augmentation = NO_CHANGE,
) -> PairBatch:
    """Load the PairBatch of these samples, in order, with their homographies.

    If there are no samples, the batch is empty.

    Args:
        keypoints: largest numbers of keypoints of the two views, the same for every pair. If it is
            one number, the augmentation draws the numbers of each pair, up to this one. A view
            keeps its first keypoints.
        augmentation: random changes of each pair, determined by its `sample.seed`. A pair with the
            seed NO_AUGMENTATION is not changed.
    """
    if not samples:
        return from_pairs([], np.zeros((0, 3, 3)), store.dtype, cells=np.zeros((0, 2, 3, 3)))
    pairs: List[Tuple[View, View]] = []
    negative = []
    for sample in samples:
        change = NO_CHANGE if sample.seed == NO_AUGMENTATION else augmentation
        image1 = change.second_image(sample.image, len(store), sample.seed)
        others = functools.partial(_another_view, store, (sample.image, image1))
        limits = keypoints
        if isinstance(limits, int):
            limits = change.counts(limits, sample.seed)
        stored = store.view(sample.image, sample.view0), store.view(image1, sample.view1)
        view0, view1 = (
            change.apply(view, sample.seed, which, others, store.min_scale, limits[which])
            for which, view in enumerate(stored)
        )
        pairs.append((view0, view1))
        negative.append(image1 != sample.image)
    # One call composes all homographies (B, 3, 3). 64 calls for single pairs would take 1 ms.
    to0, to1 = (np.stack([view.H_image_to_view for view in views]) for views in zip(*pairs))
    H_0to1 = compose(to1, inverse(to0))
    H_0to1[negative] = APART
    # (B, 2, 3, 3): the cell of each view of each pair
    cells = np.array([[one.cell, other.cell] for one, other in pairs])
    both = [Pair(one.records, other.records, one.size, other.size) for one, other in pairs]
    return from_pairs(both, H_0to1, cells=cells)


def _another_view(
    store: Store, shown: Tuple[int, int], random: np.random.Generator
) -> Optional[View]:
    """Return a random view of a random image, or None if that image is in `shown`."""
    image = int(random.integers(len(store)))
    view = int(random.integers(store.views_per_image))
    return None if image in shown else store.view(image, view)


class StepBatches:
    """The micro-batches of every step on this rank. Each is a function of the step alone.

    `pairs` is the number of pairs of a step over all ranks.
    """

    def __init__(
        self, train: TrainParams, run: RunParams, store: Store, pairs: int, context: Context
    ) -> None:
        self.train = train
        self.store = store
        self.pairs = pairs
        self.context = context
        self.parts = run.accumulate
        self._augmentation = Augmentation.of(train)
        keypoints = min(train.max_keypoints, int(store.counts.max(initial=1)))
        share = -(-pairs // context.world_size)
        bytes_of_step = size_of_step(share, keypoints, store.dtype.itemsize, self.parts)
        self._processes = choose_processes(context.device, bytes_of_step, self.parts * TENSORS)

    def samples(self, step: int) -> List[List[Sample]]:
        """Return this rank's pairs of global step `step`, split into micro-batches."""
        store = self.store
        bounds = step * self.pairs, (step + 1) * self.pairs
        pairs = training_pairs(self.train.seed, len(store), store.views_per_image, *bounds)
        mine = rank_slice(self.pairs, self.context.rank, self.context.world_size)
        return split_evenly(pairs[mine], self.parts)

    def load(self, step: int) -> List[PairBatch]:
        """Load the PairBatches of `samples(step)` in the memory of the host.

        All pairs of a step have the same numbers of keypoints. A GPU pads all pairs to the largest
        number, which would be seven times the work if each pair had its own number.
        """
        limit = self.train.max_keypoints
        counts = self._augmentation.counts(limit, self.train.seed, step)
        return [
            load_batch(self.store, part, counts, self._augmentation) for part in self.samples(step)
        ]

    def prefetch(self, steps: Sequence[int]) -> Generator[List[PairBatch], None, None]:
        """Load the batches of each of `steps` in advance, and move them to the device of this rank.

        For a GPU processes load the batches, otherwise a thread does. Closing the generator ends
        them.
        """
        if self._processes:
            ahead = prefetch_by_processes(self.load, steps, self._processes)
        else:
            ahead = prefetch(self._load_for_device, steps)
        with contextlib.closing(ahead):
            for batches in ahead:
                yield [batch.to(self.context.device) for batch in batches]

    def _load_for_device(self, step: int) -> List[PairBatch]:
        """Load a step. For a GPU, use page-locked memory, so that no step waits for the copy."""
        batches = self.load(step)
        if self.context.device.type == "cuda":
            return [batch.pin_memory() for batch in batches]
        return batches


# Processes that load batches for a GPU. A thread would compete with the Python code that launches
# kernels. The processes ignore SIGTERM, SIGINT and SIGUSR1, which may go to all processes of a job,
# and end with the training. A killed one counts as a lost rank: torch's DataLoader raises in the
# middle of a step, whose result cannot be used.


def size_of_step(pairs: int, keypoints: int, record: int, parts: int = 1) -> int:
    """Return the bytes of shared memory that one step of one rank takes.

    Each pair has two views of `keypoints` keypoints with `record` bytes each, their counts and
    sizes, a homography and two cells. The pairs are in `parts` micro-batches.
    """
    # A view has a count and a size (8 bytes each) and a cell (3 x 3 float64). A pair has a
    # homography.
    return pairs * (2 * (keypoints * record + 8 + 8 + 72) + 72) + parts * TENSORS * PAGE


def steps_in_memory(processes: int) -> int:
    """Return the largest number of steps whose batches are in shared memory at the same time."""
    return processes * AHEAD + HELD


def fit(wanted: int, step_bytes: int, step_files: int, memory: int, files: int) -> int:
    """Return how many processes, at most `wanted`, can load batches on this machine.

    Their batches must fit into `memory` bytes of shared memory and `files` open files. If the
    result is 0, a thread loads the batches.
    """
    steps = min(memory // step_bytes, (files - OTHER_FILES) // step_files)
    return max(min(wanted, (steps - HELD) // AHEAD), 0)


def memory_of_rank(on_gpu: bool, ranks: int) -> int:
    """Return the bytes of shared memory for the batches of each of the machine's `ranks` ranks."""
    with contextlib.suppress(OSError):
        needed = shared_memory_needed(ranks * on_gpu)
        return max(shutil.disk_usage(SHARED).free - needed, 0) // ranks
    return 0


def wanted_processes(on_gpu: bool, ranks: int) -> int:
    """Return how many processes each of `ranks` ranks wants, before memory limits them.

    On a CPU the answer is 0: the step needs the cores, and handing a batch between processes takes
    longer than loading it. Raises RequestError if SG_LOADER_PROCESSES is not a number.
    """
    if os.environ.get(NUMBER, "") not in ("", "auto"):
        return read_number(NUMBER, 0)
    return max(min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // ranks - 1), 0) if on_gpu else 0


def choose_processes(device: torch.device, step_bytes: int, step_files: int) -> int:
    """Choose how many processes load this rank's batches. If the result is 0, a thread loads them.

    Prints a line if shared memory or the limit of open files reduces the number.
    """
    on_gpu = device.type == "cuda"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wanted = wanted_processes(on_gpu, ranks)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    chosen = fit(wanted, step_bytes, step_files, memory_of_rank(on_gpu, ranks), files)
    if chosen < wanted and os.environ.get("RANK", "0") == "0":
        instead = f"{chosen} process(es)" if chosen else "a thread"
        needed = format_bytes(steps_in_memory(wanted) * step_bytes * ranks)
        print(
            f"batches are loaded by {instead} instead of {wanted}, which need {needed} of {SHARED}"
            " (docker run --shm-size), or more open files (ulimit -n)"
        )
    return chosen


class _Flag:
    """A multiprocessing.Event without its lock.

    A process that is killed in `is_set` would keep the lock, and the main process would wait for it
    for ever.
    """

    def __init__(self, context: Any) -> None:
        self._value = context.RawValue("b", 0)

    def set(self) -> None:
        self._value.value = 1

    def is_set(self) -> bool:
        return self._value.value == 1


class _Steps(Dataset):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __getitem__(self, step: int) -> Any:
        return self.make(step)


def _begin(worker: int, parent: int) -> None:
    signals.serve(parent)
    sys.excepthook = _silent_about_the_end


def _silent_about_the_end(kind, error, trace) -> None:
    """Print no traceback when the main process ends and closes a connection.

    DataLoader sends exceptions of `make` to the main process. Only multiprocessing's thread that
    hands over a batch's file descriptors calls this.
    """
    if not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, trace)


def prefetch_by_processes(
    make: Callable[[int], Made],
    steps: Sequence[int],
    processes: int,
    start_method: str = START_METHOD,
) -> Generator[Made, None, None]:
    """Yield `make(step)` for each of `steps`, computed in advance by processes.

    The tensors are in page-locked memory if there is a GPU.

    Args:
        start_method: "fork", or "spawn", which serialises `make`. A `Store` in it then opens its
            files again.

    Raises:
        RuntimeError: a process was killed (see `a_process_died`). It may be raised anywhere in the
            main thread.
    """
    before = set(multiprocessing.active_children())
    context: Any = copy.copy(multiprocessing.get_context(start_method))
    context.Event = functools.partial(_Flag, context)  # the flag that tells the processes to end
    loader = DataLoader(
        _Steps(make),
        sampler=steps,
        batch_size=None,
        num_workers=processes,
        prefetch_factor=AHEAD,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context=context,
        worker_init_fn=functools.partial(_begin, parent=os.getpid()),
        # A draw from the global generator would change the state that a checkpoint holds
        generator=torch.Generator(),
    )
    with signals.block():
        batches: Any = iter(loader)  # Any: `_shutdown_workers` is not in the stubs
    started = set(multiprocessing.active_children()) - before
    try:
        yield from batches
    finally:
        # `__del__` would run later, when the traceback of an error is freed
        batches._shutdown_workers()
        for process in started:
            process.kill()  # a process that hangs in a read ignores SIGTERM


def a_process_died(error: BaseException) -> bool:
    """Return whether torch's DataLoader raised this because one of its processes was killed."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")
