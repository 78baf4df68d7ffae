"""Rows of training: the loader, the ways to train, and the peer's work end to end.

`python -m benchmarks.training`, started by `modes`, is one rank of a mode of several processes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch

from benchmarks import timing
from benchmarks.peer import PeerTraining
from benchmarks.photographs import photographs
from benchmarks.row import Row, Setting, run
from benchmarks.synthetic import made_store, write_store
from pipeline.features import store
from pipeline.launch import free_port
from pipeline.parameters import params
from pipeline.parameters.schema import TrainParams
from pipeline.processes import distributed
from pipeline.train import setup
from pipeline.train.pairs.loader import StepBatches, load_batch
from pipeline.train.pairs.order import PairOrder
from pipeline.train.step import CLIP_NORM, train_step
from superglue_sift import sift, torch_compat
from superglue_sift.superglue import SuperGlueConfig

CLONE = Path(__file__).resolve().parents[1]  # ranks import `benchmarks` from here
KEYPOINTS = 512
PAIRS = {"cuda": 64, "cpu": 2}  # of a step, for each process
PEER_PAIRS = 8


class Trainer:
    """One training step per call, with the parts of the stage; batches are loaded in the call.

    context: of one of several ranks, which takes its part of the `pairs`; None: one process.
    """

    def __init__(
        self,
        setting: Setting,
        folder: Path,
        pairs: int,
        context: Optional[distributed.Context] = None,
        **changes: Any,
    ) -> None:
        config = setting.config.to_dict()
        own = {name: config[name] for name in config if name in TrainParams.model_fields}
        own.update(parallel="single", optimizer="adam", precision="float32")
        own.update(max_keypoints=KEYPOINTS, keypoint_drop=0.0)
        sample = params.load("train", CLONE / "presets" / "sample.yaml")
        self.train = sample.model_copy(update={**own, **changes})
        self.context = context or distributed.Context(0, 1, 0, setting.device)
        self.state_and_model, _ = setup.build(self.train, self.context)
        self.batches = StepBatches(self.train, store.Store(folder), pairs, self.context)
        self.pairs = pairs
        self.number = 0

    def __call__(self) -> None:
        batches = [batch.to(self.context.device) for batch in self.batches.load(self.number)]
        state = self.state_and_model.state
        model = self.state_and_model.ddp_model
        common = (model, state.optimizer, state.scaler, batches, self.pairs)
        train_step(*common, self.context.world_size, CLIP_NORM)
        self.number += 1


def loader(setting: Setting) -> Iterator[Row]:
    """Loading of a batch from the store of keypoints, compared with the step it runs beside."""
    pairs = 2 * PAIRS[setting.device.type]
    with tempfile.TemporaryDirectory() as name:
        folder = made_store(Path(name), KEYPOINTS)
        step = Trainer(setting, folder, pairs)
        kept = store.Store(folder)
        order = PairOrder(0, len(kept), kept.views_per_image)
        samples = order.step(0, pairs)
        taken = setting.time({"step": step, "load": lambda: load_batch(kept, samples, KEYPOINTS)})
    rate = pairs / statistics.median(taken["load"].wall)
    share = statistics.median(np.asarray(taken["load"].cpu) / np.asarray(taken["step"].cpu))
    note = f"one core; {share:.2%} of the processor time of the step it runs beside"
    yield Row(f"loader: pairs of {KEYPOINTS} keypoints", rate, "pairs/s", note=note)


def modes(setting: Setting) -> Iterator[Row]:
    """Pairs per second of each way to train, compared with the plain one: one process, float32."""
    on_gpu = setting.device.type == "cuda"
    places = torch.cuda.device_count() if on_gpu else os.cpu_count() or 1
    no_half = "" if on_gpu else "needs a GPU: its gradients are scaled there"
    # changes to the plain way, or a number of processes; and why it cannot be measured here
    ways: Dict[str, Tuple[Any, str]] = {
        "DataParallel": ({"parallel": "dp"}, "" if on_gpu and places > 1 else "needs two GPUs"),
        "AMP, bfloat16": ({"precision": "bfloat16"}, ""),
        "AMP, float16": ({"precision": "float16"}, no_half),
        "gradient accumulation, 2 parts": ({"accumulate": 2}, ""),
        "torch.compile": ({"compile": True}, torch_compat.no_compiler(setting.device.type)),
    }
    for number in sorted({1, 2, places}):
        reason = f"needs {number} GPUs or cores" if number > places else ""
        ways[f"DDP, {number} process{'es' * (number > 1)}"] = (number, reason)
    with tempfile.TemporaryDirectory() as name:
        folder = made_store(Path(name), KEYPOINTS)
        for way, (what, reason) in ways.items():
            title = f"mode: {way}"
            if reason:
                yield Row(title, skipped=reason)
            elif isinstance(what, int):
                mode = functools.partial(_time_ranks, title=title, folder=folder, processes=what)
                yield from run(title, mode, setting)
            else:
                count = places if what.get("parallel") == "dp" else 1
                mode = functools.partial(
                    _time_mode, title=title, folder=folder, count=count, changes=what
                )
                yield from run(title, mode, setting)


def _time_mode(
    setting: Setting, title: str, folder: Path, count: int, changes: Dict[str, Any]
) -> Iterator[Row]:
    pairs = PAIRS[setting.device.type]
    plain = Trainer(setting, folder, pairs)
    own = Trainer(setting, folder, pairs * count, **changes)
    taken = setting.time({"plain": plain, "own": own})
    yield _mode_row(title, taken["own"].wall, pairs * count, taken["plain"].wall, pairs)


def _time_ranks(setting: Setting, title: str, folder: Path, processes: int) -> Iterator[Row]:
    pairs = PAIRS[setting.device.type]
    plain = {"plain": Trainer(setting, folder, pairs)}
    before = setting.time(plain)["plain"].wall
    own = _run_ranks(setting, folder, processes)
    after = setting.time(plain)["plain"].wall
    yield _mode_row(title, 2 * own, pairs * processes, before + after, pairs)


def _mode_row(title: str, own: List[float], count: int, plain: List[float], pairs: int) -> Row:
    rounds = min(len(plain), len(own))
    ratio = timing.speed_up(np.asarray(plain[:rounds]) / pairs, np.asarray(own[:rounds]) / count)
    rate = count / statistics.median(own)
    note = f"of plain, {pairs / statistics.median(plain):.3g} pairs/s"
    return Row(title, rate, "pairs/s", ratio, note=note)


def _run_ranks(setting: Setting, folder: Path, processes: int) -> List[float]:
    """Seconds of the steps of `processes` ranks. Raises RuntimeError."""
    group = [f"--nproc_per_node={processes}", f"--master_port={free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *group, "-m", "benchmarks.training"]
    command += [str(folder), str(setting.rounds), json.dumps(setting.config.to_dict())]
    environment = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // processes, 1)), **os.environ}
    if setting.device.type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, env=environment, cwd=CLONE, capture_output=True, text=True)
    if done.returncode:
        said = re.findall(r"\w*Error: .*", done.stderr)
        raise RuntimeError((said or ["a rank failed"])[0])
    return json.loads(done.stdout.splitlines()[-1])


def run_rank(folder: str, rounds: str, config: str) -> int:
    """One rank: the first prints the seconds of the steps as JSON."""
    with distributed.process_group() as context:
        setting = Setting(context.device, SuperGlueConfig(**json.loads(config)))
        pairs = PAIRS[context.device.type] * context.world_size
        step = Trainer(setting, Path(folder), pairs, context, parallel="ddp")
        # every rank has to make the same number of rounds, so there is no limit of time
        wait = torch.cuda.synchronize if context.device.type == "cuda" else timing.nothing
        taken = timing.alternate({"step": step}, int(rounds), float("inf"), wait)
    if context.is_main:
        print(json.dumps(taken["step"].wall))
    return 0


def peer(setting: Setting) -> Iterator[Row]:
    """Training end to end in one process, compared with the peer's online float64 work, one pair in
    a step.
    """
    found = photographs(8)
    images = [image for image in found if len(sift.extract(image, KEYPOINTS)) == KEYPOINTS] or found
    theirs = PeerTraining(images, KEYPOINTS, setting.device)
    with tempfile.TemporaryDirectory() as name:
        folder = _write_store(theirs, images, Path(name))
        ways: Dict[str, Any] = {"peer": theirs}
        small = dataclasses.replace(
            setting, config=dataclasses.replace(setting.config, sinkhorn_iterations=20)
        )
        for precision in ("float32", "bfloat16"):
            ways[precision] = Trainer(small, folder, PEER_PAIRS, dim=128, precision=precision)
        taken = setting.time(ways)
    base = taken["peer"]
    note = f"of the peer's work, {statistics.median(base.wall):.2f} s/pair; D = 128, T = 20"
    for precision in ("float32", "bfloat16"):
        wall, cpu = (np.asarray(seconds) / PEER_PAIRS for seconds in taken[precision])
        ratios = timing.speed_up(base.wall, wall), timing.speed_up(base.cpu, cpu)
        name = f"end to end, {KEYPOINTS} keypoints, {precision}"
        yield Row(name, 1 / statistics.median(wall), "pairs/s", *ratios, note)


def _write_store(theirs: PeerTraining, images: List[np.ndarray], folder: Path) -> Path:
    """A store of the peer's own pairs, so that both sides see the same keypoints."""
    made = [theirs.load(image) for image in images]
    return write_store(folder, *zip(*made))


if __name__ == "__main__":
    raise SystemExit(run_rank(*sys.argv[1:]))
