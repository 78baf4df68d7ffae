"""Rows of the network, ours compared with the plain one of `plain.py`: step, Sinkhorn, latency,
memory, parity.
"""

from __future__ import annotations

import copy
import gc
import math
import multiprocessing
import statistics
from typing import Any, Callable, Dict, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor, nn

from benchmarks import plain
from benchmarks.row import Row, Setting, compare
from pipeline import compat
from pipeline.train.objective import MatchingObjective
from pipeline.train.pairs.synthetic import make_batch
from superglue_sift import sinkhorn
from superglue_sift.superglue import SuperGlue, mutual_matches
from superglue_sift.truth import ground_truth
from superglue_sift.weights import fuse_for_inference

Call = Callable[[], object]
PRECISIONS = ("float32", "bfloat16")
MIB = 1 << 20
NOISE = 0.3  # of `perturb`: standard deviation on a weight, times the root of its number of inputs
SCALE = 1024.0  # factor on the loss, so that float16 does not round the gradient to zero


def forward_call(model: nn.Module, batch: Any) -> Call:
    """Log assignments without gradients."""
    model.eval()
    return torch.no_grad()(lambda: model(batch))


def training_call(model: nn.Module, batch: Any, precision: str = "float32") -> Call:
    """A training step with Adam: truth, loss, gradient, update. Works for our network and the plain
    one.
    """
    ours = isinstance(model, SuperGlue)
    objective = MatchingObjective(model, 3.0, 5.0, precision) if ours else None
    fused = compat.fused_adam() if ours else {}
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-4, **fused)

    def call() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = (
            objective(batch)[0]
            if objective
            else plain.dense_loss(model(batch), ground_truth(batch))
        )
        loss.sum().backward()
        optimizer.step()

    return call


def step(setting: Setting) -> Iterator[Row]:
    """A training step, compared with the plain network with our LayerNorm or the paper's BatchNorm:
    the faster one.
    """
    for keypoints, pairs in ((512, 2), (1024, 1)):
        batch = make_batch(keypoints, pairs).to(setting.device)
        ways: Dict[str, Call] = {}
        for norm in ("layer", "batch"):
            twin = plain.plain_from(setting.model(norm=norm)).to(setting.device)
            ways[f"plain network, {norm} norm"] = training_call(twin, batch)
        plains = list(ways)
        for precision in PRECISIONS:
            ways[precision] = training_call(setting.model(), batch, precision)
        taken = setting.time(ways)
        fastest = min(plains, key=lambda way: statistics.median(taken[way].wall))
        for precision in PRECISIONS:
            name = f"training step, N = {keypoints}, batch {pairs}, {precision}"
            yield compare(name, taken[precision], taken[fastest], fastest, pairs)


def latency(setting: Setting) -> Iterator[Row]:
    """One pair through the network, compared with the plain network of the same weights."""
    for keypoints in (512, 1024):
        batch = make_batch(keypoints, 1).to(setting.device)
        model = setting.model().eval()
        ways = {"plain": forward_call(plain.plain_from(model).to(setting.device), batch)}
        for precision in PRECISIONS:
            ways[precision] = forward_call(fuse_for_inference(model, precision), batch)
        taken = setting.time(ways)
        for precision in PRECISIONS:
            name = f"latency of a pair, N = {keypoints}, {precision}"
            yield compare(name, taken[precision], taken["plain"], "the plain network")


def transport(setting: Setting) -> Iterator[Row]:
    """Sinkhorn alone, T = 100, forward and backward, compared with autograd in the log domain."""
    for keypoints, pairs in ((512, 8), (1024, 4)):
        ways = {
            way: sinkhorn_call(str(setting.device), way, keypoints, pairs)
            for way in ("plain", "ours")
        }
        taken = setting.time(ways)
        name = f"Sinkhorn, forward and backward, N = {keypoints}, batch {pairs}"
        yield compare(name, taken["ours"], taken["plain"], "autograd in the log domain", pairs)


def sinkhorn_call(device: str, way: str, keypoints: int, pairs: int, iterations: int = 100) -> Call:
    """A call of Sinkhorn on random scores in the range of a network. Returns the gradient of the
    scores.
    """
    generator = torch.Generator().manual_seed(0)
    scores = (
        (torch.randn(pairs, keypoints, keypoints, generator=generator) * 5)
        .to(device)
        .requires_grad_()
    )
    dustbin = torch.tensor(1.0, device=device, requires_grad=True)

    def call() -> Tensor:
        scores.grad = None
        if way == "plain":
            found = plain.sinkhorn(scores, dustbin, iterations)
        else:
            full = torch.ones(scores.shape[:2], dtype=torch.bool, device=device)
            found, _ = sinkhorn.log_optimal_transport(scores, full, full, dustbin, iterations)
        sum(P[::7, ::7].sum() for P in found).backward()
        return scores.grad

    return call


def step_call(device: str, way: str, model: SuperGlue, keypoints: int, pairs: int) -> Call:
    """A call of a training step, after a small one."""
    twin = plain.plain_from(model).to(device) if way == "plain" else model.to(device)
    precision = "float32" if way == "plain" else way
    training_call(twin, make_batch(64, 1).to(device), precision)()
    return training_call(twin, make_batch(keypoints, pairs).to(device), precision)


def memory(setting: Setting) -> Iterator[Row]:
    """Peak memory of a training step and of Sinkhorn, ours and plain, each alone in a process."""
    works = [
        ("training step, N = 512, batch 4", step_call, (setting.model().cpu(), 512, 4), PRECISIONS),
        ("Sinkhorn, N = 512, batch 8", sinkhorn_call, (512, 8), ("ours",)),
    ]
    for name, work, arguments, ways in works:
        base = peak_mib(work, str(setting.device), "plain", *arguments)
        for way in ways:
            own = max(peak_mib(work, str(setting.device), way, *arguments), 0.1)
            yield Row(
                f"memory: {name}, {way}",
                own,
                "MiB",
                note=f"{base / own:.1f}x less than plain, {base:.0f} MiB",
            )


def peak_mib(work: Callable[..., Call], device: str, *arguments: Any) -> float:
    """MiB by which one call raises the memory in use at its peak, in a process of its own.

    Args:
        work: a module-level function; `work(device, *arguments)` prepares and returns the call to
            be measured.
    """
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    process = context.Process(target=_measure_peak, args=(answer, work, device, arguments))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the measuring process ended with {process.exitcode}")
    return answer.get()


def _measure_peak(answer: Any, work: Any, device: str, arguments: Any) -> None:
    torch.set_num_threads(1)
    call = work(device, *arguments)
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return answer.put((torch.cuda.max_memory_allocated() - before) / MIB)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark becomes the resident memory (Linux)
    before = _resident_kib("VmRSS")
    call()
    return answer.put((_resident_kib("VmHWM") - before) / 1024)


def _resident_kib(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))


class Answer(NamedTuple):
    """Log P of each pair, mutual matches (B, N), mean loss and flat gradient of a batch."""

    log_P: Sequence[Tensor]
    matches: Tensor
    loss: float
    gradient: Tensor


def parity(setting: Setting) -> Iterator[Row]:
    """Half precision under autocast compared with float32: matches, log P, loss and gradient."""
    batch = make_batch(512, 2).to(setting.device)
    model = perturb(setting.model())
    exact = answer(model, batch, "float32")
    for precision in ("bfloat16", "float16"):
        if precision == "float16" and setting.device.type == "cpu":
            yield Row("parity: float16", skipped="needs a GPU: its gradients are scaled there")
            continue
        found = answer(model, batch, precision)
        name = f"parity: {precision} to float32,"
        yield Row(f"{name} equal matches", equal(exact.matches, found.matches), "share")
        yield Row(f"{name} largest difference of log P", largest(exact.log_P, found.log_P))
        yield Row(f"{name} loss", abs(found.loss / exact.loss - 1), "of it")
        away = (found.gradient - exact.gradient).norm() / exact.gradient.norm()
        yield Row(f"{name} gradient", float(away), "of norm")


def perturb(model: SuperGlue) -> SuperGlue:
    """A copy with noise on its weights: the branches of an untrained network end in zeros, in any
    precision.
    """
    generator = torch.Generator().manual_seed(0)
    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            inputs = parameter.shape[1] if parameter.dim() > 1 else 100
            parameter.add_(noise * NOISE / math.sqrt(inputs))
    return made


def answer(model: SuperGlue, batch: Any, precision: str) -> Answer:
    """Compute the answer under autocast of `precision`, as in training."""
    model.eval().zero_grad(set_to_none=True)
    with torch.no_grad():
        (log_P,), _ = model.assign([batch], precision=precision)
    total, values = MatchingObjective(model, 3.0, 5.0, precision)(batch)
    (SCALE * total.sum()).backward()
    gradient = torch.cat([p.grad.double().flatten() for p in model.parameters()]) / SCALE
    matches = mutual_matches(log_P).matches0
    return Answer(log_P, matches, float(values["loss"].mean()), gradient)


def equal(a: Tensor, b: Tensor) -> float:
    """Fraction of the keypoints matched in either that have the same match in both; nan without
    any.
    """
    found = (a >= 0) | (b >= 0)
    return float((a[found] == b[found]).float().mean())


def largest(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Largest difference of log P."""
    return max(float((x - y).abs().max()) for x, y in zip(a, b))
