"""Kernels that a training step launches on a GPU, by part: `python -m benchmarks.dev.launches [--precision bfloat16]`.

Counted without a GPU: a step on tensors of the device `meta`, which have shapes and no memory, takes a GPU's path
through the code, and a dispatch mode sees its operators. An operator counts as one launch, an operator over a list of
tensors as many as torch's kernel for lists needs; views and allocations count as none, a copy from the host as one.
Attention counts as one, as the fused kernels do. The Sinkhorn loops are counted without a CUDA graph; with `--captured`
they count as its replay, and with `--step-graph` so does the whole forward and backward pass (`--cuda-graph`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
from typing import Any, Callable, Counter, DefaultDict, Dict, Iterator, List, Optional, Sequence, Tuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import errors
from pipeline.compat import grad_scaler
from pipeline.train import objective as objectives
from pipeline.train import optimization, step, step_graphs
from pipeline.train.muon import Muon
from superglue_sift import torch_compat
from superglue_sift.batch import PairBatch
from superglue_sift.network import attention, orientation, sinkhorn, sinkhorn_kernel, superglue
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.sift import ORIENTED

META, RECORD = torch.device("meta"), ORIENTED.itemsize
NO_LAUNCH = (
    "view", "_unsafe_view", "_reshape_alias", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "slice",
    "select", "split", "split_with_sizes", "unbind", "detach", "alias", "as_strided", "diagonal", "lift_fresh", "empty",
    "empty_like", "empty_strided", "new_empty", "new_empty_strided",
)  # fmt: skip
# Tensors of each list that one launch of a kernel over 1, 2, ... lists takes (torch's MultiTensorApply.cuh).
TENSORS_OF_A_LAUNCH = (110, 64, 48, 36, 30)

# Parts of a step: (owner, function, name); calls of another part count there.
PARTS: Tuple[Tuple[Any, str, str], ...] = (
    (superglue, "choose_orientations", "orientation"),
    (SuperGlue, "encode", "encoder"),
    (superglue, "neighbour_features", "neighbours"),
    (SuperGlue, "matching_descriptors", "layers"),
    (SuperGlue, "transport", "transport"),
    (objectives, "ground_truth", "truth"),
    (objectives, "assignment_loss", "loss"),
    (Tensor, "backward", "backward"),
    (step, "_enqueued", "clip and metrics"),
)


class Launches(TorchDispatchMode):
    """Counts launches by part; a read from the device is an error, because `meta` tensors have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.part = "objective"
        self.by_part: DefaultDict[str, Counter[str]] = collections.defaultdict(collections.Counter)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found = function(*arguments, **(keywords or {}))
        first = _first(found)
        if first is None:
            first = _first(arguments)
        name = str(function).split(".")[1]
        if first is not None and first.device == META and name not in NO_LAUNCH:
            self.by_part[self.part][name] += _launches(name, arguments, found)
        return found

    @property
    def sums(self) -> Dict[str, int]:
        return {part: sum(counted.values()) for part, counted in self.by_part.items()}

    def replay(self) -> None:
        """Replay of a CUDA graph: one launch."""
        self.by_part[self.part]["replay"] += 1

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that its launches count for `part`."""

        def attributed(*arguments: Any, **keywords: Any) -> Any:
            before, self.part = self.part, part
            try:
                return function(*arguments, **keywords)
            finally:
                self.part = before

        return attributed


def _first(values: Any) -> Optional[Tensor]:
    while isinstance(values, (list, tuple)) and values:
        values = values[0]
    return values if isinstance(values, Tensor) else None


def _launches(name: str, arguments: Sequence[Any], found: Any) -> int:
    if not name.startswith("_foreach"):
        return 1
    lists = [each for each in (*arguments, found) if isinstance(each, (list, tuple)) and _first(each) is not None]
    return -(-len(lists[0]) // TENSORS_OF_A_LAUNCH[min(len(lists), len(TENSORS_OF_A_LAUNCH)) - 1])


class Autocast(TorchFunctionMode):
    """Autocast to bfloat16 for `meta`, which has none: as on a GPU, each weight is cast once."""

    PRODUCTS = (
        nn.functional.linear, torch.bmm, torch.mm, torch.addmm, torch.addmv, torch.baddbmm, torch.matmul, Tensor.matmul,
        Tensor.__matmul__,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.on = True
        self._cast: Dict[Tensor, Tensor] = {}

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        if self.on and any(function is each for each in self.PRODUCTS):
            arguments = tuple(self.cast(each) for each in arguments)
            keywords = {name: self.cast(each) for name, each in (keywords or {}).items()}
        elif self.on and function is nn.functional.layer_norm:
            arguments = (arguments[0].float(), *arguments[1:])
        return function(*arguments, **(keywords or {}))

    def cast(self, value: Any) -> Any:
        """A float32 tensor in bfloat16, a parameter's kept; anything else as it is."""
        if not (isinstance(value, Tensor) and value.dtype == torch.float32):
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(torch.bfloat16)
        if value not in self._cast:
            self._cast[value] = value.to(torch.bfloat16)
        return self._cast[value]

    @contextlib.contextmanager
    def off(self, kind: str) -> Iterator[None]:
        """Stand in for `no_autocast`."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    def forget(self) -> None:
        """Drop the cast weights, as torch does at the end of its context."""
        self._cast.clear()


class _Attention(torch.autograd.Function):
    """The shapes of attention, in one launch."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.zeros_like(q)

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v = ctx.saved_tensors
        return torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)


@contextlib.contextmanager
def a_gpu_s_way(counting: Launches, precision: str, captured: bool = False) -> Iterator[Autocast]:
    """Context in which `meta` stands for a GPU of this precision, with or without CUDA graphs; counts launches."""
    autocast = Autocast()
    half = precision != "float32"

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        return _Attention.apply(q, k, v)

    with contextlib.ExitStack() as stack:
        replace = lambda owner, name, value: stack.enter_context(mock.patch.object(owner, name, value))  # noqa: E731
        for module in (superglue, sinkhorn, orientation):
            replace(module, "no_autocast", autocast.off)
        replace(torch_compat, "cast_as_autocast", lambda x: autocast.cast(x) if half else x)
        replace(torch_compat, "has_packed_attention", lambda q: half)
        replace(torch_compat, "packed_attention", attend)
        replace(attention, "scaled_dot_product_attention", attend)
        if captured:
            replace(sinkhorn_kernel, "can_capture", lambda device: True)
            replace(sinkhorn_kernel, "capture_cuda_graph", lambda work, device: counting.replay)
            replace(sinkhorn_kernel, "_captured", collections.OrderedDict())
        replace(step_graphs, "capture_cuda_graph", lambda work, *_: (work(), counting.replay)[1])
        for owner, name, part in PARTS:
            replace(owner, name, counting.within(part, getattr(owner, name)))
        if half:
            stack.enter_context(autocast)
        stack.enter_context(counting)
        yield autocast


def batch_of(counts: Sequence[int]) -> PairBatch:
    """Pairs of views of `counts` keypoints each, on `meta`."""
    records = [torch.empty((len(counts), max(counts), RECORD), dtype=torch.uint8, device=META) for _ in "01"]
    sizes = [torch.empty((len(counts), 2), device=META) for _ in "01"]
    H = torch.empty((len(counts), 3, 3), dtype=torch.float64, device=META)
    return PairBatch(*records, torch.tensor(counts), torch.tensor(counts), *sizes, H)


def counted(
    counts: Sequence[int],
    precision: str = "float32",
    iterations: int = 30,
    captured: bool = False,
    step_graph: bool = False,
) -> Launches:
    """The launches of one step over a batch of these counts: D = 128, 9 + 9 layers, nearest neighbours, Muon.

    captured: of a step whose Sinkhorn loops were captured before; step_graph: forward and backward pass were.
    """
    model = SuperGlue(SuperGlueConfig(neighbours=True, sinkhorn_iterations=iterations)).to(META).train()
    objective = objectives.MatchingObjective(model, 3.0, 5.0)
    optimizer, scaler = Muon(model, lr=0.1), grad_scaler(False)
    average = optimization.MovingAverage(model, 0.9)
    batch, counting = batch_of(counts), Launches()
    host = batch.counts0, batch.counts1
    graphs = step_graphs.StepGraphs(objective, scaler, step_graphs.sizes_for([host]), RECORD) if step_graph else None
    with a_gpu_s_way(counting, precision, captured) as autocast:
        for _ in range(2):  # the first step creates the optimiser's state and the captures
            counting.by_part.clear()
            values: step.Values = {}
            if graphs:
                graphs.gradient.zero_()
            else:
                optimizer.zero_grad()
            step._backward(objective, batch, False, scaler, 1.0, values, graphs)
            autocast.forget()
            with autocast.off("meta"):
                step._enqueued(values, optimizer, scaler, 1.0)
                counting.within("Muon", optimizer.step)()
                counting.within("moving average", average.update)(model, 5)
    return counting


def ragged(pairs: int, most: int = 1024, least: int = 128) -> List[int]:
    """Counts spread log-uniformly, as `train.min_keypoints` draws them."""
    return np.geomspace(most, least, pairs).astype(int).tolist()


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.launches", description=__doc__.split("\n")[0])
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--keypoints", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=30, help="T, Sinkhorn iterations")
    parser.add_argument("--captured", action="store_true", help="transport's loops are CUDA graphs")
    parser.add_argument("--step-graph", action="store_true", help="forward and backward pass are a CUDA graph")
    parser.add_argument("--operators", action="store_true", help="also each operator of each part")
    options = parser.parse_args(argv)
    given = {"full": [options.keypoints] * options.pairs, "ragged": ragged(options.pairs, options.keypoints)}
    how = options.precision, options.iterations, options.captured, options.step_graph
    found = {name: counted(counts, *how) for name, counts in given.items()}
    names = list(dict.fromkeys(part for each in found.values() for part in each.sums))
    print(f"{'launches, ' + options.precision:24}" + "".join(f"{name:>8}" for name in found))
    for part in names:
        print(f"{part:24}" + "".join(f"{each.sums.get(part, 0):8}" for each in found.values()))
        if options.operators:
            print(f"    {dict(found['full'].by_part[part].most_common())}")
    print(f"{'all':24}" + "".join(f"{sum(each.sums.values()):8}" for each in found.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
