"""Synthetic pairs that take no time to load, to measure the training step alone. Nothing can be
learnt from them.
"""

from __future__ import annotations

import functools
from typing import Sequence, Tuple

import numpy as np

from pipeline.features.store import Store
from pipeline.train.pairs.order import Sample
from superglue_sift.batch import Pair, PairBatch, from_pairs
from superglue_sift.descriptors import descriptors_of
from superglue_sift.geometry import transform
from superglue_sift.sift import KEYPOINT

DIFFERENT_PAIRS = 16  # created once; the seed of a sample chooses one


def load_batch(
    store: Store, samples: Sequence[Sample], max_keypoints: int, augmentation=None
) -> PairBatch:
    """A synthetic pair for each sample: `max_keypoints` keypoints in both views, most of which
    match.

    Signature of `loader.load_batch`; the store gives only the size of the views and the dtype of
    the records, and `augmentation` has no effect.
    """
    width, height = store.view_size
    return synthetic_batch(
        [sample.seed for sample in samples], (width, height), max_keypoints, store.dtype
    )


def synthetic_batch(
    seeds: Sequence[int], size: Tuple[int, int], max_keypoints: int, dtype: np.dtype = KEYPOINT
) -> PairBatch:
    """A synthetic pair for each seed, of views of `size` (width, height) px; needs no store."""
    drawn = [_pair(seed % DIFFERENT_PAIRS, size, max_keypoints, dtype) for seed in seeds]
    return from_pairs(
        [pair for pair, _ in drawn], np.array([H for _, H in drawn]).reshape(-1, 3, 3), dtype
    )


@functools.lru_cache(maxsize=4 * DIFFERENT_PAIRS)
def _pair(seed: int, size: Tuple[int, int], count: int, dtype: np.dtype) -> Tuple[Pair, np.ndarray]:
    rng = np.random.default_rng(seed)
    H = np.eye(3)
    H[:2] += rng.normal(0, 0.05, (2, 3)) * [1, 1, 100]
    first = np.zeros(count, dtype)
    second = np.zeros(count, dtype)
    xy = rng.uniform(0, 1, (count, 2)) * (np.array(size) - 1)
    moved = np.clip(transform(xy, H) + rng.normal(0, 0.5, xy.shape), 0, np.array(size) - 1)
    for records, place in ((first, xy), (second, moved)):
        records["x"], records["y"] = place.T
        records["scale"] = rng.uniform(2, 20, count)
        records["angle"] = rng.uniform(0, 360, count)
        records["score"] = np.sort(rng.uniform(0.01, 0.1, count))[::-1]
    own = descriptors_of(first)
    other = descriptors_of(second)
    own[:] = rng.integers(0, 160, own.shape)
    other[:] = np.clip(own + rng.normal(0, 20, own.shape), 0, 255)
    return Pair(first, second[rng.permutation(count)], size, size), H
