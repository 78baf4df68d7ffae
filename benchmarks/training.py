"""Rows of training: the loader, the ways to train, and the peer's work end to end.

`python -m benchmarks.training`, started by `modes`, is one rank of a way to train.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.images import SAMPLE
from benchmarks.network import PRECISIONS
from benchmarks.peer import KEYPOINTS, PeerTraining
from benchmarks.photographs import photographs
from benchmarks.synthetic import make_pairs
from benchmarks.timing import Call, Row, Seconds, Setting, compare
from pipeline import distributed, launch, params
from pipeline.keypoints import store
from pipeline.params import RunParams, TrainParams
from pipeline.train import trainer
from pipeline.train.data import StepBatches
from pipeline.train.loss import MatchingObjective
from superglue_sift.environment import usable_cores
from superglue_sift.features import sift
from superglue_sift.network.batch import ON_HOST, Pair, PairBatch
from superglue_sift.network.superglue import SuperGlueConfig
from superglue_sift.torch_compat import no_compiler

CLONE = Path(__file__).resolve().parents[1]  # ranks import `benchmarks` from here
IMAGES = 64  # of a synthetic store
PAIRS = {"cuda": 64, "cpu": 2}  # of a step, for each process
PEER_PAIRS = 8


class Trainer:
    """One training step per call, with the parts of the stage; batches are loaded in the call.

    pairs: of a step, of all ranks of `context` (None: one process). changes: of the parameters.
    """

    def __init__(
        self,
        setting: Setting,
        folder: Path,
        pairs: int,
        context: Optional[distributed.Context] = None,
        **changes: Any,
    ) -> None:
        model = setting.config.to_dict()
        own = {name: model[name] for name in model if name in TrainParams.model_fields}
        own.update(optimizer="adam", precision="float32")
        own.update(max_keypoints=KEYPOINTS, keypoint_drop=0.0)
        run = {name: changes.pop(name) for name in set(changes) & set(RunParams.model_fields)}
        several = changes.pop("parallel", "") == "dp"
        train = params.load(SAMPLE).train.model_copy(update={**own, **changes})
        context = context or distributed.Context(0, 1, setting.device)
        precision, _ = trainer.precision_of_ranks(train, context)
        objective, self.ddp_model, self.state, _, _ = trainer.build(
            train, RunParams(**run), context, precision
        )
        if several:
            self.ddp_model = DataParallelObjective(objective)
        self.batches = StepBatches(train, RunParams(**run), store.Store(folder), pairs, context)
        self.numbers = itertools.count()

    def __call__(self) -> None:
        context = self.batches.context
        batches = [batch.to(context.device) for batch in self.batches.load(next(self.numbers))]
        common = (self.ddp_model, self.state.optimizer, self.state.scaler, batches)
        trainer.train_step(*common, self.batches.pairs, context.world_size)


class DataParallelObjective(nn.Module):
    """The objective over all GPUs of one process (torch's DataParallel), to compare with one
    process for each GPU.

    DataParallel scatters only tensors, so a batch is passed as its tensors.
    """

    def __init__(self, objective: MatchingObjective) -> None:
        super().__init__()
        self.parallel = nn.DataParallel(_FromTensors(objective))

    def forward(self, batch: PairBatch, wait: bool = True) -> Tuple[Tensor, Dict[str, Tensor]]:
        """As `MatchingObjective.forward`."""
        total, parts = self.parallel(*vars(batch).values(), wait=wait)
        return total.sum().reshape(1), parts


class _FromTensors(nn.Module):
    def __init__(self, objective: MatchingObjective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, *tensors: Tensor, wait: bool) -> Tuple[Tensor, Dict[str, Tensor]]:
        batch = PairBatch(*tensors)
        counts = {name: getattr(batch, name).cpu() for name in ON_HOST}
        return self.objective(dataclasses.replace(batch, **counts), wait)


def write_store(folder: Path, pairs: Sequence[Pair], homographies: Sequence[np.ndarray]) -> Path:
    """A keypoint store of an image for each pair: itself, and its view by the homography."""
    made = [
        store.ImageViews(
            f"{i:04d}",
            p.size0,
            np.stack([np.eye(3), H]),
            [p.records0, p.records1],
            np.array([p.size0, p.size1]),
        )
        for i, (p, H) in enumerate(zip(pairs, homographies))
    ]
    rows = [store.write_shard(folder / store.shard_name(0), made)]
    (folder / store.INDEX).write_text(json.dumps(store.index(rows, 2)))
    return folder


def loader(setting: Setting) -> Iterator[Row]:
    """Loading of a batch from the store of keypoints, compared with the step it runs beside."""
    pairs = 2 * PAIRS[setting.device.type]
    with tempfile.TemporaryDirectory() as name:
        folder = write_store(Path(name), *make_pairs(KEYPOINTS, IMAGES))
        step = Trainer(setting, folder, pairs)
        taken = setting.time({"step": step, "load": lambda: step.batches.load(0)}, pairs)
    title = f"loader: pairs of {KEYPOINTS} keypoints"
    yield compare(title, taken["load"], taken["step"], "the step it runs beside")


class Mode(NamedTuple):
    """A way to train: changes of the plain parameters, processes, and what it lacks here, if it
    lacks something.
    """

    changes: Dict[str, Any]
    processes: int = 1
    missing: str = ""


def list_modes(device: str) -> Dict[str, Mode]:
    """The ways to train, by name. device: cuda or cpu."""
    places = torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1
    gpu = "" if device == "cuda" else "needs a GPU"
    gpus = "" if device == "cuda" and places > 1 else "needs several GPUs"
    modes = {
        "AMP, bfloat16": Mode({"precision": "bfloat16"}),
        "AMP, float16": Mode({"precision": "float16"}, missing=gpu),
        "gradient accumulation, 2 parts": Mode({"accumulate": 2}),
        "torch.compile": Mode({"compile": True}, missing=no_compiler(device)),
        "DataParallel": Mode({"parallel": "dp"}, missing=gpus),
    }
    for number in sorted({1, min(2, places), places}):
        modes[f"DDP, processes: {number}"] = Mode({}, number)
    return modes


def modes(setting: Setting) -> Iterator[Row]:
    """Each way to train, in processes of its own, compared with the plain one, a process in
    float32, that runs before and after it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = write_store(Path(name), *make_pairs(KEYPOINTS, IMAGES))
        before = run_mode(setting, folder, Mode({}))
        for way, mode in list_modes(setting.device.type).items():
            if mode.missing:
                yield Row(f"mode: {way}", skipped=mode.missing)
                continue
            try:
                own = run_mode(setting, folder, mode)
            except RuntimeError as error:
                yield Row(f"mode: {way}", failed=str(error))
                continue
            after = run_mode(setting, folder, Mode({}))
            plain = Seconds(*((one + other) / 2 for one, other in zip(before, after)))
            yield compare(f"mode: {way}", own, plain, "plain")
            before = after


def run_mode(setting: Setting, folder: Path, mode: Mode) -> Seconds:
    """Seconds of a pair in each round, of the first rank. Raises RuntimeError."""
    work = json.dumps([setting.config.to_dict(), mode.changes])
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    options = launch.torchrun_options(mode.processes, restarts=0)
    command = [*torchrun, *options, "-m", "benchmarks.training", str(folder), work]
    threads = {"OMP_NUM_THREADS": str(usable_cores() // mode.processes or 1)}
    environment = {**launch.VARIABLES, **threads, **os.environ}
    if setting.device.type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, env=environment, cwd=CLONE, capture_output=True, text=True)
    if done.returncode:
        said = re.findall(r"\w*Error: .*", done.stderr)
        raise RuntimeError((said or ["a rank failed"])[0])
    return Seconds(*np.array(json.loads(done.stdout.splitlines()[-1])))


def run_rank(folder: str, work: str) -> int:
    """One rank of a mode: the first prints the seconds of its steps as JSON."""
    config, changes = json.loads(work)
    with distributed.process_group() as context:
        kind = context.device.type
        devices = torch.cuda.device_count() if changes.get("parallel") == "dp" else 1
        pairs = PAIRS[kind] * context.world_size * devices
        # every rank has to make the same number of rounds, so there is no limit of time
        setting = Setting(context.device, SuperGlueConfig(**config), float("inf"))
        step = Trainer(setting, Path(folder), pairs, context, **changes)
        taken = setting.time({"step": step}, pairs)["step"]
    if context.is_main:
        print(json.dumps(np.array(taken).tolist()))
    return 0


def peer(setting: Setting) -> Iterator[Row]:
    """Training end to end in one process, compared with the peer's online float64 work, one pair in
    a step.
    """
    found = photographs(8)
    images = [image for image in found if len(sift.extract(image, KEYPOINTS)) == KEYPOINTS] or found
    theirs = PeerTraining(images, setting.device)
    small = dataclasses.replace(setting.config, dim=128, sinkhorn_iterations=20)
    setting = dataclasses.replace(setting, config=small)
    with tempfile.TemporaryDirectory() as name:
        # the peer's own pairs, so that both sides see the same keypoints
        folder = write_store(Path(name), *zip(*map(theirs.load, images)))
        ways: Dict[str, Call] = {"peer": theirs}
        for precision in PRECISIONS:
            ways[precision] = Trainer(setting, folder, PEER_PAIRS, precision=precision)
        taken = setting.time(ways)
    for precision in PRECISIONS:
        name = f"end to end, {KEYPOINTS} keypoints, {precision}"
        own = Seconds(*(seconds / PEER_PAIRS for seconds in taken[precision]))
        yield compare(name, own, taken["peer"], "the peer's work; D = 128, T = 20")


if __name__ == "__main__":
    raise SystemExit(run_rank(*sys.argv[1:]))
