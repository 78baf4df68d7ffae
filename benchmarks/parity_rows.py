"""Rows of parity: half precision compared with float32, by matches, log P, loss and gradient.

Uses a perturbed network: the branches of an untrained one end in zeros and would show no difference.
"""

from __future__ import annotations

import copy
import math
from typing import Iterator, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from benchmarks.row import Row, Setting
from benchmarks.synthetic import made_batch
from pipeline.train.objective import MatchingObjective
from superglue_sift.network.inference import fuse_for_inference
from superglue_sift.network.superglue import SuperGlue, mutual_matches
from superglue_sift.torch_compat import autocast

NOISE = 0.3  # standard deviation of the noise on a weight, times the root of its number of inputs
SCALE = 1024.0  # factor on the loss, so that float16 does not round the gradient to zero


class Answer(NamedTuple):
    """Results of a batch: log P of each pair, mutual matches (B, N); in training, mean loss and flat gradient."""

    log_P: Sequence[Tensor]
    matches: Tensor
    loss: float = math.nan
    gradient: Optional[Tensor] = None


def parity(setting: Setting) -> Iterator[Row]:
    """Each half precision under autocast compared with float32, and bfloat16 as in `match`."""
    batch = made_batch(512, 2).to(setting.device)
    model = perturbed(setting.model())
    exact = answer(model, batch, "float32")
    for precision in ("bfloat16", "float16"):
        if precision == "float16" and setting.device.type == "cpu":
            yield Row("parity", precision, skipped="needs a GPU: its gradients are scaled there")
            continue
        yield from _rows(f"{precision}, autocast", exact, answer(model, batch, precision))
    with torch.no_grad():
        log_P = fuse_for_inference(model, "bfloat16")(batch)
    yield from _rows("bfloat16, fused", exact, Answer(log_P, _matches(log_P, batch)))


def _rows(name: str, exact: Answer, cast: Answer) -> Iterator[Row]:
    def row(what: str, value: float, unit: str = "", note: str = "") -> Row:
        return Row("parity", f"{name}: {what}, N = 512", value, unit, against="float32", note=note)

    found = int((exact.matches >= 0).sum())
    if found:
        yield row("equal matches", equal(exact.matches, cast.matches), "share", f"of {found} matches")
    else:
        yield Row("parity", f"{name}: equal matches", skipped="the network finds none")
    yield row("largest difference of log P", largest(exact.log_P, cast.log_P))
    if cast.gradient is not None:
        yield row("difference of the loss", abs(cast.loss - exact.loss) / exact.loss, "of the loss")
        off = float((cast.gradient - exact.gradient).norm() / exact.gradient.norm())
        note = f"cosine {cosine(exact.gradient, cast.gradient):.6f}"
        yield row("difference of the whole gradient", off, "of its norm", note)


def perturbed(model: SuperGlue, seed: int = 0) -> SuperGlue:
    """A copy with noise on its weights, the same each time."""
    generator = torch.Generator().manual_seed(seed)
    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            inputs = parameter.shape[1] if parameter.dim() > 1 else 100
            parameter.add_(noise * NOISE / math.sqrt(inputs))
    return made


def answer(model: SuperGlue, batch, precision: str) -> Answer:
    """Compute the answer under autocast of `precision`, as in training."""
    model.eval().zero_grad(set_to_none=True)
    with torch.no_grad(), autocast(batch.device.type, precision):
        log_P = model(batch)
    total, parts = MatchingObjective(model, 3.0, 5.0, precision)(batch)
    (SCALE * total.sum()).backward()
    gradient = torch.cat([p.grad.double().flatten() for p in model.parameters()]) / SCALE
    return Answer(log_P, _matches(log_P, batch), float(parts["loss"].mean()), gradient)


def _matches(log_P: Sequence[Tensor], batch) -> Tensor:
    """Index into view 1 or -1, (B, N)."""
    return mutual_matches(log_P, (batch.records0.shape[1], batch.records1.shape[1])).matches0


def equal(a: Tensor, b: Tensor) -> float:
    """Fraction of the keypoints matched in either that have the same match in both; nan without any."""
    found = (a >= 0) | (b >= 0)
    return float((a[found] == b[found]).float().mean())


def largest(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Largest difference of log P."""
    return max(float((x - y).abs().max()) for x, y in zip(a, b))


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine similarity of two flat gradients."""
    return float(a @ b / (a.norm() * b.norm()))
