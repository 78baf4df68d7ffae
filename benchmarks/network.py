"""Measure the network in rows, and compare it with the plain network of `plain.py`.

The groups are step, sinkhorn, latency and parity.
"""

from __future__ import annotations

import functools
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks import plain
from benchmarks.photographs import make_pairs
from benchmarks.timing import Call, Setting, format_row
from pipeline.train.data import PairBatch
from pipeline.train.loss import MatchingObjective, find_truth
from superglue_sift import torch_compat
from superglue_sift.network import sinkhorn
from superglue_sift.network.superglue import SuperGlue, find_mutual_matches
from superglue_sift.network.weights import find_shipped_weights, fuse_for_inference, load_model

PRECISIONS = ("float32", "bfloat16")
SINKHORN_ITERATIONS = 100
SINKHORN_PAIRS = 8


def make_training_call(model: SuperGlue, batch: PairBatch, way: str) -> Call:
    """Return a function that runs a training step with Adam: truth, loss, gradient, update.

    Args:
        model: the network, whose parameters the step changes.
        batch: the pairs of the step.
        way: "plain", or the precision of the project's network.
    """
    optimizer = torch.optim.Adam(
        model.train().parameters(), lr=1e-4, **torch_compat.get_fused_adam_options()
    )
    objective = MatchingObjective(model, way)

    def call() -> None:
        optimizer.zero_grad(set_to_none=True)
        if way == "plain":
            loss = plain.compute_dense_loss(
                plain.assign(model, batch.images0, batch.images1), find_truth(batch)
            )
        else:
            loss = objective(batch)[0]
        loss.sum().backward()
        optimizer.step()

    return call


def time_training_step(setting: Setting) -> Iterator[str]:
    """Compare a training step with the faster of two plain networks.

    One has LayerNorm as this project's network, and the other has the paper's BatchNorm.
    """
    batch = make_pairs(setting.keypoints, 2).to(setting.device)
    plains = {
        f"plain network, {norm} norm": make_training_call(
            setting.make_model(norm=norm), batch, "plain"
        )
        for norm in ("layer", "batch")
    }
    ways = {name: make_training_call(setting.make_model(), batch, name) for name in PRECISIONS}
    seconds = setting.time({**plains, **ways}, 2)
    fastest = min(plains, key=lambda way: np.median(seconds[way]))
    for precision in PRECISIONS:
        name = f"training step, N = {setting.keypoints}, batch 2, {precision}"
        yield format_row(name, seconds[precision], seconds[fastest], fastest)


def time_latency(setting: Setting) -> Iterator[str]:
    """Compare the network with the plain network of the same weights, in the time of a pair."""
    batch = make_pairs(setting.keypoints, 1).to(setting.device)
    images = batch.images0, batch.images1
    model = setting.make_model().eval()
    # The plain network has the layers of the training, and the other one those of matching.
    ways = {
        name: functools.partial(fuse_for_inference(model, name), *images) for name in PRECISIONS
    }
    ways["plain"] = functools.partial(plain.assign, model, *images)
    with torch.no_grad():
        seconds = setting.time(ways)
    for precision in PRECISIONS:
        name = f"latency of a pair, N = {setting.keypoints}, {precision}"
        yield format_row(name, seconds[precision], seconds["plain"], "the plain network")


def time_transport(setting: Setting) -> Iterator[str]:
    """Compare Sinkhorn, forward and backward, with autograd in the log domain."""
    # (B, N, N) with a standard deviation of 5, the range of a network's scores
    N = setting.keypoints
    torch.manual_seed(0)
    scores = (5 * torch.randn(SINKHORN_PAIRS, N, N)).to(setting.device).requires_grad_()
    dustbin = torch.tensor(1.0, device=setting.device, requires_grad=True)
    full = torch.ones(scores.shape[:2], dtype=torch.bool, device=setting.device)

    def call(way: str) -> None:
        scores.grad = None
        if way == "plain":
            log_P = plain.compute_sinkhorn(scores, dustbin, SINKHORN_ITERATIONS)
        else:
            log_P, _ = sinkhorn.log_optimal_transport(
                scores, full, full, dustbin, SINKHORN_ITERATIONS
            )
        log_P.sum().backward()

    ways = {way: functools.partial(call, way) for way in ("plain", "scaled")}
    seconds = setting.time(ways, SINKHORN_PAIRS)
    name = f"Sinkhorn, forward and backward, N = {N}, batch {SINKHORN_PAIRS}"
    yield format_row(name, seconds["scaled"], seconds["plain"], "autograd in the log domain")


def compare_precisions(setting: Setting) -> Iterator[str]:
    """Compare the matches of the shipped weights in other precisions with those in float32."""
    batch = make_pairs(setting.keypoints, 4).to(setting.device)
    model = load_model(find_shipped_weights(), str(setting.device))[0]

    def match(precision: str) -> Tensor:
        with torch.no_grad():
            (log_P,), _ = model.assign([(batch.images0, batch.images1)], precision=precision)
        return find_mutual_matches(log_P)[0]

    matches32 = match("float32")
    for precision in ("bfloat16", "float16"):
        matches16 = match(precision)
        is_matched = (matches32 >= 0) | (matches16 >= 0)
        equal = (matches32 == matches16)[is_matched].double().mean()
        yield f"parity: {precision} to float32, share of equal matches {equal:.4f}"
