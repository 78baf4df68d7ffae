"""Rows of the network: the grid over keypoints and batch, Sinkhorn alone, ours compared with plain."""

from __future__ import annotations

import statistics
from typing import Callable, Dict, Iterator, Optional

import torch
from torch import nn

from benchmarks import flops, plain, timing, transformers_module
from benchmarks.parity_rows import largest, perturbed
from benchmarks.row import Row, Setting, activation_bytes
from benchmarks.synthetic import made_batch, ragged_batch
from pipeline import compat
from pipeline.train.objective import MatchingObjective
from superglue_sift.network import sinkhorn
from superglue_sift.network.inference import fuse_for_inference
from superglue_sift.network.sinkhorn import Marginals
from superglue_sift.network.superglue import Matches, SuperGlue, mutual_matches
from superglue_sift.truth import ground_truth

Call = Callable[[], object]
PLAINS = {"plain with LayerNorm": "layer", "plain with BatchNorm": "batch"}


def grid(setting: Setting) -> Iterator[Row]:
    """Forward, and forward with backward, for each number of keypoints and batch."""
    peak = flops.peak(setting.device, "float32")
    for keypoints in setting.keypoint_counts:
        for pairs in setting.batches:
            yield from _cell(setting, keypoints, pairs, *peak)


def _cell(setting: Setting, keypoints: int, pairs: int, rate: Optional[float], source: str) -> Iterator[Row]:
    forward = sum(flops.forward_flops(setting.config, keypoints).values())
    memory_needed = activation_bytes(setting.config, keypoints, pairs)
    for what, operations, make in (
        ("forward", forward, forward_call),
        ("forward + backward", 3 * forward, training_call),
    ):
        name = f"{what}, N = {keypoints}, batch {pairs}"
        reason = setting.too_dear(operations * pairs, memory_needed if make is training_call else 0)
        if reason:
            yield Row("model", name, skipped=reason)
            continue
        call = make(setting.model(), made_batch(keypoints, pairs).to(setting.device))
        taken = setting.timed({what: call}, setting.seconds / 2)[what]
        each = statistics.median(taken.wall) / pairs
        note = f"{operations / each / 1e9:.0f} GFLOP/s, "
        note += f"MFU {operations / each / rate:.0%} ({source})" if rate else source
        busy = sum(taken.cpu) / sum(taken.wall)
        note += f", cores in use {busy:.2f}"
        yield Row("model", name, 1e3 * each, "ms/pair", note=note)


def forward_call(model: SuperGlue, batch) -> Call:
    """Log assignments without gradients."""
    model.eval()

    def call() -> None:
        with torch.no_grad():
            model(batch)

    return call


def training_call(model: SuperGlue, batch, precision: str = "float32", optimizer=None) -> Call:
    """Truth, loss and gradient of a batch, with a step of Adam when there is an optimiser."""
    objective = MatchingObjective(model.train(), 3.0, 5.0, precision)

    def call() -> None:
        model.zero_grad(set_to_none=True)
        objective(batch)[0].sum().backward()
        if optimizer is not None:
            optimizer.step()

    return call


def plain_training_call(model: nn.Module, batch, optimizer=None) -> Call:
    """The same work on the plain network."""
    model.train()

    def call() -> None:
        model.zero_grad(set_to_none=True)
        plain.dense_loss(model(batch), ground_truth(batch)).sum().backward()
        if optimizer is not None:
            optimizer.step()

    return call


def _ratio_rows(
    group: str, name: str, taken: Dict[str, timing.Seconds], pairs: int, targets, other: str = "plain"
) -> Iterator[Row]:
    """One row for each way of `targets`, as its ratio to `other`."""
    base = taken[other]
    for way, target in targets.items():
        own = taken[way]
        yield Row(
            group,
            f"{name}: {way}",
            1e3 * statistics.median(own.wall) / pairs,
            "ms/pair",
            timing.speed_up(base.wall, own.wall),
            timing.speed_up(base.cpu, own.cpu),
            f"{other} {1e3 * statistics.median(base.wall) / pairs:.1f} ms",
            target,
        )


def against_plain(setting: Setting) -> Iterator[Row]:
    """A training step with Adam, compared with the plain network's, in float32 and bfloat16.

    Plain has our LayerNorm (with the same weights) or the paper's BatchNorm; the ratio is to the cheaper one.
    """
    for keypoints, pairs, targets in (
        (512, 2, {"float32": 1.4, "bfloat16": 2.2}),
        (1024, 1, {"float32": 2.0, "bfloat16": 2.2}),
    ):
        name = f"training step, N = {keypoints}, batch {pairs}"
        operations = pairs * flops.training_flops(setting.config, keypoints)
        reason = setting.too_dear(
            2 * operations, activation_bytes(setting.config, keypoints, pairs, plain=True), budgets=6
        )
        if reason:
            yield Row("plain", name, skipped=reason)
            continue
        batch = made_batch(keypoints, pairs).to(setting.device)
        model = setting.model()
        ways: Dict[str, Call] = {}
        for way, norm in PLAINS.items():
            twin = plain.plain_from(setting.model(norm=norm)).to(setting.device)
            ways[way] = plain_training_call(twin, batch, _adam(twin))
        ways["float32"] = training_call(model, batch, "float32", _adam(model))
        ways["bfloat16"] = training_call(model, batch, "bfloat16", _adam(model))
        taken = setting.timed(ways, 3 * setting.seconds)
        cheaper = min(PLAINS, key=lambda way: statistics.median(taken[way].wall))
        other = f"{cheaper} (the cheaper norm),"
        yield from _ratio_rows("plain", name, {**taken, other: taken[cheaper]}, pairs, targets, other)


def precisions(setting: Setting) -> Iterator[Row]:
    """bfloat16 compared with float32, in training and matching: the basis of `train.precision: auto` on a CPU."""
    for what, counts in (
        ("N = 64, batch 4", [64] * 4),
        ("N = 512, batch 2", [512] * 2),
        ("N = 512, batch 8", [512] * 8),
        ("N = 512, batch 16", [512] * 16),
        ("N = 128 to 464, batch 8", list(range(128, 465, 48))),
    ):
        reason = setting.too_dear(len(counts) * flops.training_flops(setting.config, max(counts)), 0)
        if reason:
            yield Row("precision", f"training step, {what}: bfloat16", skipped=reason)
            continue
        batch, model = ragged_batch(counts).to(setting.device), setting.model()
        ways = {each: training_call(model, batch, each, _adam(model)) for each in ("float32", "bfloat16")}
        yield from _against_float32(setting, f"training step, {what}", ways, len(counts))
    for keypoints in (512, 1024):
        model, batch = setting.model().eval(), made_batch(keypoints, 1).to(setting.device)
        ways = {each: forward_call(fuse_for_inference(model, each), batch) for each in ("float32", "bfloat16")}
        yield from _against_float32(setting, f"match latency, N = {keypoints}", ways, 1)


def _against_float32(setting: Setting, name: str, ways: Dict[str, Call], pairs: int) -> Iterator[Row]:
    return _ratio_rows("precision", name, setting.timed(ways), pairs, {"bfloat16": None}, "float32")


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam: torch's default for the plain network, the trainer's for ours."""
    own = compat.fused_adam() if isinstance(model, SuperGlue) else {}
    return torch.optim.Adam(model.parameters(), lr=1e-4, **own)


def latency(setting: Setting) -> Iterator[Row]:
    """One pair through the matcher, compared with the plain network with the same weights."""
    for keypoints in (512, 1024):
        batch = made_batch(keypoints, 1).to(setting.device)
        model = setting.model().eval()
        twin = plain.plain_from(model).to(setting.device)
        ways: Dict[str, Call] = {"plain": forward_call(twin, batch)}
        for precision in ("float32", "bfloat16"):
            ways[precision] = forward_call(fuse_for_inference(model, precision), batch)
        name = f"match latency, N = {keypoints}"
        targets = {"float32": 1.6, "bfloat16": 4.0 if keypoints == 512 else None}
        yield from _ratio_rows("latency", name, setting.timed(ways, 2 * setting.seconds), 1, targets)
        yield _difference(setting, batch, keypoints)
    yield from _against_transformers(setting)


def _against_transformers(setting: Setting) -> Iterator[Row]:
    """One pair to mutual matches, compared with `transformers` with the same weights, in float32."""
    name = "match latency beside transformers' SuperGlue, N = 512"
    if setting.device.type != "cpu":
        yield Row("latency", name, skipped="measured on the CPU")
        return
    batch = made_batch(512, 1)
    model = perturbed(setting.model(norm="batch", scale_angle=False)).eval()
    try:
        theirs = transformers_module.matching_call(model, batch)
    except ImportError as error:
        yield Row("latency", name, skipped=f"`transformers` does not import ({str(error).splitlines()[0]})")
        return
    fast = fuse_for_inference(model)

    def ours() -> Matches:
        with torch.no_grad():
            return mutual_matches(fast(batch), (512, 512), 0.0)

    taken = setting.timed({"transformers": theirs, "float32": ours}, 2 * setting.seconds)
    yield from _ratio_rows("latency", name, taken, 1, {"float32": 1.8}, "transformers")
    (matches, scores), own = theirs(), ours()
    same = own.matches0[0] == matches[0]
    away = float((own.matching_scores0[0] - scores[0])[same].abs().max())
    note = f"{float(same.float().mean()):.4f} of the keypoints with the same answer"
    yield Row("latency", "largest difference of the scores to transformers', N = 512", away, note=note)


def _difference(setting: Setting, batch, keypoints: int) -> Row:
    model = perturbed(setting.model()).eval()
    with torch.no_grad():
        ours, theirs = fuse_for_inference(model)(batch), plain.plain_from(model).to(setting.device)(batch)
    what = f"largest difference of log P to plain, N = {keypoints}"
    return Row("latency", what, largest(ours, theirs))


def transport(setting: Setting) -> Iterator[Row]:
    """Sinkhorn alone, forward and backward, T = 100, compared with autograd in the log domain."""
    for keypoints, pairs in ((512, 8), (1024, 4)):
        shape = (keypoints, pairs)
        name = f"Sinkhorn T = 100 forward + backward, N = {keypoints}, batch {pairs}"
        reason = setting.too_dear(pairs * 200 * 20.0 * keypoints**2, pairs * 3400.0 * keypoints**2)
        if reason:
            yield Row("sinkhorn", name, skipped=reason)
            continue
        ways = {"plain": sinkhorn_call(setting.device, "plain", *shape), "ours": None}
        ways["ours"] = sinkhorn_call(setting.device, "ours", *shape)
        yield from _ratio_rows("sinkhorn", name, setting.timed(ways, 2 * setting.seconds), pairs, {"ours": 10.0})


def sinkhorn_call(device: torch.device, way: str, keypoints: int, pairs: int, iterations: int = 100) -> Call:
    """A call of Sinkhorn on random scores in the range of a network."""
    generator = torch.Generator().manual_seed(0)
    scores = (torch.randn(pairs, keypoints, keypoints, generator=generator) * 5).to(device).requires_grad_()
    dustbin = torch.tensor(1.0, device=device, requires_grad=True)
    marginals = Marginals([keypoints] * pairs, [keypoints] * pairs, device)

    def call() -> None:
        scores.grad = None
        if way == "plain":
            total = plain.sinkhorn(scores, dustbin, iterations)[:, ::7, ::7].sum()
        elif device.type == "cpu":
            found = sinkhorn.log_optimal_transport(list(scores), dustbin, iterations)
            total = sum(P[::7, ::7].sum() for P in found)
        else:
            found, _ = sinkhorn.padded_optimal_transport(scores, marginals, dustbin, iterations)
            total = found[:, : keypoints + 1 : 7, : keypoints + 1 : 7].sum()
        total.backward()

    return call
