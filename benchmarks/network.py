"""Rows of the network, compared with the plain network of `plain.py`.

The groups are step, sinkhorn, latency, memory and parity.
"""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
from pathlib import Path
from typing import Callable, Dict, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import plain
from benchmarks.photographs import make_batch
from benchmarks.timing import Call, Row, Setting, row
from pipeline.train.loss import MatchingObjective
from superglue_sift import torch_compat
from superglue_sift.network import sinkhorn
from superglue_sift.network.batch import PairBatch
from superglue_sift.network.ground_truth import ground_truth
from superglue_sift.network.superglue import SuperGlue, mutual_matches
from superglue_sift.network.weights import fuse_for_inference, load_model, shipped_weights

PRECISIONS = ("float32", "bfloat16")
ITERATIONS = 100  # of Sinkhorn alone
SINKHORN_PAIRS = 8
MIB = 1 << 20


def training_call(model: nn.Module, batch: PairBatch, precision: str = "float32") -> Call:
    """Return a training step with Adam: truth, loss, gradient, update.

    The model is a SuperGlue, or a plain network, which is in float32.
    """
    objective = MatchingObjective(model, precision) if isinstance(model, SuperGlue) else None
    # both are updated in one pass over all parameters
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-4, **torch_compat.fused_adam())

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
    """Compare a training step with the faster of two plain networks.

    One has LayerNorm as this project's network, and the other has the paper's BatchNorm.
    """
    batch = make_batch(setting.keypoints, 2).to(setting.device)
    plains: Dict[str, Call] = {}
    for norm in ("layer", "batch"):
        model = plain.plain_from(setting.model(norm=norm)).to(setting.device)
        plains[f"plain network, {norm} norm"] = training_call(model, batch)
    ways = {each: training_call(setting.model(), batch, each) for each in PRECISIONS}
    taken = setting.time({**plains, **ways}, 2)
    fastest = min(plains, key=lambda way: np.median(taken[way]))
    for precision in PRECISIONS:
        name = f"training step, N = {setting.keypoints}, batch 2, {precision}"
        yield row(name, taken[precision], taken[fastest], fastest)


def latency(setting: Setting) -> Iterator[Row]:
    """Compare one pair through the network with the plain network of the same weights."""
    batch = make_batch(setting.keypoints, 1).to(setting.device)
    model = setting.model().eval()
    models: Dict[str, nn.Module] = {each: fuse_for_inference(model, each) for each in PRECISIONS}
    # the plain network keeps its layers as they are trained
    models["plain"] = plain.plain_from(model).to(setting.device)

    def forward(name: str) -> Call:
        return torch.no_grad()(lambda: models[name](batch))

    taken = setting.time({name: forward(name) for name in models})
    for precision in PRECISIONS:
        name = f"latency of a pair, N = {setting.keypoints}, {precision}"
        yield row(name, taken[precision], taken["plain"], "the plain network")


def transport(setting: Setting) -> Iterator[Row]:
    """Compare Sinkhorn, forward and backward, with autograd in the log domain."""
    ways = {way: sinkhorn_call(setting, way) for way in ("plain", "scaled")}
    taken = setting.time(ways, SINKHORN_PAIRS)
    name = f"Sinkhorn, forward and backward, N = {setting.keypoints}, batch {SINKHORN_PAIRS}"
    yield row(name, taken["scaled"], taken["plain"], "autograd in the log domain")


def sinkhorn_call(setting: Setting, way: str) -> Call:
    """Return a call of Sinkhorn, plain or scaled, on random scores in the range of a network."""
    generator = torch.Generator().manual_seed(0)
    # (B, N, N) with a standard deviation of 5
    N = setting.keypoints
    scores = (
        (torch.randn(SINKHORN_PAIRS, N, N, generator=generator) * 5)
        .to(setting.device)
        .requires_grad_()
    )
    dustbin = torch.tensor(1.0, device=setting.device, requires_grad=True)
    full = torch.ones(scores.shape[:2], dtype=torch.bool, device=setting.device)

    def call() -> None:
        scores.grad = None
        if way == "plain":
            log_P = plain.sinkhorn(scores, dustbin, ITERATIONS)
        else:
            log_P, _ = sinkhorn.log_optimal_transport(scores, full, full, dustbin, ITERATIONS)
        log_P.sum().backward()

    return call


def step_call(setting: Setting, way: str) -> Call:
    """Return a training step of four pairs. A small step has run before it.

    way: "plain", or a precision.
    """
    model = setting.model()
    trained = plain.plain_from(model).to(setting.device) if way == "plain" else model
    # the small step allocates the optimizer's moments, which are not measured
    training_call(trained, make_batch(64, 1).to(setting.device), way)()
    return training_call(trained, make_batch(setting.keypoints, 4).to(setting.device), way)


def memory(setting: Setting) -> Iterator[Row]:
    """Measure the peak memory of a training step and of Sinkhorn, each alone in a process."""
    for name, prepare, ways in (
        (f"training step, N = {setting.keypoints}, batch 4", step_call, PRECISIONS),
        (f"Sinkhorn, N = {setting.keypoints}, batch {SINKHORN_PAIRS}", sinkhorn_call, ("scaled",)),
    ):
        base = peak_mib(setting, prepare, "plain")
        for way in ways:
            own = peak_mib(setting, prepare, way)
            note = f"{base / own:.1f}x less than plain, {base:.0f} MiB"
            yield Row(f"memory: {name}, {way}", own, "MiB", note)


def peak_mib(setting: Setting, prepare: Callable[[Setting, str], Call], way: str) -> float:
    """Return the MiB by which the call of `prepare(setting, way)` raises the memory at its peak."""
    # a new process, because memory that was freed before would be used again
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_measure_peak, setting, prepare, way).result()


def _measure_peak(setting: Setting, prepare: Callable[[Setting, str], Call], way: str) -> float:
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
    """Count the keypoints with the match that the shipped weights find in float32."""
    batch = make_batch(setting.keypoints, 4).to(setting.device)
    model = load_model(shipped_weights(), str(setting.device))[0]

    def matches(precision: str) -> Tensor:
        with torch.no_grad():
            (log_P,), _ = model.assign([batch], precision=precision)
        return mutual_matches(log_P)[0]

    exact = matches("float32")
    for precision in ("bfloat16", "float16"):
        found = matches(precision)
        # of the keypoints that have a match in one of both
        equal = (exact == found)[(exact >= 0) | (found >= 0)].double().mean()
        yield Row(f"parity: {precision} to float32, equal matches", float(equal), "share")
