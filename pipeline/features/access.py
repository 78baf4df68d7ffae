"""How fast the store gives what training asks for, against a bare slice of mapped memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np

from pipeline.errors import RequestError
from pipeline.features.sift import KEYPOINT
from pipeline.features.store import Store, map_shard

_ACCESSES = 4000
_ROUNDS = 7
_BATCH = 64


def store_rows(folder: Path) -> List[Dict[str, Any]]:
    """Microseconds, on a hot cache and one core, best of some interleaved rounds.

    A pair is two views of one image, copied; the bare way knows all offsets and slices one map per shard.
    """
    store = Store(folder)
    if not len(store):
        raise RequestError(f"{folder}: the store is empty")
    rng = np.random.default_rng(0)
    image = rng.integers(len(store), size=_ACCESSES)
    first, second = rng.integers(store.views_per_image, size=(2, _ACCESSES))
    pairs = list(zip(image.tolist(), first.tolist(), second.tolist()))
    bare = _bare_reader(store)
    ways: Dict[str, Callable[[], Any]] = {
        "pair, bare map": lambda: [(bare(i, a), bare(i, b)) for i, a, b in pairs],
        "pair, store": lambda: [_pair(store, *pair) for pair in pairs],
    }
    best = {name: float("inf") for name in ways}
    for _ in range(_ROUNDS):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            best[name] = min(best[name], (time.perf_counter() - begun) / _ACCESSES)
    rows = [
        {
            "what": name,
            "microseconds": round(1e6 * taken, 2),
            "of_bare": round(taken / best["pair, bare map"], 3),
        }
        for name, taken in best.items()
    ]
    batch = min(
        _batch_seconds(store, pairs[start : start + _BATCH]) for start in range(0, 20 * _BATCH, _BATCH)
    )
    return [
        *rows,
        {"what": f"batch of {_BATCH} packed", "microseconds": round(1e6 * batch, 1), "of_bare": ""},
    ]


def _pair(store: Store, image: int, first: int, second: int) -> Tuple[np.ndarray, np.ndarray]:
    return np.array(store.view(image, first).records), np.array(store.view(image, second).records)


def _bare_reader(store: Store) -> Callable[[int, int], np.ndarray]:
    """A function (image, view) -> records that does nothing but slice and copy."""
    index = [shard for shard in store.shards if shard["images"]]
    maps = [map_shard(store.path / shard["file"]) for shard in index]
    records = [each["records"].reshape(-1).view(KEYPOINT) for each in maps]
    spans = [
        (records[number], *each["offsets"][at : at + 2].tolist())
        for number, (shard, each) in enumerate(zip(index, maps))
        for at in range(len(shard["images"]) * store.views_per_image)
    ]
    views = store.views_per_image

    def read(image: int, view: int) -> np.ndarray:
        source, begin, end = spans[image * views + view]
        return np.array(source[begin:end])

    return read


def _batch_seconds(store: Store, pairs: Sequence[Tuple[int, int, int]]) -> float:
    """A batch of pairs into one preallocated buffer, ragged and packed."""
    most = 2 * len(pairs) * int(store.counts.max())
    buffer = np.empty(most, KEYPOINT)
    buffer[:] = 0
    begun = time.perf_counter()
    at = 0
    for image, first, second in pairs:
        for view in (first, second):
            records = store.view(image, view).records
            buffer[at : at + len(records)] = records
            at += len(records)
    return time.perf_counter() - begun
