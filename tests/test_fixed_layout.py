"""Batches of fixed shapes: the same results as without padding, and what a capture needs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_matching import SIZE, records, related, scrambled

from pipeline.compat import grad_scaler
from pipeline.train import step_graphs
from pipeline.train.objective import MatchingObjective
from pipeline.train.step_graphs import StepGraphs
from superglue_sift.batch import Pair, PairBatch
from superglue_sift.network.fixed_layout import FixedLayout, size_of
from superglue_sift.network.superglue import SuperGlueConfig
from superglue_sift.sift import ORIENTED
from superglue_sift.torch_compat import can_compile
from superglue_sift.truth import _adjugate_inverse, _inverse

if not can_compile():
    pytest.skip("torch 1.10 captures nothing", allow_module_level=True)

CPU, META = torch.device("cpu"), torch.device("meta")
CONFIG = SuperGlueConfig(dim=16, layers=1, heads=2, neighbours=True, rotary=True, sinkhorn_iterations=5)
COUNTS = ((20, 33), (150, 30), (9, 4), (0, 12), (140, 200), (7, 0))
# Two parts, of 256 and 128 keypoints, for up to eight pairs.
FIXED = size_of([256, 200, 40, 40, 40, 40, 40, 0], 700, 256)


def oriented(rng, count: int) -> np.ndarray:
    """Made-up keypoints, every third with a second orientation."""
    made = np.zeros(count, ORIENTED)
    for name, column in ((name, records(rng, count)) for name in ("x", "y", "scale", "angle", "score", "descriptor")):
        made[name] = column[name]
    made["second_angle"][::3] = 17.0
    made["second_descriptor"][::3] = rng.integers(0, 200, (len(made[::3]), 128))
    return made


def batch_of(counts, seed: int = 0) -> PairBatch:
    rng = np.random.default_rng(seed)
    return related([Pair(oriented(rng, m), oriented(rng, n), SIZE, SIZE) for m, n in counts])


def objective_of(config: SuperGlueConfig = CONFIG, dtype: torch.dtype = torch.float32) -> MatchingObjective:
    return MatchingObjective(scrambled(config).to(dtype).train(), 3.0, 5.0)


def graphs_of(objective: MatchingObjective, sizes=(FIXED,), scaler=None) -> StepGraphs:
    return StepGraphs(objective, scaler or grad_scaler(False), sizes, ORIENTED.itemsize)


def padded(batch: PairBatch, size=FIXED):
    """The sorted batch with missing pairs and keypoints, and its layout: in new memory."""
    order = torch.maximum(batch.counts0, batch.counts1).sort(descending=True, stable=True)[1]
    pairs = len(size.widths)
    whole = step_graphs._empty_batch(pairs, size.width, ORIENTED.itemsize, torch.device("cpu"))
    for name in ("records0", "records1", "image_size0", "image_size1", "H_0to1"):
        source = getattr(batch, name)[order]
        target = getattr(whole, name)[: len(batch)]
        (target[:, : source.shape[1]] if name.startswith("records") else target).copy_(source)
    counts = torch.zeros((2, pairs), dtype=torch.int64)
    counts[0, : len(batch)], counts[1, : len(batch)] = batch.counts0[order], batch.counts1[order]
    return whole, FixedLayout(counts, size)


class TestLayout:
    @pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 2e-5)], ids=str)
    def test_loss_and_gradient_are_those_without_padding(self, dtype, tolerance):
        """Beyond rounding nothing depends on the padding: in float64 the difference is as small as float64 is."""
        objective, batch = objective_of(dtype=dtype), batch_of(COUNTS)
        total, values = objective(batch, False)
        expected = torch.autograd.grad(total, list(objective.parameters()))
        graphs = graphs_of(objective)
        found = graphs.add(batch, 1.0)
        for name, value in values.items():
            assert torch.allclose(found[name], value, atol=tolerance, rtol=tolerance), name
        flat = torch.cat([g.flatten() for g in expected])
        assert float((graphs.gradient - flat).norm()) <= tolerance * float(flat.norm())
        assert float(flat.norm()) > 0.1

    def test_a_view_that_fills_its_slot_and_sides_without_padding(self):
        """No filler has a token on side 0, and the largest view is as wide as the records."""
        counts = ((256, 100), (100, 128), (128, 128), (28, 8))
        size = size_of([256, 128, 128, 28], 512, 256)
        objective, batch = objective_of(), batch_of(counts)
        total, _ = objective(batch, False)
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(objective.parameters()))])
        graphs = graphs_of(objective, [size])
        assert int(batch.counts0.sum()) == size.tokens and graphs.add(batch, 1.0) is not None
        assert float((graphs.gradient - expected).norm()) <= 2e-5 * float(expected.norm())

    def test_every_token_belongs_to_a_sequence(self):
        """Kernels for packed sequences leave other rows unwritten: not a number, perhaps."""
        _, layout = padded(batch_of(COUNTS))
        starts, longest = layout.within.packing.starts, FIXED.width
        lengths = starts[1:] - starts[:-1]
        assert starts.dtype == torch.int32 and starts[0] == 0 and starts[-1] == 2 * FIXED.tokens
        assert int(lengths.max()) <= longest and int(lengths.min()) >= 0
        crossed = layout.between.partner_packing.starts
        half = len(lengths) // 2
        assert torch.equal(crossed[1:] - crossed[:-1], lengths.roll(half))
        assert layout.between.first_token == starts[half]

    def test_packed_attention_is_padded_attention(self, monkeypatch):
        """The form for half precision on a GPU, its kernel replaced by one call for each sequence."""
        from superglue_sift import torch_compat
        from superglue_sift.network.chunked_attention import scaled_dot_product_attention as attend

        def packed(q, k, v, starts, partner_starts, longest):
            out = torch.full_like(q, torch.nan)
            for i in range(len(starts) - 1):
                own, other = slice(*starts[i : i + 2].tolist()), slice(*partner_starts[i : i + 2].tolist())
                assert own.stop - own.start <= longest
                inputs = (t.transpose(0, 1).unsqueeze(0) for t in (q[own], k[other], v[other]))
                empty = other.stop == other.start
                out[own] = 0 if empty else attend(*inputs).squeeze(0).transpose(0, 1)
            return out

        objective = objective_of()
        graphs = graphs_of(objective)
        expected = graphs.add(batch_of(COUNTS), 1.0)["loss"], graphs.gradient.clone()
        monkeypatch.setattr(torch_compat, "has_packed_attention", lambda heads: True)
        monkeypatch.setattr(torch_compat, "packed_attention", packed)
        graphs.gradient.zero_()
        assert torch.allclose(graphs.add(batch_of(COUNTS), 1.0)["loss"], expected[0], atol=2e-5)
        assert float((graphs.gradient - expected[1]).norm()) <= 2e-5 * float(expected[1].norm())

    def test_the_inverse_of_a_gpu_is_the_same(self):
        H = torch.eye(3, dtype=torch.float64) + torch.randn(20, 3, 3, dtype=torch.float64) * 0.1
        assert torch.allclose(_adjugate_inverse(H), _inverse(H), rtol=1e-12, atol=1e-12)

    def test_a_batch_that_is_too_large_does_not_fit(self):
        fits = [FIXED.holds(torch.tensor(m), torch.tensor(n)) for m, n in (
            ([256, 256, 128], [1, 1, 1]), ([256, 129, 129], [1, 1, 1]), ([257], [1]), ([1] * 9, [1] * 9),
            ([256, 256, 128, 128, 128], [1] * 5), ([], []),
        )]  # fmt: skip
        assert fits == [True, False, False, False, False, True]


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    """The sequence of operators with the shapes of their tensors and all other arguments; data-dependent ones apart."""

    READING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "_unique2", "is_nonzero", "equal")

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        self.device = device
        self.called, self.reading = [], []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found = function(*arguments, **(keywords or {}))
        name = str(function).split(".")[1]
        tensors = []
        self._see(tensors, arguments), self._see(tensors, keywords or {}), self._see(tensors, found)
        self.called.append((str(function), tuple(tensors)))
        by_mask = name in ("index", "index_put", "index_put_") and any(
            t is not None and t.dtype == torch.bool for t in arguments[1]
        )
        moved = any(isinstance(t, torch.Tensor) and t.device != self.device and t.dim() for t in arguments)
        if name in self.READING or by_mask or moved:
            self.reading.append(name)
        return found

    def _see(self, seen: list, value) -> None:
        if isinstance(value, torch.Tensor):
            seen.append((tuple(value.shape), value.stride(), value.dtype))
        elif isinstance(value, dict):
            self._see(seen, tuple(sorted(value.items())))
        elif isinstance(value, (list, tuple)):
            for each in value:
                self._see(seen, each)
        else:
            seen.append(str(value))


def operators(run) -> Operators:
    with Operators() as seen:
        run()
    return seen


# Other counts of the same size.
OTHERS = ((3, 3), (0, 0), (250, 240), (128, 128), (1, 100))


class TestWhatACaptureNeeds:
    """No shape, no argument, no choice depends on the batch, and nothing is read on the host."""

    def test_two_batches_run_the_same_operators(self):
        objective = objective_of()
        graphs = graphs_of(objective)
        graphs.add(batch_of(COUNTS), 1.0)

        def fixed(counts):
            batch, layout = padded(batch_of(counts))
            counts = layout.counts
            return operators(
                lambda: step_graphs.backward(objective, batch, FixedLayout(counts, FIXED), grad_scaler(False), 1.0)
            )

        one, other = fixed(COUNTS), fixed(OTHERS)
        assert len(one.called) > 300 and one.called == other.called
        assert not one.reading

    def test_the_ragged_step_does_not(self):
        """Or the test above would show nothing."""
        objective = objective_of()
        one, other = (
            operators(lambda counts=counts: objective(batch_of(counts), False)[0].sum().backward())
            for counts in (COUNTS, OTHERS)
        )
        assert one.called != other.called

    @pytest.mark.parametrize(
        "read",
        [
            lambda t: t.sum().item(), lambda t: t.nonzero(), lambda t: t[t > 0], lambda t: t.masked_select(t > 0),
            lambda t: bool(t.sum() > 0), lambda t: t.unique(),
        ],
    )  # fmt: skip
    def test_a_read_is_seen(self, read):
        assert operators(lambda: read(torch.ones(3))).reading

    def test_nothing_comes_from_the_host(self):
        """On tensors without memory, where a read fails, the way of a GPU: no operator takes a tensor of the host."""
        from benchmarks.dev import launches

        objective = MatchingObjective(scrambled(CONFIG).to(META).train(), 3.0, 5.0)
        batch = step_graphs._empty_batch(8, 256, ORIENTED.itemsize, META)
        counts = torch.zeros((2, 8), dtype=torch.int64, device=META)

        def run(layout):
            with launches.a_gpu_s_way(launches.Launches(), "float32"), Operators(META) as seen:
                total, _ = objective(batch, False, layout)
                total.sum().backward()
            return seen

        assert not run(FixedLayout(counts, FIXED)).reading
        ragged = dataclasses.replace(batch, counts0=torch.tensor([9] * 8), counts1=torch.tensor([5] * 8))
        batch = ragged
        assert run(None).reading  # the ragged layout's indices come from the host
