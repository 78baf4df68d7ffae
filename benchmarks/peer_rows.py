"""Training pairs per second, end to end, of the peer's work and ours on the same photographs."""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np

from benchmarks import group_rows, timing
from benchmarks import peer as other
from benchmarks.dev.photographs import photographs
from benchmarks.row import Row, Setting
from benchmarks.training_rows import Trainer
from pipeline.features import store
from superglue_sift import sift

PAIRS = {512: 8, 1024: 4}  # of a step of one of our processes, by keypoints
TARGETS = {"float32": 5.0, "bfloat16": 10.0}
CALLS, BUDGETS = 3, 2.0  # of the peer's work at least; `--seconds` that they may take together


def peer(setting: Setting) -> Iterator[Row]:
    """One process of ours, and one for each core or GPU, compared with the peer's online float64 work of batch 1."""
    found = photographs(setting.images, 12)
    for keypoints, calls in ((512, 3), (1024, 2)):
        # so that each pair is the same work
        images = [image for image in found if len(sift.extract(image, keypoints)) == keypoints] or found
        theirs = other.PeerTraining(images, keypoints, setting.device)
        reason = _too_long(theirs, setting)
        if reason:
            yield Row("peer", f"end to end, at most {keypoints} keypoints", skipped=reason)
            continue
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            kept = _store_of(theirs, images, Path(folder))
            ours = _ours(setting, kept, keypoints, stack)
            ways: Dict[str, Callable[[], object]] = {name: step for name, (step, _) in ours.items()}
            ways.update(peer=theirs, extract=functools.partial(theirs.load, images[0]))
            taken = setting.timed(ways, calls * setting.seconds)
        mean = sum(theirs.seen) / len(theirs.seen)
        yield from _rows(taken, {name: pairs for name, (_, pairs) in ours.items()}, keypoints, mean)


def _too_long(theirs: Callable[[], object], setting: Setting) -> str:
    """Why the minimum of rounds exceeds the budget, or an empty string; costs one call."""
    started = time.perf_counter()
    theirs()
    seconds = CALLS * (time.perf_counter() - started)
    if seconds <= BUDGETS * setting.seconds:
        return ""
    return f"about {seconds:.0f} s of the peer's work alone; --seconds {seconds / BUDGETS + 1:.0f} runs it"


def _ours(
    setting: Setting, kept: Path, keypoints: int, stack: contextlib.ExitStack
) -> Dict[str, Tuple[Callable[[], object], int]]:
    """Steps of ours by name, with their number of pairs; `stack` ends their processes."""
    ways: Dict[str, Tuple[Callable[[], object], int]] = {}
    for precision in TARGETS:
        changes = {"dim": 128, "sinkhorn_iterations": 20, "precision": precision}
        step = Trainer(setting, store.Store(kept), PAIRS[keypoints], keypoints=keypoints, **changes)
        ways[precision] = step, PAIRS[keypoints]
        if group_rows.places(setting) > 1:
            processes = group_rows.places(setting)
            pairs = PAIRS[keypoints] * processes
            group = group_rows.training_group(setting, kept, keypoints, pairs, changes, processes)
            stack.callback(group.close)
            ways[f"{precision}, DDP of {processes} processes"] = group, pairs
    return ways


def _store_of(theirs: Any, images: List[Any], folder: Path) -> Path:
    """A store of the peer's own pairs, so that both sides see the same keypoints."""
    made = []
    for number, image in enumerate(images):
        pair, H = theirs.load(image)
        both = np.stack([np.eye(3), H])
        made.append(store.ImageViews(f"{number:03d}", pair.size0, both, [pair.records0, pair.records1]))
    rows = [store.write_shard(folder / store.shard_name(0), made)]
    (folder / store.INDEX).write_text(json.dumps(store.index(rows, 2, made[0].size)))
    return folder


def _rows(taken: Dict[str, timing.Seconds], pairs: Dict[str, int], keypoints: int, mean: float) -> Iterator[Row]:
    name = f"end to end, D = 128, T = 20, at most {keypoints} keypoints (mean {mean:.0f})"
    base, extract = taken["peer"], taken["extract"]
    against = f"peer's work {statistics.median(base.wall):.2f} s/pair"
    for way, count in pairs.items():
        wall = [t / count for t in taken[way].wall]
        ratio, cpu = timing.speed_up(base.wall, wall), _cpu_ratio(base, taken[way], count)
        once = timing.speed_up(base.wall, [a + b for a, b in zip(wall, extract.wall)])
        note = f"{once} when each stored pair is trained on only once" if cpu else ""
        target = TARGETS[way.split(",")[0]]
        yield Row("peer", f"{name}: {way}", 1 / statistics.median(wall), "pairs/s", ratio, cpu, against, target, note)


def _cpu_ratio(base: timing.Seconds, own: timing.Seconds, count: int) -> Optional[timing.Ratio]:
    """Ratio of processor times; None for a group, whose processor time is not this process's."""
    if sum(own.cpu) < 0.1 * sum(own.wall):
        return None
    return timing.speed_up(base.cpu, [t / count for t in own.cpu])
