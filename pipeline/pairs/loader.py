"""From the store to batches: reads records, leaves some out, packs."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import numpy as np
from numpy.linalg import inv

from pipeline.features.store import Store
from pipeline.pairs.order import Sample
from pipeline.pairs.prefetch import prefetched
from superglue_sift.batch import Pair, PairBatch, from_pairs
from superglue_sift.geometry import normalized


def load_batch(store: Store, samples: Sequence[Sample], max_keypoints: int, drop: float = 0.0) -> PairBatch:
    """The PairBatch of these samples, in order; an empty list gives a batch of no pairs with homographies."""
    return from_pairs(read_pairs(store, samples, max_keypoints, drop))


def read_pairs(store: Store, samples: Sequence[Sample], max_keypoints: int, drop: float = 0.0) -> List[Pair]:
    """The pairs of views of these samples, in order.

    Args:
        max_keypoints: the strongest so many of each view are kept.
        drop: up to this share of each view's keypoints is left out at random (by `sample.seed`), so that an
            epoch never repeats a pair as it was.
    """
    if not samples:
        return []
    # all homographies at once: 64 small inversions cost a batch 1 ms
    views0 = [store.view(sample.image, sample.view0) for sample in samples]
    views1 = [store.view(sample.image, sample.view1) for sample in samples]
    to0, to1 = (np.stack([view.H_image_to_view for view in views]) for views in (views0, views1))
    H_0to1 = normalized(to1 @ inv(to0))
    pairs = []
    for sample, view0, view1, H in zip(samples, views0, views1, H_0to1):
        sides = [view0.records[:max_keypoints], view1.records[:max_keypoints]]
        if drop > 0:
            random = np.random.default_rng(sample.seed)
            sides = [_thinned(records, drop, random) for records in sides]
        pairs.append(Pair(*sides, view0.size, view1.size, H))
    return pairs


def _thinned(records: np.ndarray, drop: float, random: np.random.Generator) -> np.ndarray:
    """Some of the records; as opaque bytes, which numpy copies eight times as fast as records of fields."""
    kept = random.random(len(records)) >= drop * random.random()
    return records.view(f"V{records.itemsize}")[kept].view(records.dtype)


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
