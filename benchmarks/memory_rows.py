"""Rows of peak memory: a training step and Sinkhorn, ours and plain, each alone in a fresh process."""

from __future__ import annotations

from typing import Callable, Dict, Iterator, List, Sequence, Tuple

import torch
from torch import nn

from benchmarks import memory, plain, timing
from benchmarks.model_rows import Call, plain_training_call, sinkhorn_call, training_call
from benchmarks.row import Row, Setting, activation_bytes
from benchmarks.synthetic import made_batch
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig


def peaks(setting: Setting) -> Iterator[Row]:
    """Peak memory of a training step and of Sinkhorn, ours and plain, each alone in a process."""
    config, device = setting.config, str(setting.device)
    work: List[Tuple[str, Callable, Sequence, Dict[str, float]]] = [
        ("training step, N = 512, batch 4", step_work, (config, 512, 4), {"float32": 2.0, "bfloat16": 3.0}),
        ("training step, N = 1024, batch 2", step_work, (config, 1024, 2), {"float32": 2.0, "bfloat16": 3.0}),
        ("Sinkhorn T = 100, N = 512, batch 8", sinkhorn_work, (512, 8), {"ours": 20.0}),
    ]
    for name, function, arguments, targets in work:
        needed = activation_bytes(config, arguments[-2], arguments[-1], plain=True)
        reason = setting.too_dear(0.0, needed)
        if reason:
            yield Row("memory", name, skipped=reason)
            continue
        base = memory.peak_mib(function, device, "plain", *arguments)
        for way, target in targets.items():
            own = max(memory.peak_mib(function, device, way, *arguments), 0.1)
            ratio = timing.Ratio(base / own)  # measured once, in separate processes
            yield Row("memory", f"{name}: {way}", own, "MiB", ratio, None, f"plain {base:.0f} MiB", target)


def step_work(device: str, way: str, config: SuperGlueConfig, keypoints: int, pairs: int) -> Call:
    """For `memory.peak_mib`: a training step, after a first small one."""
    torch.manual_seed(0)
    model: nn.Module = SuperGlue(config).to(device)
    if way == "plain":
        model = plain.plain_from(model).to(device)
    make = plain_training_call if way == "plain" else training_call
    extra = () if way == "plain" else (way,)
    make(model, made_batch(64, 1).to(device), *extra)()
    return make(model, made_batch(keypoints, pairs).to(device), *extra)


def sinkhorn_work(device: str, way: str, keypoints: int, pairs: int) -> Call:
    """For `memory.peak_mib`: Sinkhorn alone."""
    sinkhorn_call(torch.device(device), way, 16, 1)()
    return sinkhorn_call(torch.device(device), way, keypoints, pairs)
