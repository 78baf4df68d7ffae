"""Rows of training: pairs per second for each mode, the loader, and the peer's work beside ours."""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import torch

from pipeline import params
from pipeline.benchmarks import timing
from pipeline.benchmarks.made import made_batch, made_store
from pipeline.benchmarks.row import Row, Setting
from pipeline.errors import RequestError
from pipeline.features.store import Store
from pipeline.matching.loss import assignment_loss
from pipeline.matching.truth import ground_truth
from pipeline.pairs.loader import choose, load_batch, split_evenly
from pipeline.pairs.order import PairOrder
from pipeline.runtime import distributed
from pipeline.stack import can_compile
from pipeline.training import setup
from pipeline.training.step import train_step

KEYPOINTS = 512
_ENDLESS = 10**9  # steps


class Trainer:
    """One training step a call, by the trainer's own parts; `load=False` reuses one batch (a synthetic loader)."""

    def __init__(self, setting: Setting, store: Store, batch: int, load: bool = True, **changes: Any) -> None:
        config = setting.config
        same = {
            "dim": config.dim, "layers": config.layers, "heads": config.heads, "norm": config.norm,
            "sinkhorn_iterations": config.sinkhorn_iterations, "parallel": "ddp", "bitwise_elastic": False,
            "compile": False, "init_from": "", "freeze": [], "accumulate": 1, "precision": "float32",
            "loader": "plain",
        }  # fmt: skip
        self.train = params.load("train", setting.params).model_copy(update={**same, **changes})
        self.context = distributed.Context(0, 1, 0, setting.device)
        self.parts, _ = setup.build(self.train, self.context)
        self.store, self.batch, self.step = store, batch, 0
        self.order = PairOrder(0, len(store), store.views_per_image)
        self.kept = None if load else self.loaded()

    def loaded(self) -> List[Any]:
        """The next step's micro-batches on the device."""
        return [batch.to(self.context.device) for batch in self.made(self.step)]

    def made(self, step: int) -> List[Any]:
        """The micro-batches of a step, on the host."""
        samples = split_evenly(self.order.step(step, self.batch), self.train.accumulate)
        return [load_batch(self.store, part, KEYPOINTS) for part in samples]

    def __call__(self) -> None:
        batches = self.kept or self.loaded()
        state = self.parts.state
        train_step(
            self.parts.wrapped, state.optimizer, state.scaler, batches, self.batch, 1, self.train.clip_norm
        )
        self.step += 1


class Ahead(Trainer):
    """The same with batches made ahead, as the stage has them, by the loader that `train.loader` names."""

    def __init__(self, setting: Setting, store: Store, batch: int, **changes: Any) -> None:
        super().__init__(setting, store, batch, **changes)
        _, prefetched = choose(self.train.loader, setting.device)
        self.source = prefetched(self.made, range(_ENDLESS))

    def loaded(self) -> List[Any]:
        return [batch.to(self.context.device) for batch in next(self.source)]


def modes(setting: Setting) -> Iterator[Row]:
    """Pairs per second of one process in each mode, in turns."""
    cuda = setting.device.type == "cuda"
    batch = 64 if cuda else 4
    with tempfile.TemporaryDirectory() as folder:
        store = Store(made_store(Path(folder), KEYPOINTS))
        changes: Dict[str, Dict[str, Any]] = {
            "one process, float32": {},
            "bfloat16": {"precision": "bfloat16"},
            "two micro-batches": {"accumulate": 2},
            "synthetic loader": {"load": False},
            "float16": {"precision": "float16"},
            "DataParallel": {"parallel": "dp"},
            "torch.compile": {"compile": True},
        }
        reasons = _reasons(setting)
        made = {
            name: Trainer(setting, store, batch, **each)
            for name, each in changes.items()
            if not reasons.get(name)
        }
        with contextlib.ExitStack() as stack:
            ways = {**made, **_ahead(setting, store, batch, reasons, stack)}
            taken = setting.timed(ways, 4 * setting.seconds)
    for name in ways:
        rate = batch / statistics.median(taken[name].wall)
        base = taken["one process, float32"]
        ratio = timing.speed_up(base.wall, taken[name].wall)
        cpu = timing.speed_up(base.cpu, taken[name].cpu)
        yield Row(
            "training", f"{name}, N = {KEYPOINTS}, batch {batch}", rate, "pairs/s", ratio, cpu, "float32"
        )
    for name, reason in reasons.items():
        if reason:
            yield Row("training", name, skipped=reason)


def _ahead(
    setting: Setting, store: Store, batch: int, reasons: Dict[str, str], stack: Any
) -> Dict[str, Ahead]:
    """A way for each loader that runs here; `stack` ends them."""
    ways = {}
    for name, kind in (("plain loader, ahead", "plain"), ("DALI loader, ahead", "dali")):
        if not reasons.get(name):
            ways[name] = Ahead(setting, store, batch, loader=kind)
            stack.callback(ways[name].source.close)
    return ways


def _reasons(setting: Setting) -> Dict[str, str]:
    """Why a mode cannot run here; empty where it can."""
    return {
        "float16": "" if setting.device.type == "cuda" else "needs a GPU: its gradients are scaled there",
        "DataParallel": "" if torch.cuda.device_count() > 1 else "needs two GPUs",
        "torch.compile": _no_compiler(),
        "DALI loader, ahead": _no_dali(setting),
    }


def _no_dali(setting: Setting) -> str:
    try:
        choose("dali", setting.device)
    except RequestError as error:
        return str(error)
    return ""


def _no_compiler() -> str:
    import shutil

    if not can_compile():
        return "this torch has no compiler"
    return "" if shutil.which("g++") or shutil.which("clang++") else "needs a C++ compiler"


def loader(setting: Setting) -> Iterator[Row]:
    """Samples per second out of the store, beside the step they feed; truth and loss beside the step."""
    cuda = setting.device.type == "cuda"
    batch = 64 if cuda else 4
    with tempfile.TemporaryDirectory() as folder:
        store = Store(made_store(Path(folder), KEYPOINTS))
        trainer = Trainer(setting, store, batch)
        order = PairOrder(0, len(store), store.views_per_image)
        model, made = setting.model(), made_batch(KEYPOINTS, batch).to(setting.device)
        with torch.no_grad():
            found = [P.requires_grad_() for P in model(made)]
        ways = {
            "step": trainer,
            "load": lambda: load_batch(store, order.step(0, batch), KEYPOINTS),
            "truth": lambda: assignment_loss(found, ground_truth(made)).total.sum().backward(),
        }
        taken = setting.timed(ways, 2 * setting.seconds)
    step = taken["step"]
    for way, name, least in (
        ("load", "loading, as a share of the step it runs beside", 100.0),
        ("truth", "truth and loss, as a share of the step", 20.0),
    ):
        ratio, cpu = timing.speed_up(step.wall, taken[way].wall), timing.speed_up(step.cpu, taken[way].cpu)
        each = statistics.median(taken[way].wall)
        note = f"{batch / each:.0f} pairs/s, {cpu.value**-1:.2%} of the step's processor time"
        yield Row("loader", name, 1 / ratio.value, "of the step", ratio, cpu, "step", least, note)


def peer(setting: Setting) -> Iterator[Row]:
    """Training pairs per second beside the online, float64, batch-1 peer's work on the same photographs."""
    from pipeline.benchmarks import peer as other
    from pipeline.benchmarks.photographs import photographs

    images = photographs(setting.images, 12)
    for keypoints, calls in ((512, 3), (1024, 2)):
        theirs = other.PeerTraining(images, keypoints)
        with tempfile.TemporaryDirectory() as folder:
            store = Store(_store_of(theirs, images, Path(folder)))
            same = {"dim": 128, "sinkhorn_iterations": 20, "max_keypoints": keypoints}
            ways: Dict[str, Callable[[], object]] = {
                "peer": theirs,
                "float32": _Whole(setting, store, keypoints, **same),
                "bfloat16": _Whole(setting, store, keypoints, precision="bfloat16", **same),
                "extract": functools.partial(theirs.load, images[0]),
            }
            taken = setting.timed(ways, calls * setting.seconds)
        mean = sum(theirs.seen) / len(theirs.seen)
        yield from _peer_rows(taken, keypoints, mean, str(setting.images))


class _Whole(Trainer):
    """Steps of `BATCH` pairs; the keypoint limit is the store's."""

    BATCH = 4

    def __init__(self, setting: Setting, store: Store, keypoints: int, **changes: Any) -> None:
        super().__init__(setting, store, self.BATCH, **changes)


def _store_of(theirs: Any, images: List[Any], folder: Path) -> Path:
    """The peer's own pairs, kept, so that both sides see the same keypoints."""
    import json

    import numpy as np

    from pipeline.features import store

    made = []
    for number, image in enumerate(images):
        pair = theirs.load(image)
        both = np.stack([np.eye(3), pair.H_0to1])
        made.append(store.ImageViews(f"{number:03d}", pair.size0, both, [pair.records0, pair.records1]))
    rows = [store.write_shard(folder / store.shard_name(0), made)]
    (folder / store.INDEX).write_text(json.dumps(store.index(rows, 2, made[0].size)))
    return folder


def _peer_rows(taken: Dict[str, timing.Seconds], keypoints: int, mean: float, source: str) -> Iterator[Row]:
    name = f"end to end, D = 128, T = 20, at most {keypoints} keypoints (mean {mean:.0f})"
    base, extract = taken["peer"], taken["extract"]
    against = f"peer's work {statistics.median(base.wall):.2f} s/pair"
    for way, target in (("float32", 5.0), ("bfloat16", 10.0)):
        own = taken[way]
        wall = [t / _Whole.BATCH for t in own.wall]
        cpu = [t / _Whole.BATCH for t in own.cpu]
        rate = 1 / statistics.median(wall)
        ratios = timing.speed_up(base.wall, wall), timing.speed_up(base.cpu, cpu)
        once = [a + b for a, b in zip(wall, extract.wall)]
        note = f"{timing.speed_up(base.wall, once)} when each stored pair is trained on only once"
        yield Row("peer", f"{name}: {way}", rate, "pairs/s", *ratios, against, target, note)
