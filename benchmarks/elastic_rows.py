"""Rows of `train.bitwise_elastic`: the same step of the training with it and without it."""

from __future__ import annotations

import json
import os
import statistics
import sys
from typing import Iterator

import torch

from benchmarks import flops, group_rows, timing
from benchmarks.row import Row, Setting, activation_bytes
from pipeline import params

KEYPOINTS = 256
PAIRS = 8  # of all processes together, so that each micro-batch is one pair


def elastic(setting: Setting) -> Iterator[Row]:
    """With one process and with two, with both norms."""
    cuda = setting.device.type == "cuda"
    places = torch.cuda.device_count() if cuda else os.cpu_count() or 1
    for processes in (1, 2):
        for norm in ("layer", "batch"):
            name = f"bitwise_elastic, {processes} process(es), {PAIRS} pairs, N = {KEYPOINTS}, norm {norm}"
            reason = f"{places} {'GPUs' if cuda else 'cores'}" if processes > places else ""
            operations = PAIRS * flops.training_flops(setting.config, KEYPOINTS)
            memory = activation_bytes(setting.config, KEYPOINTS, PAIRS)
            reason = reason or setting.too_dear(operations, memory, calls=2 * setting.rounds)
            yield Row("elastic", name, skipped=reason) if reason else _row(setting, name, processes, norm)


def _row(setting: Setting, name: str, processes: int, norm: str) -> Row:
    config = setting.config
    same = {
        "dim": config.dim, "layers": config.layers, "heads": config.heads, "norm": norm, "batch": PAIRS,
        "sinkhorn_iterations": config.sinkhorn_iterations, "parallel": "ddp", "bitwise_elastic": False,
        "compile": False, "checkpoint_layers": False, "init_from": "", "freeze": [], "accumulate": 1,
        "batch_per_rank": 0, "precision": "float32", "optimizer": "adam", "ema": 0.0, "deterministic": False,
        "scale_angle": True,
    }  # fmt: skip
    train = params.load("train", setting.params).model_copy(update=same).model_dump()
    command = [
        sys.executable, "-m", "benchmarks.elastic_rank", "--train", json.dumps(train),
        "--keypoints", str(KEYPOINTS), "--rounds", str(setting.rounds),
    ]  # fmt: skip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // processes)  # what the launcher gives a rank
    taken = json.loads(group_rows.in_processes(setting, command, processes, threads))
    ratio, cpu = (timing.speed_up(*taken[key]) for key in ("wall", "cpu"))
    plain, own = (1e3 * statistics.median(way) for way in taken["wall"])
    note = f"{1 / ratio.value:.2f} times as long, {1 / cpu.value:.2f} times the processor's time"
    return Row("elastic", name, own, "ms", ratio, cpu, f"without it, {plain:.0f} ms", None, note)
