"""Synthetic pairs: two views with known keypoints under a known homography, without images.

They measure the training step alone (`--loader synthetic`), and are the input of benchmarks.
Nothing can be learnt from them.
"""

from __future__ import annotations

import functools
from typing import List, Sequence, Tuple

import numpy as np

from pipeline.features.store import Store
from pipeline.train.pairs.order import Sample
from superglue_sift.batch import Pair, PairBatch, from_pairs
from superglue_sift.extractors import descriptors_of
from superglue_sift.geometry import transform
from superglue_sift.sift import ORIENTED

SIZE = (640, 480)  # px
SEVERAL = 0.18  # fraction of keypoints with two orientations, as in SIFT
SHARED = 0.6  # fraction of keypoints visible in the other view, as in real pairs at 3 px
DIFFERENT_PAIRS = 16  # of `load_batch`, created once; the seed of a sample chooses one


def make_pair(
    keypoints: int,
    rng: np.random.Generator,
    size: Tuple[int, int] = SIZE,
    dtype: np.dtype = ORIENTED,
) -> Tuple[Pair, np.ndarray]:
    """Two views of `keypoints` each, of `size` (width, height) px, and H_0to1 (3, 3), a mild one.

    A point that both views show has similar descriptors in both.
    """
    H = np.eye(3) + rng.normal(0, [[0.05, 0.05, 15], [0.05, 0.05, 15], [5e-5, 5e-5, 0]])
    records0 = _make_view(keypoints, rng, size, dtype)
    records1 = _make_view(keypoints, rng, size, dtype)
    seen = rng.permutation(keypoints)[: int(SHARED * keypoints)]
    xy = np.stack([records0["x"], records0["y"]], 1)[seen].astype(np.float64)
    moved = transform(xy, H)
    records1["x"][: len(seen)], records1["y"][: len(seen)] = moved.T
    own = descriptors_of(records0)[seen]
    descriptors_of(records1)[: len(seen)] = np.clip(own + rng.normal(0, 15, own.shape), 0, 255)
    return Pair(records0, records1, size, size), H


def _make_view(
    keypoints: int, rng: np.random.Generator, size: Tuple[int, int], dtype: np.dtype
) -> np.ndarray:
    records = np.zeros(keypoints, dtype)
    records["x"] = rng.uniform(0, size[0], keypoints)
    records["y"] = rng.uniform(0, size[1], keypoints)
    records["scale"] = rng.uniform(2, 20, keypoints)
    records["angle"] = rng.uniform(0, 360, keypoints)
    records["score"] = np.sort(rng.uniform(0.01, 0.1, keypoints))[::-1]
    descriptors = descriptors_of(records)
    descriptors[:] = np.clip(rng.exponential(30, descriptors.shape), 0, 255)
    if "second_descriptor" in (dtype.names or ()):
        several = rng.random(keypoints) < SEVERAL
        second = rng.exponential(30, (several.sum(), descriptors.shape[1]))
        records["second_descriptor"][several] = np.clip(second, 0, 255)
    return records


def make_pairs(keypoints: int, pairs: int, seed: int = 0) -> Tuple[List[Pair], np.ndarray]:
    """`pairs` independent pairs, and H_0to1 (pairs, 3, 3)."""
    rng = np.random.default_rng(seed)
    made = [make_pair(keypoints, rng) for _ in range(pairs)]
    return [pair for pair, _ in made], np.stack([H for _, H in made])


def make_batch(keypoints: int, pairs: int, seed: int = 0) -> PairBatch:
    """A batch in which every view has exactly `keypoints`."""
    return from_pairs(*make_pairs(keypoints, pairs, seed))


def load_batch(store: Store, samples: Sequence[Sample], max_keypoints: int) -> PairBatch:
    """In place of `loader.load_batch`: takes no time, and has `max_keypoints` in every view.

    The store gives only the size of the views and the dtype of the records.
    """
    numbers = [sample.seed % DIFFERENT_PAIRS for sample in samples]
    made = [_keep_pair(number, max_keypoints, store.view_size, store.dtype) for number in numbers]
    homographies = np.array([H for _, H in made]).reshape(-1, 3, 3)
    return from_pairs([pair for pair, _ in made], homographies, store.dtype)


@functools.lru_cache(maxsize=4 * DIFFERENT_PAIRS)
def _keep_pair(
    seed: int, keypoints: int, size: Tuple[int, int], dtype: np.dtype
) -> Tuple[Pair, np.ndarray]:
    return make_pair(keypoints, np.random.default_rng(seed), size, dtype)
