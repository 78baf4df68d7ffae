"""Order of the training pairs: a pure function of the seed and the position.

A run resumed at step s, with any number of processes, sees exactly the pairs of the uninterrupted
run.
"""

from __future__ import annotations

import functools
from typing import List, NamedTuple

import numpy as np

# separate streams of random numbers
_SHUFFLE = 1
_DRAW = 2
_VALIDATION = 3

NO_AUGMENTATION = -1  # the seed of a pair that is shown as it is stored


class Sample(NamedTuple):
    """One pair to train on: two views of one image, and the seed of its own augmentation."""

    image: int
    view0: int
    view1: int
    seed: int


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@functools.lru_cache(maxsize=1)  # of the epoch shuffled last
def _shuffle(seed: int, epoch: int, images: int) -> np.ndarray:
    """The images in the order of this epoch, (images,) int64."""
    return _generator(seed, _SHUFFLE, epoch).permutation(images)


class PairOrder(NamedTuple):
    """The endless sequence of training pairs. Position p is in epoch p // images; each epoch
    shuffles the images.

    In every epoch each image gives one ordered pair of its views, drawn by (seed, epoch, image).
    """

    seed: int
    images: int
    views: int

    def sample(self, position: int) -> Sample:
        """The pair at a global position 0, 1, 2, ..."""
        epoch, place = divmod(position, self.images)
        image = int(_shuffle(self.seed, epoch, self.images)[place])
        draw = _generator(self.seed, _DRAW, epoch, image)
        view0, view1 = draw.choice(self.views, size=2, replace=False)
        return Sample(image, int(view0), int(view1), int(draw.integers(2**31)))

    def step(self, step: int, batch: int) -> List[Sample]:
        """The `batch` pairs of global step 0, 1, 2, ..., in order."""
        return [self.sample(p) for p in range(step * batch, (step + 1) * batch)]


def validation_pairs(seed: int, images: int, views: int, count: int) -> List[Sample]:
    """A fixed list of at most `count` pairs, spread evenly over the images.

    Every second pair is augmented, so that they show what is trained on and what is stored.
    """
    samples = []
    for i in range(min(count, images * views * (views - 1))):
        draw = _generator(seed, _VALIDATION, i)
        view0, view1 = draw.choice(views, size=2, replace=False)
        image = i * images // count if count < images else i % images
        # over the rounds, too, each image has both kinds
        augmented = (i % images + i // images) % 2 == 1
        own = int(draw.integers(2**31)) if augmented else NO_AUGMENTATION
        samples.append(Sample(image, int(view0), int(view1), own))
    return samples


def rank_slice(count: int, rank: int, world_size: int) -> slice:
    """The contiguous part of `count` items for `rank`; sizes of parts differ by at most one."""
    return slice(count * rank // world_size, count * (rank + 1) // world_size)
