"""Rows that only a GPU can fill: training speed and MFU in bfloat16, Sinkhorn's share, latency, a step's profile."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Dict, Iterator

import torch

from pipeline.benchmarks import flops
from pipeline.benchmarks.made import made_batch
from pipeline.benchmarks.model_rows import forward_call, sinkhorn_call, training_call
from pipeline.benchmarks.row import Row, Setting
from pipeline.stack import autocast

GOALS: Dict[int, float] = {
    512: 1300.0,
    1024: 450.0,
    2048: 140.0,
}  # pairs/s of one H200, D = 256, T = 100, bfloat16
BATCH = 64
LATENCY_MS = 3.0


def gpu(setting: Setting) -> Iterator[Row]:
    """At D = 256 and T = 100, whatever else the table is set to: the goals are stated for these."""
    if setting.device.type != "cuda":
        yield Row("gpu", "training speed, MFU, profile at D = 256, T = 100", skipped="needs a CUDA device")
        return
    config = dataclasses.replace(setting.config, dim=256, sinkhorn_iterations=100)
    wide = dataclasses.replace(setting, config=config)
    for keypoints, goal in GOALS.items():
        yield _training(wide, keypoints, goal)
    yield _sinkhorn_share(wide)
    yield _latency(wide)
    yield from _profile(wide)


def _judged(value: float, goal: float, most: bool = False) -> str:
    good = value <= goal if most else value >= goal
    return f"target {'at most' if most else 'at least'} {goal:g}: {'met' if good else 'not met'}"


def _step(setting: Setting, keypoints: int):
    model = setting.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return training_call(model, made_batch(keypoints, BATCH).to(setting.device), "bfloat16", optimizer)


def _training(setting: Setting, keypoints: int, goal: float) -> Row:
    taken = setting.timed({"step": _step(setting, keypoints)})["step"]
    rate = BATCH / statistics.median(taken.wall)
    peak, source = flops.peak(setting.device, "bfloat16")
    share = (
        f"MFU {rate * flops.training_flops(setting.config, keypoints) / peak:.1%} ({source})"
        if peak
        else source
    )
    name = f"training, bfloat16, D = 256, T = 100, N = {keypoints}, batch {BATCH}"
    return Row("gpu", name, rate, "pairs/s", note=f"{share}; {_judged(rate, goal)}")


def _sinkhorn_share(setting: Setting) -> Row:
    ways = {"step": _step(setting, 512), "sinkhorn": sinkhorn_call(setting.device, "ours", 512, BATCH)}
    taken = setting.timed(ways)
    share = statistics.median(taken["sinkhorn"].wall) / statistics.median(taken["step"].wall)
    return Row(
        "gpu", "Sinkhorn of the step, N = 512", share, "of the step", note=_judged(share, 0.2, most=True)
    )


def _latency(setting: Setting) -> Row:
    call = forward_call(setting.model(), made_batch(512, 1).to(setting.device))

    def cast() -> None:
        with autocast("cuda", "bfloat16"):
            call()

    each = 1e3 * statistics.median(setting.timed({"call": cast})["call"].wall)
    return Row("gpu", "latency, N = 512, batch 1", each, "ms", note=_judged(each, LATENCY_MS, most=True))


def _profile(setting: Setting) -> Iterator[Row]:
    """The ten dearest kernels of a step, and how often something waits for the GPU."""
    step = _step(setting, 512)
    step()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        setting.wait()
    events = profile.key_averages()
    # renamed in torch 2.3 or so; both stacks have one of them
    own = "self_device_time_total" if hasattr(events[0], "self_device_time_total") else "self_cuda_time_total"
    total = sum(getattr(event, own) for event in events) or 1.0
    waits = sum(event.count for event in events if event.key in ("aten::item", "aten::nonzero"))
    yield Row(
        "gpu", "waits of the host for the GPU in a step", float(waits), "calls", note="item and nonzero"
    )
    for event in sorted(events, key=lambda each: -getattr(each, own))[:10]:
        spent = getattr(event, own)
        yield Row(
            "gpu",
            f"profile: {event.key[:48]}",
            spent / 1e3,
            "ms",
            note=f"{spent / total:.0%}, {event.count} calls",
        )
