"""What a training asks of a GPU: captures, launches, waits. Counted without one, on tensors that have no memory."""

from __future__ import annotations

import collections
import contextlib

import numpy as np
import pytest
import torch
from test_matching import pair, related, scrambled

from pipeline.compat import grad_scaler
from pipeline.features.store import View
from pipeline.train import step
from pipeline.train.objective import MatchingObjective
from pipeline.train.pairs.augmentation import Augmentation
from pipeline.train.pairs.order import PairOrder, rank_slice
from superglue_sift import torch_compat
from superglue_sift.network import sinkhorn, sinkhorn_kernel
from superglue_sift.network.sinkhorn import Marginals
from superglue_sift.network.superglue import SuperGlueConfig
from superglue_sift.sift import extract

META = torch.device("meta")
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
    """(M, N) of rank 0's padded batch at each step: with the order and the keypoint drop of the trainer."""
    order, augmentation = PairOrder(0, len(views), VIEWS), Augmentation.of(train)
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
    """Each capture stalls the device and all ranks: fewer than 0.02 a step after 200 steps, and little memory."""
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
    train = make_params("train", keypoint_drop=0.3, window=1.0, rotation_deg=0.0)
    sizes = list(longest_views(views_of_photographs, train, batch, ranks=2, steps=steps))
    for now[0], size in enumerate(sizes):
        if size in done:  # and nothing was captured since: it is still kept
            continue
        scores = torch.empty((batch, *size), device=META, requires_grad=True)
        marginals = Marginals([1] * batch, [1] * batch, META)
        dustbin = torch.tensor(1.0, device=META)
        log_P, _ = sinkhorn.padded_optimal_transport(scores, marginals, dustbin, 100)
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
    marginals = Marginals([20, 20, 9], [30, 30, 30], torch.device("cpu"))
    with torch.no_grad():
        assert sinkhorn.padded_optimal_transport(scores, marginals, torch.tensor(1.0), 5)[1].all()
    assert not captures


# Launches of a step of 64 pairs of 1,024 keypoints, T = 30, before its parts were each done at once (by
# `python -m benchmarks.dev.launches` there).
BEFORE = {"float32": 3653, "bfloat16": 4143}


@pytest.fixture
def launches():
    if not torch_compat.can_compile():
        pytest.skip("torch 1.10 has no dispatch modes")
    from benchmarks.dev import launches

    return launches


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_step_takes_a_third_of_the_launches(launches, precision):
    """Network, truth, loss, gradient, clipping, Muon, moving average; nothing is read back before the metrics."""
    found = launches.counted([KEYPOINTS] * 64, precision).sums
    assert sum(found.values()) <= BEFORE[precision] / 3
    # each part at most; the loops of transport, 4 T, are of transport and of backward
    most = {"objective": 20, "truth": 55, "orientation": 25, "encoder": 45, "neighbours": 45, "layers": 240}
    most.update({"transport": 160, "loss": 40, "backward": 640, "clip and metrics": 20, "Muon": 60})
    most["moving average"] = 5
    assert set(found) == set(most) and all(found[part] <= limit for part, limit in most.items()), found


# With the loops of transport as CUDA graphs, and of views from 1,024 keypoints to 128: bfloat16.
CAPTURED_BEFORE = {"full": 5262, "ragged": 5926}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["full", "ragged"])
def test_a_captured_step_takes_a_third_of_the_launches(launches, shape):
    """Of ragged views, whose transport is done in eight parts, too."""
    counts = [KEYPOINTS] * 64 if shape == "full" else launches.ragged(64)
    found = launches.counted(counts, "bfloat16", captured=True).sums
    assert sum(found.values()) <= CAPTURED_BEFORE[shape] / 3


def test_a_read_from_the_device_is_an_error(launches):
    """Or the counts above would not show that a step reads nothing back."""
    with launches.Launches(), pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device=META).sum().item()


def test_lists_of_tensors_count_by_the_launches_of_their_kernel(launches):
    with launches.Launches() as counting:
        torch._foreach_mul_([torch.zeros(3, device=META) for _ in range(203)], 2.0)  # 110 tensors a launch
        torch._foreach_lerp_(*([torch.zeros(3, device=META) for _ in range(97)] for _ in "01"), 0.5)  # 64
    assert counting.by_part["objective"] == {"zeros": 203 + 2 * 97, "_foreach_mul_": 2, "_foreach_lerp_": 2}


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
