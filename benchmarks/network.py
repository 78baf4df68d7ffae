"""Rows of the network, ours compared with the plain one of `plain.py`: step, Sinkhorn, latency,
memory, parity.
"""

from __future__ import annotations

import concurrent.futures
import gc
import math
import multiprocessing
from pathlib import Path
from typing import Callable, Dict, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import plain
from benchmarks.synthetic import make_batch
from benchmarks.timing import Call, Row, Setting, compare
from pipeline import compat
from pipeline.train.loss import MatchingObjective
from superglue_sift.network import sinkhorn
from superglue_sift.network.batch import PairBatch
from superglue_sift.network.ground_truth import ground_truth
from superglue_sift.network.superglue import SuperGlue, mutual_matches
from superglue_sift.network.weights import fuse_for_inference

PRECISIONS = ("float32", "bfloat16")
KEYPOINTS = 512
ITERATIONS = 100  # of Sinkhorn alone
SINKHORN_PAIRS = 8
MIB = 1 << 20
Prepare = Callable[[Setting, str], Call]
NOISE = 0.3  # of `perturb`: standard deviation on a weight, times the root of its number of inputs


def forward_call(model: nn.Module, batch: PairBatch) -> Call:
    """Log assignments without gradients."""
    model.eval()
    return torch.no_grad()(lambda: model(batch))


def training_call(model: nn.Module, batch: PairBatch, precision: str = "float32") -> Call:
    """A training step with Adam: truth, loss, gradient, update. Of our network, or of the plain
    one, which is in float32.
    """
    model.train()
    ours = isinstance(model, SuperGlue)
    objective = MatchingObjective(model, precision) if ours else None
    fused = compat.fused_adam() if ours else {}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, **fused)

    def call() -> None:
        optimizer.zero_grad(set_to_none=True)
        if objective:
            loss = objective(batch)[0]
        else:
            loss = plain.dense_loss(model(batch), ground_truth(batch))
        loss.sum().backward()
        optimizer.step()

    return call


def step(setting: Setting) -> Iterator[Row]:
    """A training step, compared with the plain network with our LayerNorm or the paper's BatchNorm:
    the faster one.
    """
    batch = make_batch(KEYPOINTS, 2).to(setting.device)
    ways: Dict[str, Call] = {}
    for norm in ("layer", "batch"):
        twin = plain.plain_from(setting.model(norm=norm)).to(setting.device)
        ways[f"plain network, {norm} norm"] = training_call(twin, batch)
    plains = list(ways)
    for precision in PRECISIONS:
        ways[precision] = training_call(setting.model(), batch, precision)
    taken = setting.time(ways, 2)
    fastest = min(plains, key=lambda way: np.median(taken[way].wall))
    for precision in PRECISIONS:
        name = f"training step, N = {KEYPOINTS}, batch 2, {precision}"
        yield compare(name, taken[precision], taken[fastest], fastest)


def latency(setting: Setting) -> Iterator[Row]:
    """One pair through the network, compared with the plain network of the same weights."""
    batch = make_batch(KEYPOINTS, 1).to(setting.device)
    model = setting.model().eval()
    ways = {"plain": forward_call(plain.plain_from(model).to(setting.device), batch)}
    for precision in PRECISIONS:
        ways[precision] = forward_call(fuse_for_inference(model, precision), batch)
    taken = setting.time(ways)
    for precision in PRECISIONS:
        name = f"latency of a pair, N = {KEYPOINTS}, {precision}"
        yield compare(name, taken[precision], taken["plain"], "the plain network")


def transport(setting: Setting) -> Iterator[Row]:
    """Sinkhorn alone, T = 100, forward and backward, compared with autograd in the log domain."""
    ways = {way: sinkhorn_call(setting, way) for way in ("plain", "ours")}
    taken = setting.time(ways, SINKHORN_PAIRS)
    name = f"Sinkhorn, forward and backward, N = {KEYPOINTS}, batch {SINKHORN_PAIRS}"
    yield compare(name, taken["ours"], taken["plain"], "autograd in the log domain")


def sinkhorn_call(setting: Setting, way: str) -> Call:
    """A call of Sinkhorn on random scores in the range of a network."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(SINKHORN_PAIRS, KEYPOINTS, KEYPOINTS, generator=generator)
    scores = (random * 5).to(setting.device).requires_grad_()
    dustbin = torch.tensor(1.0, device=setting.device, requires_grad=True)
    full = torch.ones(scores.shape[:2], dtype=torch.bool, device=setting.device)

    def call() -> None:
        scores.grad = None
        if way == "plain":
            found = plain.sinkhorn(scores, dustbin, ITERATIONS)
        else:
            found, _ = sinkhorn.log_optimal_transport(scores, full, full, dustbin, ITERATIONS)
        sum(P[::7, ::7].sum() for P in found).backward()

    return call


def step_call(setting: Setting, way: str) -> Call:
    """A call of a training step of four pairs, after a small one. way: plain, or a precision."""
    model = setting.model()
    tried = plain.plain_from(model).to(setting.device) if way == "plain" else model
    training_call(tried, make_batch(64, 1).to(setting.device), way)()
    return training_call(tried, make_batch(KEYPOINTS, 4).to(setting.device), way)


def memory(setting: Setting) -> Iterator[Row]:
    """Peak memory of a training step and of Sinkhorn, ours and plain, each alone in a process."""
    works = [
        (f"training step, N = {KEYPOINTS}, batch 4", step_call, PRECISIONS),
        (f"Sinkhorn, N = {KEYPOINTS}, batch {SINKHORN_PAIRS}", sinkhorn_call, ("ours",)),
    ]
    for name, prepare, ways in works:
        base = peak_mib(setting, prepare, "plain")
        for way in ways:
            own = peak_mib(setting, prepare, way)
            note = f"{base / own:.1f}x less than plain, {base:.0f} MiB"
            yield Row(f"memory: {name}, {way}", own, "MiB", note=note)


def peak_mib(setting: Setting, prepare: Prepare, way: str) -> float:
    """MiB by which the call that `prepare(setting, way)` returns raises the memory in use at its
    peak, in a process of its own.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_measure_peak, setting, prepare, way).result()


def _measure_peak(setting: Setting, prepare: Prepare, way: str) -> float:
    torch.set_num_threads(1)
    call = prepare(setting, way)
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    # the high-water mark becomes the resident memory (Linux)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_kib("VmRSS")
    call()
    return (_resident_kib("VmHWM") - before) / 1024


def _resident_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def parity(setting: Setting) -> Iterator[Row]:
    """Half precision under autocast compared with float32: keypoints with the same match."""
    batch = make_batch(KEYPOINTS, 2).to(setting.device)
    model = setting.model().eval()
    perturb(model)

    def matches(precision: str) -> Tensor:
        with torch.no_grad():
            (log_P,), _ = model.assign([batch], precision=precision)
        return mutual_matches(log_P)[0]

    exact = matches("float32")
    for precision in ("bfloat16", "float16"):
        found = matches(precision)
        equal = (exact == found)[(exact >= 0) | (found >= 0)].double().mean()
        yield Row(f"parity: {precision} to float32, equal matches", float(equal), "share")


def perturb(model: nn.Module) -> None:
    """Add noise to its weights: the branches of an untrained network end in zeros, in any
    precision.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            inputs = parameter.shape[1] if parameter.dim() > 1 else 100
            parameter.add_(torch.randn_like(parameter) * NOISE / math.sqrt(inputs))
