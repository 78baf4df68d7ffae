"""Rows of training: the loader, the ways to train, and the peer's work end to end.

`python -m benchmarks.training`, started by `modes`, is one rank of a mode of several processes.
"""

from __future__ import annotations

import argparse
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
from benchmarks.synthetic import made_store
from pipeline.features import store
from pipeline.launch import free_port
from pipeline.parameters import params
from pipeline.processes import distributed
from pipeline.train import setup
from pipeline.train.pairs.loader import load_batch
from pipeline.train.pairs.order import PairOrder
from pipeline.train.step import CLIP_NORM, train_step
from pipeline.train.trainer import StepBatches
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
        config = setting.config
        plain = {
            "dim": config.dim,
            "layers": config.layers,
            "heads": config.heads,
            "norm": config.norm,
            "neighbours": config.neighbours,
            "parallel": "single",
            "compile": False,
            "init_from": "",
            "freeze": [],
            "accumulate": 1,
            "precision": "float32",
            "loader": "plain",
            "checkpoint_layers": False,
            "deterministic": False,
            "ema": 0.0,
            "optimizer": "adam",
            "max_keypoints": KEYPOINTS,
            "keypoint_drop": 0.0,
            "min_keypoints": 0,
            "rotation_deg": 0.0,
            "window": 1.0,
            "negatives": 0.0,
            "zoom": 0.0,
        }
        self.train = params.load("train", setting.params).model_copy(update={**plain, **changes})
        self.context = context or distributed.Context(0, 1, 0, setting.device)
        self.state_and_model, _ = setup.build(self.train, self.context)
        model = self.state_and_model.state.model
        model.config = dataclasses.replace(
            model.config, sinkhorn_iterations=config.sinkhorn_iterations
        )
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
    ways: Dict[str, Tuple[Dict[str, Any], str]] = {
        "DataParallel": ({"parallel": "dp"}, "" if on_gpu and places > 1 else "needs two GPUs"),
        "AMP, bfloat16": ({"precision": "bfloat16"}, ""),
        "AMP, float16": (
            {"precision": "float16"},
            "" if on_gpu else "needs a GPU: its gradients are scaled there",
        ),
        "gradient accumulation, 2 parts": ({"accumulate": 2}, ""),
        "torch.compile": ({"compile": True}, torch_compat.no_compiler(setting.device.type)),
    }
    pairs = PAIRS[setting.device.type]
    with tempfile.TemporaryDirectory() as name:
        folder = made_store(Path(name), KEYPOINTS)
        for way, (changes, reason) in ways.items():
            if reason:
                yield Row(f"mode: {way}", skipped=reason)
                continue
            count = pairs * (places if changes.get("parallel") == "dp" else 1)
            mode = functools.partial(
                _time_mode, way=way, folder=folder, count=count, changes=changes
            )
            yield from run(f"mode: {way}", mode, setting)
        for processes in sorted({1, 2, places}):
            way = f"DDP, {processes} process{'es' * (processes > 1)}"
            if processes > places:
                yield Row(f"mode: {way}", skipped=f"needs {processes} GPUs or cores")
                continue
            mode = functools.partial(_time_ranks, way=way, folder=folder, processes=processes)
            yield from run(f"mode: {way}", mode, setting)


def _time_mode(
    setting: Setting, way: str, folder: Path, count: int, changes: Dict[str, Any]
) -> Iterator[Row]:
    pairs = PAIRS[setting.device.type]
    calls = {
        "plain": Trainer(setting, folder, pairs),
        way: Trainer(setting, folder, count, **changes),
    }
    taken = setting.time(calls)
    yield _mode_row(way, taken[way].wall, count, taken["plain"].wall, pairs)


def _time_ranks(setting: Setting, way: str, folder: Path, processes: int) -> Iterator[Row]:
    pairs = PAIRS[setting.device.type]
    plain = {"plain": Trainer(setting, folder, pairs)}
    before = setting.time(plain)["plain"].wall
    own = _run_ranks(setting, folder, processes)
    after = setting.time(plain)["plain"].wall
    yield _mode_row(way, 2 * own, pairs * processes, before + after, pairs)


def _mode_row(way: str, own: List[float], count: int, plain: List[float], pairs: int) -> Row:
    rounds = min(len(plain), len(own))
    ratio = timing.speed_up(np.asarray(plain[:rounds]) / pairs, np.asarray(own[:rounds]) / count)
    rate = count / statistics.median(own)
    note = f"of plain, {pairs / statistics.median(plain):.3g} pairs/s"
    return Row(f"mode: {way}", rate, "pairs/s", ratio, note=note)


def _run_ranks(setting: Setting, folder: Path, processes: int) -> List[float]:
    """Seconds of the steps of `processes` ranks. Raises RuntimeError."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.training",
        str(folder),
        "--params",
        str(setting.params.resolve()),
    ]
    command += ["--config", json.dumps(setting.config.to_dict()), "--rounds", str(setting.rounds)]
    group = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    group["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // processes, 1))
    if setting.device.type == "cpu":
        group["CUDA_VISIBLE_DEVICES"] = ""
    ranks = []
    for number in range(processes):
        environment = {**os.environ, **group, "RANK": str(number), "LOCAL_RANK": str(number)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=environment, cwd=CLONE, **pipes))
    answers = [each.communicate() for each in ranks]
    if any(each.returncode for each in ranks):
        said = re.findall(r"\w*Error: .*", "".join(errors for _, errors in answers))
        raise RuntimeError((said or ["a rank failed"])[0])
    return json.loads(answers[0][0].splitlines()[-1])


def run_rank(argv: Optional[List[str]] = None) -> int:
    """One rank: the first prints the seconds of the steps as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of a keypoint store")
    parser.add_argument("--params", type=Path, required=True)
    parser.add_argument("--config", required=True, help="JSON of a SuperGlueConfig")
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args(argv)
    with distributed.process_group() as context:
        setting = Setting(
            context.device, SuperGlueConfig(**json.loads(args.config)), params=args.params
        )
        pairs = PAIRS[context.device.type] * context.world_size
        step = Trainer(setting, args.folder, pairs, context, parallel="ddp")
        # every rank has to make the same number of rounds, so there is no limit of time
        wait = torch.cuda.synchronize if context.device.type == "cuda" else timing.nothing
        taken = timing.alternate({"step": step}, args.rounds, float("inf"), wait)
    if context.is_main:
        print(json.dumps(taken["step"].wall))
    return 0


def peer(setting: Setting) -> Iterator[Row]:
    """Training end to end in one process, compared with the peer's online float64 work, one pair in
    a step.
    """
    found = photographs(setting.images, 8)
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
    for precision in ("float32", "bfloat16"):
        each = [seconds / PEER_PAIRS for seconds in taken[precision].wall]
        cpu = [seconds / PEER_PAIRS for seconds in taken[precision].cpu]
        base = taken["peer"]
        ratio = timing.speed_up(base.wall, each)
        note = f"of the peer's work, {statistics.median(base.wall):.2f} s/pair; D = 128, T = 20"
        name = f"end to end, {KEYPOINTS} keypoints, {precision}"
        yield Row(
            name,
            1 / statistics.median(each),
            "pairs/s",
            ratio,
            timing.speed_up(base.cpu, cpu),
            note,
        )


def _write_store(theirs: PeerTraining, images: List[np.ndarray], folder: Path) -> Path:
    """A store of the peer's own pairs, so that both sides see the same keypoints."""
    made = []
    for number, image in enumerate(images):
        pair, H = theirs.load(image)
        homographies = np.stack([np.eye(3), H])
        made.append(
            store.ImageViews(
                f"{number:03d}", pair.size0, homographies, [pair.records0, pair.records1]
            )
        )
    rows = [store.write_shard(folder / store.shard_name(0), made)]
    (folder / store.INDEX).write_text(json.dumps(store.index(rows, 2, made[0].size)))
    return folder


if __name__ == "__main__":
    raise SystemExit(run_rank())
