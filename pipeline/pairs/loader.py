"""From the store to batches: reads records, leaves some out, packs."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
from numpy.linalg import inv

from pipeline.features.store import Store
from pipeline.pairs.augmentation import APART, Augmentation
from pipeline.pairs.order import Sample
from pipeline.pairs.prefetch import prefetched
from superglue_sift.batch import Pair, PairBatch, from_pairs
from superglue_sift.geometry import normalized


def load_batch(
    store: Store,
    samples: Sequence[Sample],
    max_keypoints: int,
    augmentation: Optional[Augmentation] = None,
) -> PairBatch:
    """The PairBatch of these samples, in order; an empty list gives a batch of no pairs with homographies.

    Args:
        max_keypoints: the strongest so many of each view are kept.
        augmentation: what changes about each pair, by its `sample.seed`; None: nothing.
    """
    if not samples:
        return from_pairs([])
    sides = [_views(store, samples, augmentation, side) for side in (0, 1)]
    # inverted together, since 64 small inversions one by one cost a batch 1 ms
    to0, to1 = (np.stack([H for _, H, _ in side]) for side in sides)
    H_0to1 = normalized(to1 @ inv(to0))
    pairs = []
    for sample, (records0, _, size0), (records1, _, size1), H in zip(samples, *sides, H_0to1):
        counts = max_keypoints, max_keypoints
        if augmentation is not None:
            counts = augmentation.counts(max_keypoints, sample.seed)
            H = APART if augmentation.unrelated(sample.seed) else H
        pairs.append(Pair(records0[: counts[0]], records1[: counts[1]], size0, size1, H))
    return from_pairs(pairs)


def _views(store: Store, samples: Sequence[Sample], augmentation: Optional[Augmentation], side: int):
    """(records, H_image_to_view, size) of each sample's view `side`."""
    found = []
    for sample in samples:
        image, view = sample.image, (sample.view0, sample.view1)[side]
        if augmentation is not None and side == 1 and augmentation.unrelated(sample.seed):
            image = augmentation.other_image(image, len(store), sample.seed)
        given = store.view(image, view)
        if augmentation is None:
            found.append((given.records, given.H_image_to_view, given.size))
        else:
            found.append(augmentation.apply(given, sample.seed, side))
    return found


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
