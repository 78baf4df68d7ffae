"""From the store to batches: views are read, changed as the augmentation says, and packed with their truth."""

from __future__ import annotations

import functools
from typing import Any, Callable, Generator, List, Sequence, Tuple

import numpy as np
from numpy.linalg import inv

from pipeline.features.store import Store
from pipeline.pairs.augmentation import APART, UNCHANGED, Augmentation
from pipeline.pairs.order import Sample
from pipeline.pairs.prefetch import prefetched
from superglue_sift.batch import Pair, PairBatch, from_pairs
from superglue_sift.geometry import normalized


def load_batch(
    store: Store, samples: Sequence[Sample], max_keypoints: int, augmentation: Augmentation = UNCHANGED
) -> PairBatch:
    """The PairBatch of these samples, in order; an empty list gives a batch of no pairs with homographies.

    Args:
        max_keypoints: the strongest so many of each view are kept.
        augmentation: what changes about each pair, by its `sample.seed`.
    """
    if not samples:
        return from_pairs([], np.zeros((0, 3, 3)), store.dtype)
    images1 = [augmentation.second_image(sample.image, len(store), sample.seed) for sample in samples]
    views0 = [augmentation.apply(store.view(s.image, s.view0), s.seed, 0) for s in samples]
    views1 = [augmentation.apply(store.view(i, s.view1), s.seed, 1) for i, s in zip(images1, samples)]
    # inverted together, since 64 small inversions one by one cost a batch 1 ms
    to0, to1 = (np.stack([H for _, H, _ in side]) for side in (views0, views1))
    H_0to1 = normalized(to1 @ inv(to0))
    H_0to1[[image1 != sample.image for image1, sample in zip(images1, samples)]] = APART
    pairs = []
    for sample, (records0, _, size0), (records1, _, size1) in zip(samples, views0, views1):
        count0, count1 = augmentation.counts(max_keypoints, sample.seed)
        pairs.append(Pair(records0[:count0], records1[:count1], size0, size1))
    return from_pairs(pairs, H_0to1)


def split_evenly(samples: List[Sample], parts: int) -> List[List[Sample]]:
    """`samples` in `parts` contiguous groups whose sizes differ by at most one (micro-batches)."""
    bounds = [len(samples) * i // parts for i in range(parts + 1)]
    return [samples[a:b] for a, b in zip(bounds, bounds[1:])]


def choose(name: str, device: Any) -> Tuple[Callable[..., PairBatch], Callable[..., Generator]]:
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
