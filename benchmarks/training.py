"""Measure the ways to train, one row for each way.

`python -m benchmarks.training`, started by `time_modes`, is one rank of a way to train.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.photographs import make_pairs
from benchmarks.timing import Call, Setting, format_row
from pipeline import distributed, launch, params, presets
from pipeline.params import RunParams, TrainParams
from pipeline.train.build import build_objective_and_state, make_network
from pipeline.train.data import PairBatch
from pipeline.train.loss import MatchingObjective
from pipeline.train.optimizer import choose_precision, detect_abilities
from pipeline.train.step import train_step
from superglue_sift.environment import count_usable_cores
from superglue_sift.network.superglue import SuperGlueConfig
from superglue_sift.torch_compat import describe_missing_compiler

CLONE = Path(__file__).resolve().parents[1]  # Ranks import `benchmarks` from it.
PAIRS = {"cuda": 64, "cpu": 2}  # of a step, for each process
# Values of `train` and `run` that differ from the plain ones, or parallel: dp for DataParallel
Changes = Dict[str, Any]


def list_modes(device: str) -> Dict[str, Tuple[Changes, int, str]]:
    """Return the ways to train on "cuda" or "cpu" by name.

    Each has its changes, its number of processes, and what this machine lacks for it, or "".
    """
    on_gpu = device == "cuda"
    devices = torch.cuda.device_count() if on_gpu else os.cpu_count() or 1
    processes = max(devices, 2)
    missing_gpus = "" if on_gpu and devices > 1 else "needs several GPUs"
    return {
        f"DDP, processes: {processes}": ({}, processes, missing_gpus if on_gpu else ""),
        "DataParallel": ({"parallel": "dp"}, 1, missing_gpus),
        "AMP, bfloat16": ({"precision": "bfloat16"}, 1, ""),
        "AMP, float16": ({"precision": "float16"}, 1, "" if on_gpu else "needs a GPU"),
        "gradient accumulation, 2 parts": ({"accumulate": 2}, 1, ""),
        "deterministic": ({"deterministic": True}, 1, ""),
        "torch.compile": ({"compile": True}, 1, describe_missing_compiler(device)),
        "plain once more": ({}, 1, ""),  # Its ratio says how much the machine has changed.
    }


def time_modes(setting: Setting) -> Iterator[str]:
    """Compare each way to train with the plain one: one process in float32.

    Each runs in processes of its own.
    """
    plain = run_mode(setting, {}, 1)
    yield format_row("mode: plain", plain)
    for way, (changes, processes, missing) in list_modes(setting.device.type).items():
        name = f"mode: {way}"
        if missing:
            yield f"{name:56} SKIP: {missing}"
            continue
        try:
            yield format_row(name, run_mode(setting, changes, processes), plain, "plain")
        except RuntimeError as error:
            yield f"{name:56} FAILED: {error}"


def run_mode(setting: Setting, changes: Changes, processes: int) -> np.ndarray:
    """Return the seconds of a pair in each round, of the first rank. Raises RuntimeError."""
    work = json.dumps([setting.config.to_dict(), setting.keypoints, changes])
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    options = launch.make_torchrun_options(processes, restarts=0)
    command = [*torchrun, *options, "-m", "benchmarks.training", work]
    # All processes together have as many threads as the machine has cores.
    threads = {"OMP_NUM_THREADS": str(count_usable_cores() // processes or 1)}
    environment = {**launch.VARIABLES, **threads, **os.environ}
    if setting.device.type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, env=environment, cwd=CLONE, capture_output=True, text=True)
    if done.returncode:
        # The first line is the error of a rank, and the last ones are torchrun's summary.
        errors = re.findall(r"\w*Error: .*", done.stderr)
        raise RuntimeError((errors or ["a rank failed"])[0])
    return np.array(json.loads(done.stdout.splitlines()[-1]))


def run_rank(work: str) -> int:
    """Run one rank of a mode. The first prints the seconds of its steps as JSON."""
    config, keypoints, changes = json.loads(work)
    with distributed.process_group() as context:
        devices = torch.cuda.device_count() if changes.get("parallel") == "dp" else 1
        pairs = PAIRS[context.device.type] * devices
        # Every rank must make the same number of rounds, so there is no limit of time.
        setting = Setting(context.device, SuperGlueConfig(**config), keypoints, float("inf"))
        step = make_training_step(setting, pairs, context, changes)
        seconds = setting.time({"step": step}, pairs * context.world_size)["step"]
    if context.is_main:
        # `run_mode` reads this line.
        print(json.dumps(seconds.tolist()))
    return 0


def make_training_step(
    setting: Setting, pairs: int, context: distributed.Context, changes: Changes
) -> Call:
    """Return a step of the stage `train`, with `pairs` of each rank, which are always the same."""
    # The request is preset `sample` with the network of `setting` and the changes.
    model = setting.config.to_dict()
    values = {name: model[name] for name in model if name in TrainParams.model_fields}
    values.update(optimizer="adam", precision="float32", max_keypoints=setting.keypoints)
    values.update(changes)
    is_data_parallel = values.pop("parallel", "") == "dp"
    sample = params.load(presets.FOLDER / "sample.yaml")
    of_run = {name: values.pop(name) for name in {*values} & {*RunParams.model_fields}}
    run = sample.run.model_copy(update=of_run)
    train = sample.train.model_copy(update=values)
    precision, _ = choose_precision(train.precision, [detect_abilities(context.device)])
    network = make_network(train, run, context)
    objective, wrapped, state = build_objective_and_state(network, train, run, context, precision)
    if is_data_parallel:
        wrapped = DataParallelObjective(_ObjectiveOfTensors(objective))
    part = make_pairs(setting.keypoints, pairs // run.accumulate).to(context.device)
    common = wrapped, state.optimizer, state.scaler, [part] * run.accumulate
    return lambda: train_step(*common, pairs * context.world_size, context.world_size)


class DataParallelObjective(nn.DataParallel):
    """The objective over all GPUs of one process, by torch's DataParallel.

    DataParallel scatters only tensors, so a batch is passed as its tensors.
    """

    def forward(
        self, batch: PairBatch, repair_overflow: bool = True
    ) -> Tuple[Tensor, Dict[str, Tensor]]:
        """Compute what `MatchingObjective.forward` computes."""
        values = (getattr(batch, field.name) for field in dataclasses.fields(batch))
        total, parts = super().forward(*values, repair_overflow=repair_overflow)
        return total.sum().reshape(1), parts


class _ObjectiveOfTensors(nn.Module):
    """The objective, called with the tensors of a batch."""

    def __init__(self, objective: MatchingObjective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, *values: Any, repair_overflow: bool) -> Tuple[Tensor, Dict[str, Tensor]]:
        return self.objective(PairBatch(*values), repair_overflow)


if __name__ == "__main__":
    raise SystemExit(run_rank(*sys.argv[1:]))
