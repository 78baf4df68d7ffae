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
from benchmarks.photographs import make_batch
from benchmarks.timing import Call, Setting, row
from pipeline.train.loss import MatchingObjective
from superglue_sift import torch_compat
from superglue_sift.network import sinkhorn
from superglue_sift.network.batch import PairBatch
from superglue_sift.network.ground_truth import find_true_matches
from superglue_sift.network.superglue import SuperGlue, mutual_matches
from superglue_sift.network.weights import find_shipped_weights, fuse_for_inference, load_model

PRECISIONS = ("float32", "bfloat16")
ITERATIONS = 100  # Of Sinkhorn alone
SINKHORN_PAIRS = 8


def training_call(model: SuperGlue, batch: PairBatch, way: str) -> Call:
    """Return a training step with Adam: truth, loss, gradient, update.

    Args:
        way: "plain", or the precision of the project's network.
    """
    # All parameters are updated in one pass
    optimizer = torch.optim.Adam(
        model.train().parameters(), lr=1e-4, **torch_compat.fused_adam_options()
    )
    objective = MatchingObjective(model, way)

    def call() -> None:
        optimizer.zero_grad(set_to_none=True)
        if way == "plain":
            loss = plain.dense_loss(plain.assign(model, batch), find_true_matches(batch))
        else:
            loss = objective(batch)[0]
        loss.sum().backward()
        optimizer.step()

    return call


def step(setting: Setting) -> Iterator[str]:
    """Compare a training step with the faster of two plain networks.

    One has LayerNorm as this project's network, and the other has the paper's BatchNorm.
    """
    batch = make_batch(setting.keypoints, 2).to(setting.device)
    plains = {
        f"plain network, {norm} norm": training_call(setting.model(norm=norm), batch, "plain")
        for norm in ("layer", "batch")
    }
    ways = {name: training_call(setting.model(), batch, name) for name in PRECISIONS}
    taken = setting.time({**plains, **ways}, 2)
    fastest = min(plains, key=lambda way: np.median(taken[way]))
    for precision in PRECISIONS:
        name = f"training step, N = {setting.keypoints}, batch 2, {precision}"
        yield row(name, taken[precision], taken[fastest], fastest)


def latency(setting: Setting) -> Iterator[str]:
    """Compare one pair through the network with the plain network of the same weights."""
    batch = make_batch(setting.keypoints, 1).to(setting.device)
    model = setting.model().eval()
    # The plain network keeps its layers as they are trained
    ways = {name: functools.partial(fuse_for_inference(model, name), batch) for name in PRECISIONS}
    ways["plain"] = functools.partial(plain.assign, model, batch)
    with torch.no_grad():
        taken = setting.time(ways)
    for precision in PRECISIONS:
        name = f"latency of a pair, N = {setting.keypoints}, {precision}"
        yield row(name, taken[precision], taken["plain"], "the plain network")


def transport(setting: Setting) -> Iterator[str]:
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
            log_P = plain.sinkhorn(scores, dustbin, ITERATIONS)
        else:
            log_P, _ = sinkhorn.log_optimal_transport(scores, full, full, dustbin, ITERATIONS)
        log_P.sum().backward()

    ways = {way: functools.partial(call, way) for way in ("plain", "scaled")}
    taken = setting.time(ways, SINKHORN_PAIRS)
    name = f"Sinkhorn, forward and backward, N = {N}, batch {SINKHORN_PAIRS}"
    yield row(name, taken["scaled"], taken["plain"], "autograd in the log domain")


def parity(setting: Setting) -> Iterator[str]:
    """Count the keypoints with the match that the shipped weights find in float32."""
    batch = make_batch(setting.keypoints, 4).to(setting.device)
    model = load_model(find_shipped_weights(), str(setting.device))[0]

    def matches(precision: str) -> Tensor:
        with torch.no_grad():
            (log_P,), _ = model.assign([batch], precision=precision)
        return mutual_matches(log_P)[0]

    exact = matches("float32")
    for precision in ("bfloat16", "float16"):
        rounded = matches(precision)
        # Of the keypoints that have a match in one of both
        equal = (exact == rounded)[(exact >= 0) | (rounded >= 0)].double().mean()
        yield f"parity: {precision} to float32, share of equal matches {equal:.4f}"
