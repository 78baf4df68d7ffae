"""Rows that only a GPU can fill: training speed and MFU in bfloat16, Sinkhorn's share, latency, a step's profile."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from typing import Callable, Dict, Iterator

import torch

from benchmarks import flops, plain, timing
from benchmarks.model_rows import forward_call, sinkhorn_call, training_call
from benchmarks.row import Row, Setting, contained
from benchmarks.synthetic import made_batch, made_pairs
from pipeline import compat
from superglue_sift import torch_compat
from superglue_sift.batch import from_pairs
from superglue_sift.features import Features
from superglue_sift.matcher import Matcher
from superglue_sift.network import attention
from superglue_sift.network.inference import CUDAGraphModel, fuse_for_inference
from superglue_sift.network.packing import Edges, Packing

GOALS: Dict[int, float] = {512: 1300.0, 1024: 450.0, 2048: 140.0}  # pairs/s of one H200, D = 256, T = 100, bfloat16
BATCH = 64
LATENCY_MS = 3.0
PAIRS = 20  # in sequence, in a round of the latency
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")


def gpu(setting: Setting) -> Iterator[Row]:
    """Rows at D = 256 and T = 100, for which the goals are stated, whatever the table's settings."""
    if setting.device.type != "cuda":
        yield Row("gpu", "training speed, MFU, profile at D = 256, T = 100", skipped="needs a CUDA device")
        return
    config = dataclasses.replace(setting.config, dim=256, sinkhorn_iterations=100)
    for each in rows(dataclasses.replace(setting, config=config)):
        yield dataclasses.replace(each, dim=config.dim)


def rows(setting: Setting) -> Iterator[Row]:
    """All rows; a part that fails (out of memory, for instance) costs only its own rows."""
    groups: Dict[str, Callable[[Setting], Iterator[Row]]] = {
        **{f"training, N = {N}": functools.partial(_training, keypoints=N, goal=goal) for N, goal in GOALS.items()},
        "training, ragged views": _ragged,
        "Sinkhorn of the step": _sinkhorn_share,
        "latency": _latency,
        "attention": _attention,
        "profile of a step": _profile,
    }
    for name, group in groups.items():
        yield from contained("gpu", name, functools.partial(group, setting))


def _step(setting: Setting, batch):
    model = setting.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, **compat.fused_adam())
    return training_call(model, batch.to(setting.device), "bfloat16", optimizer)


def _training(setting: Setting, keypoints: int, goal: float) -> Iterator[Row]:
    taken = setting.timed({"step": _step(setting, made_batch(keypoints, BATCH))})["step"]
    rate = BATCH / statistics.median(taken.wall)
    peak, source = flops.peak(setting.device, "bfloat16")
    share = f"MFU {rate * flops.training_flops(setting.config, keypoints) / peak:.1%} ({source})" if peak else source
    name = f"training, bfloat16, D = 256, T = 100, N = {keypoints}, batch {BATCH}"
    beside = timing.interval([BATCH / seconds / goal for seconds in taken.wall])
    yield Row("gpu", name, rate, "pairs/s", beside, None, f"the goal of {goal:g}", 1.0, share)


def _ragged(setting: Setting) -> Iterator[Row]:
    """Ragged pairs, as real ones are: four views in ten have fewer keypoints than the maximum."""
    pairs, truth = made_pairs(512, BATCH)
    short = [
        pair._replace(records0=pair.records0[: 512 - 37 * (i % 5)], records1=pair.records1[: 512 - 53 * (i % 4)])
        for i, pair in enumerate(pairs)
    ]
    ways = {name: _step(setting, from_pairs(way, truth)) for name, way in (("full", pairs), ("ragged", short))}
    taken = setting.timed(ways)
    rate = BATCH / statistics.median(taken["ragged"].wall)
    ratio = timing.speed_up(taken["full"].wall, taken["ragged"].wall)
    name = f"training, ragged views of up to 512, batch {BATCH}"
    yield Row("gpu", name, rate, "pairs/s", ratio, None, "all views of 512")


def _sinkhorn_share(setting: Setting) -> Iterator[Row]:
    ways = {
        "step": _step(setting, made_batch(512, BATCH)),
        "sinkhorn": sinkhorn_call(setting.device, "ours", 512, BATCH),
    }
    taken = setting.timed(ways)
    share = timing.speed_up(taken["sinkhorn"].wall, taken["step"].wall)
    name = "Sinkhorn of the step, N = 512"
    yield Row("gpu", name, share.value, "of the step", spread=share, at_most=0.2)


def _latency(setting: Setting) -> Iterator[Row]:
    """One pair through the network, eager and as a CUDA graph, and through `Matcher`, compared with the plain one."""
    (pair,), _ = made_pairs(512, 1)
    batch, model = from_pairs([pair]).to(setting.device), setting.model().eval()
    ready = fuse_for_inference(model, "bfloat16")
    captured, matcher = CUDAGraphModel(ready), Matcher(ready, str(setting.device), refine=False)
    sides = Features(pair.records0, pair.size0), Features(pair.records1, pair.size1)
    calls = {
        "float32, plain": forward_call(plain.plain_from(model).to(setting.device), batch),
        "bfloat16": forward_call(ready, batch),
        "bfloat16, captured": lambda: captured(batch),
        "features to matches by Matcher, bfloat16, captured": lambda: matcher.match(*sides),
    }

    def answers(call: Callable[[], object]) -> None:
        for _ in range(PAIRS):
            call()
            setting.wait()

    taken = setting.timed({name: functools.partial(answers, call) for name, call in calls.items()})
    base = taken["float32, plain"].wall
    for way, found in taken.items():
        each = timing.interval([1e3 * seconds / PAIRS for seconds in found.wall])
        most = LATENCY_MS if way.startswith("bfloat16") else None
        ratio = timing.speed_up(base, found.wall)
        name = f"latency, N = 512, batch 1: {way}"
        yield Row("gpu", name, each.value, "ms", ratio, None, "float32, plain", spread=each, at_most=most)


def _attention(setting: Setting) -> Iterator[Row]:
    """Forward and backward of one layer's attention on ragged views, in each implementation."""
    counts = [512 - 37 * (i % 5) for i in range(2 * BATCH)]
    other = [*range(BATCH, 2 * BATCH), *range(BATCH)]
    edges = Edges(Packing(counts, setting.device), other)
    heads, dim = setting.config.heads, setting.config.dim
    qkv = torch.randn(sum(counts), 3, heads, dim // heads, device=setting.device).bfloat16().requires_grad_()
    forms = {"padded and masked": attention._padded}
    if torch_compat.has_packed_attention(qkv):
        forms["packed"] = attention._packed

    def call(form) -> Callable[[], None]:
        return lambda: form(qkv, edges).float().sum().backward()

    taken = setting.timed({name: call(form) for name, form in forms.items()})
    base = taken["padded and masked"].wall
    for name, found in taken.items():
        each = 1e3 * statistics.median(found.wall)
        what = f"attention of {2 * BATCH} ragged views: {name}"
        yield Row("gpu", what, each, "ms", timing.speed_up(base, found.wall), None, "padded and masked")
    if "packed" not in forms:
        yield Row("gpu", "attention, packed", skipped="this torch has no fused kernel for packed sequences here")


def _profile(setting: Setting) -> Iterator[Row]:
    """The ten most expensive kernels of a step, and the number of synchronisations with the GPU."""
    step = _step(setting, made_batch(512, BATCH))
    step()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if setting.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        setting.wait()
    events = profile.key_averages()
    # renamed in torch 2.3 or so; each stack has one of them
    own = "self_device_time_total" if hasattr(events[0], "self_device_time_total") else "self_cuda_time_total"
    # an operator and its kernels both report the kernels' time
    kernels = [
        event
        for event in events
        if event.device_type != torch.autograd.DeviceType.CPU and not getattr(event, "is_user_annotation", False)
    ]
    total = sum(getattr(event, own) for event in kernels) or 1.0
    waits = {event.key: event.count for event in events if event.key in WAITS}
    note = ", ".join(f"{name} {count}" for name, count in waits.items())
    yield Row("gpu", "waits of the host for the GPU in a step", float(sum(waits.values())), "calls", note=note)
    for event in sorted(kernels, key=lambda each: -getattr(each, own))[:10]:
        spent = getattr(event, own)
        yield Row(
            "gpu", f"profile: {event.key[:48]}", spent / 1e3, "ms", note=f"{spent / total:.0%}, {event.count} calls"
        )
