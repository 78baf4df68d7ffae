"""The trainer's step as a call, and rows of the loader."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import torch

from benchmarks import timing
from benchmarks.row import Row, Setting
from benchmarks.synthetic import made_batch, made_store
from pipeline.features.store import Store
from pipeline.parameters import params
from pipeline.processes import distributed
from pipeline.train import setup
from pipeline.train.objective import assignment_loss
from pipeline.train.pairs.loader import load_batch
from pipeline.train.pairs.order import PairOrder
from pipeline.train.step import CLIP_NORM, train_step
from pipeline.train.trainer import StepBatches
from superglue_sift.batch import PairBatch
from superglue_sift.truth import ground_truth

KEYPOINTS = 512
LOADERS = {"plain loader": "plain", "synthetic loader": "synthetic"}  # `--loader`
DRAWN = 32  # batches per call of a loader alone; many, because two are prefetched
_ENDLESS = 10**9  # steps


class Trainer:
    """One training step per call, with the trainer's own parts; `load=False` keeps one batch.

    context: of one of several ranks, which takes its part of the batch; None: one process.
    """

    def __init__(
        self,
        setting: Setting,
        store: Store,
        batch: int,
        load: bool = True,
        keypoints: int = KEYPOINTS,
        context: Optional[distributed.Context] = None,
        **changes: Any,
    ) -> None:
        config = setting.config
        same = {
            "dim": config.dim, "layers": config.layers, "heads": config.heads, "norm": config.norm,
            "parallel": "ddp",
            "compile": False, "cuda_graph": False, "init_from": "", "freeze": [], "accumulate": 1,
            "precision": "float32", "loader": "plain", "checkpoint_layers": False, "deterministic": False,
            "ema": 0.0, "optimizer": "adam", "max_keypoints": keypoints, "keypoint_drop": 0.0,
            "min_keypoints": 0, "rotation_deg": 0.0, "window": 1.0, "negatives": 0.0, "zoom": 0.0,
            "neighbours": config.neighbours,
        }  # fmt: skip
        self.train = params.load("train", setting.params).model_copy(update={**same, **changes})
        self.context = context or distributed.Context(0, 1, 0, setting.device)
        self.parts, _ = setup.build(self.train, self.context)
        model = self.parts.state.model
        model.config = dataclasses.replace(model.config, sinkhorn_iterations=config.sinkhorn_iterations)
        self.batches = StepBatches(self.train, store, batch, self.context)
        self.pairs, self.step = batch, 0
        self.kept = None if load else self.loaded()

    def loaded(self) -> List[PairBatch]:
        """The next step's micro-batches on the device."""
        return self._placed(self.batches.load(self.step))

    def _placed(self, batches: List[PairBatch]) -> List[PairBatch]:
        return [batch.to(self.context.device) for batch in batches]

    def __call__(self) -> None:
        batches = self.kept or self.loaded()
        state = self.parts.state
        common = self.parts.ddp_model, state.optimizer, state.scaler, batches, self.pairs
        train_step(*common, self.context.world_size, CLIP_NORM)
        self.step += 1


class Ahead(Trainer):
    """A `Trainer` with prefetched batches, as in the stage, by the loader that `--loader` names."""

    def __init__(self, setting: Setting, store: Store, batch: int, **changes: Any) -> None:
        super().__init__(setting, store, batch, **changes)
        self.source = self.batches.prefetched(range(_ENDLESS))

    def loaded(self) -> List[PairBatch]:
        return self._placed(next(self.source))


def _row(group: str, name: str, pairs: int, own: timing.Seconds, base: timing.Seconds, against: str) -> Row:
    """Pairs per second, and the ratio to `base` on the same pairs."""
    ratio, cpu = timing.speed_up(base.wall, own.wall), timing.speed_up(base.cpu, own.cpu)
    return Row(group, name, pairs / statistics.median(own.wall), "pairs/s", ratio, cpu, against)


def _ahead(setting: Setting, store: Store, batch: int, stack: contextlib.ExitStack) -> Dict[str, Ahead]:
    """One way for each loader; `stack` closes them."""
    ways = {}
    for name, kind in LOADERS.items():
        ways[name] = Ahead(setting, store, batch, loader=kind)
        stack.callback(ways[name].source.close)
    return ways


def loader(setting: Setting) -> Iterator[Row]:
    """Samples per second from the store, compared with the step; truth and loss compared with the step."""
    cuda = setting.device.type == "cuda"
    batch = 64 if cuda else 4
    with tempfile.TemporaryDirectory() as folder:
        store = Store(made_store(Path(folder), KEYPOINTS))
        trainer = Trainer(setting, store, batch)
        order = PairOrder(0, len(store), store.views_per_image)
        model, made = setting.model(), made_batch(KEYPOINTS, batch).to(setting.device)
        with torch.no_grad():
            found = model(made)
        found.flat.requires_grad_()
        ways = {
            "step": trainer,
            "load": lambda: load_batch(store, order.step(0, batch), KEYPOINTS),
            "truth": lambda: assignment_loss(found, ground_truth(made)).total.sum().backward(),
        }
        taken = setting.timed(ways, 2 * setting.seconds)
        alone = list(_alone(setting, store, batch))
    yield from alone
    step = taken["step"]
    for way, name, least in (
        ("load", "loading, as a share of the step it runs beside", 100.0),
        ("truth", "truth and loss, as a share of the step", 20.0),
    ):
        ratio, cpu = timing.speed_up(step.wall, taken[way].wall), timing.speed_up(step.cpu, taken[way].cpu)
        each = statistics.median(taken[way].wall)
        note = f"{batch / each:.0f} pairs/s, {cpu.value**-1:.2%} of the step's processor time"
        yield Row("loader", name, 1 / ratio.value, "of the step", ratio, cpu, "step", least, note)


def _alone(setting: Setting, store: Store, batch: int) -> Iterator[Row]:
    """Pairs per second of each loader with prefetching, without a step."""

    def drawn(way: Ahead) -> None:
        for _ in range(DRAWN):
            way.loaded()

    with contextlib.ExitStack() as stack:
        ahead = _ahead(setting, store, batch, stack)
        taken = setting.timed({name: functools.partial(drawn, way) for name, way in ahead.items()})
    for name, own in taken.items():
        what = f"{name} alone, N = {KEYPOINTS}, batch {batch}"
        yield _row("loader", what, DRAWN * batch, own, taken["plain loader"], "plain loader")
