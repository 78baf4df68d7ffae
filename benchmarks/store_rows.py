"""Speed of random access to the store, compared with a bare slice of mapped memory; hot cache, one core.

Keypoint records are copied as bytes, as the batches do: numpy copies records of named fields four times as slowly.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch

from benchmarks import timing
from benchmarks.synthetic import made_store
from pipeline.errors import RequestError
from pipeline.features.store import Store, map_shard, read_index
from pipeline.train.pairs.augmentation import Augmentation
from pipeline.train.pairs.loader import load_batch
from pipeline.train.pairs.order import PairOrder

KEYPOINTS = 512  # of a view of the synthetic store
OF_BARE, VIEW_US, BATCH_MS = 1.5, 20.0, 2.5  # targets of the store at 512 keypoints a view
_ACCESSES = 1000
_ROUNDS = 25
_BATCH = 64
_DROP = 0.3


def store_rows(folder: Optional[Path] = None, rounds: int = _ROUNDS) -> List[Dict[str, Any]]:
    """Rows of the store in a folder, or of a synthetic one: name, microseconds of a core (best round), the ratio to
    the bare map with its interval, and the bound."""
    if folder is not None:
        return list(_rows(Store(folder), rounds))
    with tempfile.TemporaryDirectory() as made:
        return list(_rows(Store(made_store(Path(made), KEYPOINTS)), rounds))


def _rows(store: Store, rounds: int) -> Iterator[Dict[str, Any]]:
    if not len(store):
        raise RequestError(f"{store.path}: the store is empty")
    rng = np.random.default_rng(0)
    places = list(
        zip(
            rng.integers(len(store), size=_ACCESSES).tolist(),
            rng.integers(store.views_per_image, size=_ACCESSES).tolist(),
        )
    )
    bare, samples = _bare_reader(store), PairOrder(0, len(store), store.views_per_image).step(0, _BATCH)
    most = int(store.counts.max())
    ways: Dict[str, Tuple[Callable[[], Any], int]] = {
        "view, bare map": (lambda: _each(bare, places), _ACCESSES),
        "view, store": (lambda: _each(functools.partial(_read, store), places), _ACCESSES),
        f"batch of {_BATCH} pairs": (lambda: load_batch(store, samples, most), 1),
        f"batch of {_BATCH} pairs, thinned": (lambda: load_batch(store, samples, most, Augmentation(drop=_DROP)), 1),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken = timing.interleaved({name: way for name, (way, _) in ways.items()}, rounds, 30.0)
    torch.set_num_threads(threads)
    mean = float(store.counts.mean())
    bounds = {"view, store": f"{VIEW_US:g}", f"batch of {_BATCH} pairs": f"{1000 * BATCH_MS:g}"}
    for name, (_, times) in ways.items():
        ratio = timing.speed_up(taken[name].cpu, taken["view, bare map"].cpu)
        of_bare = [round(part, 3) if times > 1 else "" for part in ratio]
        yield {
            "what": f"{name}, {mean:.0f} keypoints a view",
            "microseconds": round(1e6 * min(taken[name].cpu) / times, 2),
            "median": round(1e6 * statistics.median(taken[name].cpu) / times, 2),
            "of_bare": of_bare[0],
            "of_bare_low": of_bare[1],
            "of_bare_high": of_bare[2],
            "at most": bounds.get(name, ""),
        }


def _each(read: Callable[[int, int], np.ndarray], places: Sequence[Tuple[int, int]]) -> None:
    """Read all places and keep none: memory for all would cost more than the reading."""
    for place in places:
        read(*place)


def _read(store: Store, image: int, view: int) -> np.ndarray:
    return np.array(store.view(image, view).records.view(np.uint8))


def _bare_reader(store: Store) -> Callable[[int, int], np.ndarray]:
    """A function (image, view) -> bytes that does nothing but slice and copy."""
    index = [shard for shard in read_index(store.path)["shards"] if shard["images"]]
    maps = [map_shard(store.path / shard["file"]) for shard in index]
    spans = [
        (each["records"], *each["offsets"][at : at + 2].tolist())
        for shard, each in zip(index, maps)
        for at in range(len(shard["images"]) * store.views_per_image)
    ]
    views = store.views_per_image

    def read(image: int, view: int) -> np.ndarray:
        source, begin, end = spans[image * views + view]
        return np.array(source[begin:end])

    return read
