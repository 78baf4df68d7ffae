"""What a training asks of a GPU: captures, launches, waits. Counted without one, on tensors that have no memory."""

from __future__ import annotations

import collections
import contextlib

import numpy as np
import pytest
import torch
from test_matching import pair, related, scrambled

from pipeline.features.store import View
from pipeline.pairs.order import PairOrder, rank_slice
from pipeline.stack import grad_scaler
from pipeline.training import optimization, setup, step
from pipeline.training.muon import Muon
from pipeline.training.objective import MatchingObjective
from superglue_sift import orientation, sinkhorn, sinkhorn_kernel, superglue, torch_compat
from superglue_sift.batch import PairBatch
from superglue_sift.packing import size_class
from superglue_sift.sift import ORIENTED, extract
from superglue_sift.superglue import SuperGlue, SuperGlueConfig

META = torch.device("meta")
VIEW_OPS = (
    "view", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "detach", "alias", "unbind",
    "split_with_sizes",
)  # fmt: skip
VIEWS, KEYPOINTS = 4, 1024


@pytest.fixture(scope="module")
def views_of_photographs():
    """SIFT of VIEWS crops of each of some real photographs, at 512x384, at most KEYPOINTS."""
    import cv2
    from skimage import data

    found = []
    for name in ("coffee", "chelsea", "astronaut", "rocket", "camera", "immunohistochemistry"):
        image = getattr(data, name)()
        gray = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) if image.ndim == 3 else image
        height, width = gray.shape
        crops = (gray[view * height // 12 :, view * width // 12 :] for view in range(VIEWS))
        records = (extract(cv2.resize(crop, (512, 384)), KEYPOINTS) for crop in crops)
        found.append([View(r, np.eye(3), (512, 384)) for r in records])
    return found


def longest_views(views, train, batch, ranks, steps):
    """(M, N) of rank 0's padded batch at each step: the trainer's own order, and keypoints left out by its own rule."""
    order, augmentation = PairOrder(0, len(views), VIEWS), setup.augmentation(train)
    for number in range(steps):
        samples = order.step(number, batch * ranks)[rank_slice(batch * ranks, 0, ranks)]
        yield tuple(
            max(
                len(augmentation.apply(views[s.image][(s.view0, s.view1)[side]], s.seed, side).records) for s in samples
            )
            for side in (0, 1)
        )


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 16, 64])
def test_few_graphs_are_captured_over_an_epoch_of_ragged_batches(make_params, monkeypatch, views_of_photographs, batch):
    """Each capture holds up the device and all ranks: below 0.02 a step after 200 steps, and little memory kept."""
    if torch.__version__.startswith("1."):
        pytest.skip("torch 1.10 computes no torch.arange on the meta device")
    steps, now, captures, kept, done = 300, [0], [0] * 300, [0], set()

    def capture(work, device):
        captures[now[0]] += 1
        done.clear()
        return lambda: None

    monkeypatch.setattr(sinkhorn_kernel, "can_capture", lambda device: True)
    monkeypatch.setattr(sinkhorn_kernel, "capture_cuda_graph", capture)
    monkeypatch.setattr(sinkhorn_kernel, "_captured", collections.OrderedDict())
    monkeypatch.setattr(sinkhorn, "no_autocast", lambda kind: contextlib.nullcontext())
    train = make_params("train", keypoint_drop=0.3, window=1.0, turn_deg=0.0)
    sizes = list(longest_views(views_of_photographs, train, batch, ranks=2, steps=steps))
    for now[0], size in enumerate(sizes):
        if size in done:  # and nothing was captured since: it is still kept
            continue
        scores = torch.empty((batch, *size), device=META, requires_grad=True)
        counts = torch.empty(batch, dtype=torch.int64, device=META)
        dustbin = torch.tensor(1.0, device=META)
        log_P, _ = sinkhorn.padded_optimal_transport(scores, counts, counts, dustbin, 100)
        log_P.sum().backward()
        done.add(size)
        kept.append(sum(graph.size for graph in sinkhorn_kernel._captured.values()))
    assert len(set(sizes)) > 50  # or nothing is shown
    assert sum(captures) >= 2  # a loop and its gradient
    assert sum(captures[200:]) / (steps - 200) < 0.02
    assert max(kept) < sinkhorn_kernel.GRAPH_BYTES + 2 * sinkhorn.CHUNK_BYTES


def test_nothing_is_captured_where_nothing_is_learnt(monkeypatch):
    """Sizes of `match` and `evaluate` do not recur: a capture would cost more than it brings."""
    captures = []
    monkeypatch.setattr(sinkhorn_kernel, "can_capture", lambda device: True)
    monkeypatch.setattr(sinkhorn_kernel, "_capture", lambda *_: captures.append(1))
    scores = torch.randn(3, 20, 30, requires_grad=True)
    counts = torch.tensor([20, 20, 9]), torch.tensor([30, 30, 30])
    with torch.no_grad():
        assert sinkhorn.padded_optimal_transport(scores, *counts, torch.tensor(1.0), 5)[1].all()
    assert not captures


class Counting(torch.utils._python_dispatch.TorchDispatchMode if torch_compat.can_compile() else object):
    """Counts operators that launch a kernel; a copy to the host is an error, as `.item()` of such a tensor is."""

    def __init__(self):
        super().__init__()
        self.launches = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        first = arguments[0] if arguments else None
        if isinstance(first, (list, tuple)) and first:  # a `_foreach` operator is one launch for many tensors
            first = first[0]
        given = first.device if isinstance(first, torch.Tensor) else None
        found = function(*arguments, **(keywords or {}))
        if isinstance(found, torch.Tensor) and given == META:
            assert found.device == META, f"{function} copies to the host"
        name = str(function).split(".")[1]
        if name not in VIEW_OPS and given == META:
            self.launches[name] += 1
        return found


@pytest.fixture
def on_no_memory(monkeypatch):
    """A ragged or full batch and a network on `meta`, which takes a GPU's way through the code."""
    if not torch_compat.can_compile():
        pytest.skip("torch 1.10 has no dispatch modes")
    for module in (superglue, sinkhorn, orientation):
        monkeypatch.setattr(module, "no_autocast", lambda kind: contextlib.nullcontext())
    monkeypatch.setattr(torch_compat, "cast_as_autocast", lambda x: x)
    model = SuperGlue(SuperGlueConfig(neighbours=True)).to(META).train()

    def batch(counts):
        records = [
            torch.empty((len(counts), max(counts), ORIENTED.itemsize), dtype=torch.uint8, device=META) for _ in "01"
        ]
        sizes = [torch.empty((len(counts), 2), device=META) for _ in "01"]
        H = torch.empty((len(counts), 3, 3), dtype=torch.float64, device=META)
        return PairBatch(*records, torch.tensor(counts), torch.tensor(counts), *sizes, H)

    return MatchingObjective(model, 3.0, 5.0), batch


@pytest.mark.parametrize("counts", [[KEYPOINTS] * 64, [KEYPOINTS - 17 * i % 300 for i in range(64)]], ids=str)
def test_a_step_reads_nothing_back_until_its_figures(on_no_memory, counts):
    """Truth, loss, gradient, clipping, moving average: the host runs ahead of the device all through."""
    objective, batch = on_no_memory
    optimizer, scaler = torch.optim.SGD(objective.model.parameters(), lr=0.1), grad_scaler(False)
    average = optimization.MovingAverage(objective.model, 0.9)
    with Counting() as counting:
        values: step.Values = {}
        step._backward(objective, batch(counts), False, scaler, 1.0, values)
        _, figures = step._enqueued(values, optimizer, scaler, 1.0)
    assert figures.shape == (4,) and figures.device == META
    # all pairs of one size in one chunk, since nothing is captured: two products an iteration, forward and backward
    parts = len({size_class(count) for count in counts})
    assert counting.launches["bmm"] <= parts * 4 * 100 + 2 * 100
    assert sum(counting.launches.values()) < 3600 + 900 * parts
    with Counting() as counting:
        average.update(objective.model, 5)
    assert sum(counting.launches.values()) <= 1


def test_muon_steps_by_a_few_launches_for_each_shape(on_no_memory):
    """Not by several for each of the 203 parameters: those were 1,463, a third of a training step."""
    objective, _ = on_no_memory
    optimizer = Muon(objective.model, lr=0.1)
    for p in objective.model.parameters():
        p.grad = torch.empty_like(p)
    optimizer.step()  # makes the state
    with Counting() as counting:
        optimizer.step()
    assert sum(counting.launches.values()) <= 60


def test_a_device_is_asked_again_when_float32_cannot_hold_a_pair(monkeypatch):
    """Without waiting the gradient is nan; the second attempt waits, and does that pair alone in the log domain."""
    import numpy as np

    rng = np.random.default_rng(0)
    batch = related([pair(rng, *counts) for counts in ((20, 33), (25, 30), (9, 4))])
    gradients, seen, steps = [], [], []
    log_domain = sinkhorn._log_domain
    monkeypatch.setattr(sinkhorn, "_log_domain", lambda *problem: seen.append(1) or log_domain(*problem))
    for attempts in ((True,), (False, True)):
        model = scrambled(SuperGlueConfig(dim=32, layers=1, norm="batch")).train()
        with torch.no_grad():  # the scores of one pair lead by more than float32 holds
            model.final_projection.weight.mul_(6)
        objective = MatchingObjective(model, 3.0, 5.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monkeypatch.setattr(step, "_attempts", lambda device, attempts=attempts: attempts)
        steps.append(step.train_step(objective, optimizer, grad_scaler(False), [batch], 3, 1, 1.0))
        gradients.append(torch.cat([p.detach().flatten() for p in (*model.parameters(), *model.buffers())]))
    assert seen and all(done.applied for done in steps) and steps[0].sums == steps[1].sums
    assert torch.equal(*gradients)  # the running statistics moved once
