"""Pairs per second of building batches from the store, by one core and by loader processes, as for a GPU."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import torch

from benchmarks import timing
from benchmarks.row import Row, Setting
from benchmarks.synthetic import made_store
from pipeline.features.store import Store
from pipeline.train.pairs import workers
from pipeline.train.pairs.augmentation import Augmentation
from pipeline.train.pairs.loader import load_batch
from pipeline.train.pairs.order import PairOrder
from superglue_sift.batch import PairBatch

KEYPOINTS, BATCH = 512, 64
WANTED, WORKERS = 2500, 8  # target in pairs/s, by this many processes
AHEAD = 2
# augmentation of the shipped weights' preset, and of sample.yaml
WAYS: Dict[str, Augmentation] = {
    "as stored": Augmentation(),
    "thinned and turned": Augmentation(drop=0.3, rotation_deg=180.0),
    "thinned, turned, cut to 128 or more, zoomed": Augmentation(
        drop=0.3, rotation_deg=180.0, min_keypoints=128, negatives=0.1, zoom_fraction=0.35
    ),
}


def batches(setting: Setting) -> Iterator[Row]:
    """Each way on one core; the most expensive one also by `WORKERS` processes, if there are enough cores."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(made_store(Path(folder), KEYPOINTS))
        order = PairOrder(0, len(store), store.views_per_image)
        calls = {name: functools.partial(_made, store, order, way) for name, way in WAYS.items()}
        yield from _one_core(setting, calls)
        cores = len(os.sched_getaffinity(0))
        dearest = list(calls)[-1]
        for number in (min(cores, WORKERS),) if cores < WORKERS else (4, WORKERS):
            yield _by_processes(setting, f"{number} processes: {dearest}", calls[dearest], number)
        if cores < WORKERS:
            yield Row("batches", f"{WORKERS} processes: {dearest}", skipped=f"{cores} cores")


def _made(store: Store, order: PairOrder, way: Augmentation, step: int) -> List[PairBatch]:
    return [load_batch(store, order.step(step, BATCH), KEYPOINTS, way)]


def _one_core(setting: Setting, calls: Dict[str, Callable[[int], Any]]) -> Iterator[Row]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken = setting.timed({name: functools.partial(call, 0) for name, call in calls.items()})
    finally:
        torch.set_num_threads(before)
    first = next(iter(calls))
    for name, own in taken.items():
        each = timing.interval([BATCH / seconds for seconds in own.cpu])
        ratio, cpu = timing.speed_up(taken[first].wall, own.wall), timing.speed_up(taken[first].cpu, own.cpu)
        what = f"one core: {name}, N = {KEYPOINTS}"
        yield Row("batches", what, each.value, "pairs/s", ratio, cpu, first, spread=each, note="by its processor time")


def _by_processes(setting: Setting, name: str, call: Callable[[int], Any], number: int) -> Row:
    """Rate of the processes after their start, within the budget of a row."""
    with contextlib.closing(workers.prefetched(call, range(10**6), workers.Plan(number, AHEAD))) as made:
        for _ in range(number * AHEAD):  # built while the processes started
            next(made)
        begun, steps = time.perf_counter(), 0
        while time.perf_counter() - begun < min(setting.seconds, 5.0):
            next(made)
            steps += 1
        rate = steps * BATCH / (time.perf_counter() - begun)
    note = f"wanted: {WANTED} by {WORKERS}" if number == WORKERS else ""
    return Row("batches", f"{name}, N = {KEYPOINTS}", rate, "pairs/s", note=note)
