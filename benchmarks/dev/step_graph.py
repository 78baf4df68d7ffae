"""A training step with and without `--cuda-graph`: `python -m benchmarks.dev.step_graph [--params FILE]`.

For batches of the training that FILE describes it prints how much padding the fixed sizes have, whether the gradient of
a graph has the bits of the same layout without one, how far it is from the gradient without padding, and the time of a
step each way. Without a GPU nothing is captured: the same code runs, and the time says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence
from unittest import mock

import torch
from torch import Tensor

from pipeline import errors
from pipeline.features.store import Store
from pipeline.parameters import params
from pipeline.processes import distributed
from pipeline.train import setup, step, step_graphs
from pipeline.train.step_graphs import Counts, StepGraphs
from pipeline.train.trainer import StepBatches
from superglue_sift.batch import PairBatch


class Way:
    """A training from its start; with graphs if there are `sampled` counts, captured or not."""

    def __init__(self, train: Any, store: Store, context: distributed.Context, sampled: Any = None) -> None:
        self.parts, _ = setup.build(train, context, store)
        self.pairs, self.graphs = train.batch, None
        if sampled:
            record = store.dtype.itemsize
            self.graphs, self.said = step_graphs.prepared(
                self.parts.objective, self.parts.state.scaler, sampled, record
            )

    def gradient(self, batch: PairBatch) -> Tensor:
        """(P,) of the mean loss of a batch, by the present weights."""
        if self.graphs:
            self.graphs.gradient.zero_()
            if self.graphs.add(batch, 1.0 / self.pairs) is not None:
                return self.graphs.gradient.clone()
        objective = self.parts.objective
        objective.zero_grad()
        (objective(batch, False)[0].sum() / self.pairs).backward()
        return torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])

    def step(self, batch: PairBatch) -> float:
        """Seconds of a step."""
        state, begun = self.parts.state, time.perf_counter()
        common = self.parts.objective, state.optimizer, state.scaler, [batch], self.pairs, 1, step.CLIP_NORM
        step.train_step(*common, self.graphs)  # the host has its metrics at the end: the device is done
        return time.perf_counter() - begun


def compared(train: Any, store: Store, context: distributed.Context, steps: int) -> List[str]:
    """The lines to print."""
    made, first = StepBatches(train, store, train.batch, context), step_graphs.SAMPLED
    sampled = [counts for number in range(first) for counts in made.counts(number)]
    batches = [batch.to(context.device) for number in range(first, first + steps) for batch in made.load(number)]
    ways = {name: Way(train, store, context, None if name == "without" else sampled)
            for name in ("graph", "layout", "without")}  # fmt: skip
    graphs: StepGraphs = ways["graph"].graphs
    lines = [ways["graph"].said, padding(sampled, [(b.counts0, b.counts1) for b in batches], train)]
    fits = next((b for b in batches if step_graphs.smallest(graphs.sizes, (b.counts0, b.counts1)) is not None), None)
    if fits is None:
        return [*lines, "no batch fits a size"]
    gradient = {name: run(way.gradient, fits, name) for name, way in ways.items()}
    away = (gradient["graph"] - gradient["without"]).norm() / gradient["without"].norm()
    seconds = {name: [run(way.step, batch, name) for batch in batches] for name, way in ways.items()}
    weights = [torch.cat([p.detach().flatten() for p in way.parts.state.model.parameters()]) for way in ways.values()]
    same = torch.equal(gradient["graph"], gradient["layout"]), torch.equal(weights[0], weights[1])
    lines.append(f"gradient {float(away):.1e} of its norm away from that without padding")
    on_gpu = context.device.type == "cuda"
    lines += [f"peak memory, all ways: {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"] if on_gpu else []
    ms = {name: 1000 * statistics.median(values[1:] or values) for name, values in seconds.items()}
    lines += [f"step, {name}: {value:.1f} ms" for name, value in ms.items()]
    faster = "faster" if ms["graph"] < ms["without"] else "SLOWER"
    bits = "the bits of the same layout" if all(same) else "NOT THE BITS of the same layout"
    how = "captured" if on_gpu and graphs.captured else "not captured"
    return [*lines, f"--cuda-graph ({how}): {ms['without'] / ms['graph']:.2f}x the speed, {faster}; {bits}"]


def padding(sampled: Sequence[Counts], others: Sequence[Counts], train: Any) -> str:
    """A line on the padding of `others` in the sizes for `sampled`."""
    found = step_graphs.padding(step_graphs.sizes_for(sampled), others, train)
    return (
        f"{len(others)} other batches: {100 * found.layers:.1f} % more work in the layers, "
        f"{100 * found.products:.1f} % in products of pairs of keypoints, {100 * found.total:.1f} % in all; "
        f"{100 * found.missed:.0f} % fit no size"
    )


def run(work: Callable[[PairBatch], Any], batch: PairBatch, name: str) -> Any:
    """`work(batch)` as on a GPU; only the way `graph` captures."""
    capture = step_graphs.capture_cuda_graph if name == "graph" else lambda work, *_: (work(), work)[1]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(step, "_attempts", lambda device: (False, True)))
        stack.enter_context(mock.patch.object(step_graphs, "capture_cuda_graph", capture))
        return work(batch)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dev.step_graph", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="its section `train`")
    parser.add_argument("--keypoints", type=Path, default=Path("data/keypoints"), help="folder of the stage keypoints")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=0, help="pairs of a step; 0: train.batch")
    parser.add_argument("--padding", action="store_true", help="only measure the padding; trains nothing")
    args = parser.parse_args(argv)
    train = params.load("train", args.params)
    train = train.model_copy(update={"accumulate": 1, "batch": args.batch or train.batch})
    store = Store(args.keypoints / "train", "sample")
    with distributed.process_group() as context:
        if args.padding:
            made, first = StepBatches(train, store, train.batch, context), step_graphs.SAMPLED
            counts = [counts for number in range(first + args.steps) for counts in made.counts(number)]
            print(padding(counts[:first], counts[first:], train))
        else:
            print(*compared(train, store, context, args.steps), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
