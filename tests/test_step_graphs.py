"""`--cuda-graph`, without a GPU and on one where there is one."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from made_views import made_store
from processes import in_group
from test_fixed_layout import CONFIG, COUNTS, FIXED, OTHERS, batch_of, graphs_of, objective_of, padded
from test_matching import scrambled
from test_training import home, request_of, stop_after  # noqa: F401 (a fixture)

from pipeline.compat import grad_scaler
from pipeline.features.store import Store
from pipeline.processes import distributed
from pipeline.train import __main__ as train
from pipeline.train import step, step_graphs, trainer
from pipeline.train.objective import MatchingObjective
from pipeline.train.pairs.loader import load_batch, split_evenly
from pipeline.train.pairs.order import PairOrder
from pipeline.train.step_graphs import StepGraphs
from superglue_sift.network.fixed_layout import size_of
from superglue_sift.network.superglue import SuperGlueConfig
from superglue_sift.weights import load_model_file

NETWORK = SuperGlueConfig(sinkhorn_iterations=30)  # as in training


def test_a_step_takes_a_tenth_of_the_launches():
    """Those of ragged views are 1,960: what remains is copied, or is beside the graph."""
    from benchmarks.dev import launches

    found = launches.counted([256, 200, 100, 3], iterations=2, step_graph=True).sums
    assert set(found) == {"objective", "clip and metrics", "Muon", "moving average"}
    assert found["objective"] <= 20 and sum(found.values()) <= 110


class TestGraphs:
    def test_the_same_bits_as_without_a_graph(self):
        """In memory that holds the remains of a larger batch: the layout run once, in new memory."""
        graphs = graphs_of(objective_of())
        graphs.add(batch_of(OTHERS, seed=1), 0.5)
        for counts in (COUNTS, COUNTS[:2], ()):
            graphs.gradient.zero_()
            batch = batch_of(counts) if counts else dataclasses.replace(
                batch_of([(1, 1)]), **{name: value[:0] for name, value in vars(batch_of([(1, 1)])).items()}
            )  # fmt: skip
            found = graphs.add(batch, 0.5)
            objective = objective_of()
            alone = graphs_of(objective)  # only its buffer for gradients
            whole, layout = padded(batch)
            values = step_graphs.backward(objective, whole, layout, grad_scaler(False), 0.5)
            order = torch.maximum(batch.counts0, batch.counts1).sort(descending=True, stable=True)[1].argsort()
            assert torch.equal(graphs.gradient, alone.gradient)
            assert all(torch.equal(found[name], values[name][: len(batch)][order]) for name in values)
            assert not counts or float(graphs.gradient.norm()) > 0

    def test_gradients_add_up_and_the_capture_leaves_none(self):
        graphs, objective = graphs_of(objective_of()), objective_of()
        for counts in (COUNTS, OTHERS):
            graphs.add(batch_of(counts), 0.25)
        ((objective(batch_of(COUNTS))[0] + objective(batch_of(OTHERS))[0]).sum() * 0.25).backward()
        expected = torch.cat([p.grad.flatten() for p in objective.parameters()])
        assert float((graphs.gradient - expected).norm()) <= 2e-5 * float(expected.norm())

    def test_the_loss_is_scaled_for_float16(self):
        one, scaled = graphs_of(objective_of()), graphs_of(objective_of(), scaler=torch.amp.GradScaler("cpu", 1024.0))
        for graphs in (one, scaled):
            graphs.add(batch_of(COUNTS), 1.0)
        assert torch.equal(one.gradient * 1024, scaled.gradient)

    def test_the_smallest_size_that_holds_the_batch(self, monkeypatch):
        small = size_of([40] * 8, 300, 256)
        graphs, ran = graphs_of(objective_of(), [FIXED, small]), []
        inner = step_graphs.backward
        monkeypatch.setattr(step_graphs, "backward", lambda *given: ran.append(given[2].size) or inner(*given))
        assert graphs.add(batch_of([(257, 3)]), 1.0) is None and not ran  # fits none: not even captured
        for counts in (COUNTS, ((9, 4), (33, 20))):
            assert graphs.add(batch_of(counts), 1.0) is not None
        # the captures, then on a CPU each batch again
        assert ran[:2] == [FIXED, small] and ran[2:] == [FIXED, small]

    def test_where_a_capture_fails_the_step_runs_without_and_says_so_once(self, monkeypatch, capsys):
        def fails(work, device, memory):
            work()
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        monkeypatch.setattr(step_graphs, "capture_cuda_graph", fails)
        graphs = graphs_of(objective_of())
        assert [graphs.add(batch_of(COUNTS), 1.0) for _ in "12"] == [None, None]
        assert not graphs.gradient.any()
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == 1 and "operation not permitted" in printed[0] and "runs without" in printed[0]


def in_parts(batch_counts, parts):
    return [batch_of(batch_counts[i::parts], seed=i) for i in range(parts)]


class TestStep:
    @pytest.fixture(autouse=True)
    def as_on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(step, "_attempts", lambda device: (False, True))

    @pytest.mark.parametrize("sizes", [[FIXED], [size_of([40] * 8, 300, 256)]], ids=["all fit", "some do not"])
    @pytest.mark.parametrize("parts", [1, 4])  # of six pairs: uneven
    def test_the_weights_of_a_step_without(self, parts, sizes):
        weights = []
        for with_graphs in (True, False):
            objective = objective_of()
            graphs = graphs_of(objective, sizes) if with_graphs else None
            optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
            for _ in range(2):
                batches = in_parts(COUNTS, parts)
                done = step.train_step(objective, optimizer, grad_scaler(False), batches, 6, 1, 1.0, graphs)
                assert done.applied and done.sums["pairs"] == 6
            weights.append(torch.cat([p.detach().flatten() for p in objective.parameters()]))
        assert float((weights[0] - weights[1]).abs().max()) < 1e-5
        assert (
            float((weights[0] - torch.cat([p.detach().flatten() for p in objective_of().parameters()])).abs().max())
            > 1e-3
        )

    def test_a_pair_that_float32_cannot_hold_is_done_without(self):
        """The graph's gradient is nan; the second attempt has the pair in the log domain, as without graphs."""
        found, config = [], dataclasses.replace(CONFIG, sinkhorn_iterations=100)
        for with_graphs in (True, False):
            objective = objective_of(config)
            with torch.no_grad():
                objective.model.final_projection.weight.mul_(30)
            graphs = graphs_of(objective) if with_graphs else None
            if graphs:
                graphs.add(batch_of(COUNTS), 1.0)
                assert not torch.isfinite(graphs.gradient).all()  # or nothing is shown
            optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
            done = step.train_step(objective, optimizer, grad_scaler(False), in_parts(COUNTS, 1), 6, 1, 1.0, graphs)
            found.append((done.applied, done.sums, [p.detach().clone() for p in objective.parameters()]))
        assert found[0][0] and found[0][1] == found[1][1]
        assert all(torch.equal(one, other) for one, other in zip(found[0][2], found[1][2]))


def a_step_on_ranks(context, folder: str, shares: list, with_graphs: bool) -> np.ndarray:
    """All weights after two steps; rank r has `shares[r]` of the pairs, and only rank 0 a size that fits."""
    step._attempts = lambda device: (False, True)
    store = Store(folder)
    order = PairOrder(0, len(store), store.views_per_image)
    objective = objective_of()
    sizes = [size_of([128] * 8, 1024, 128) if context.rank == 0 else size_of([1], 1, 128)]
    graphs = StepGraphs(objective, grad_scaler(False), sizes, store.dtype.itemsize) if with_graphs else None
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    begin, pairs = sum(shares[: context.rank]), sum(shares)
    for number in range(2):
        own = order.step(number, pairs)[begin : begin + shares[context.rank]]
        batches = [load_batch(store, part, 48) for part in split_evenly(own, 2)]
        fit = [step_graphs.smallest(sizes, (batch.counts0, batch.counts1)) == 0 for batch in batches]
        assert context.rank or all(fit)
        assert step.train_step(
            objective, optimizer, grad_scaler(False), batches, pairs, context.world_size, 1.0, graphs
        ).applied
    return torch.cat([p.detach().flatten() for p in objective.parameters()]).numpy()


@pytest.mark.parametrize("shares", [[5, 2], pytest.param([3, 0, 4], marks=pytest.mark.slow)], ids=str)
def test_ranks_with_and_without_graphs_exchange_the_same(tmp_path, monkeypatch, shares):
    """Also uneven shares; each rank holds the same weights, to the bit."""
    monkeypatch.setattr(step, "_attempts", step._attempts)
    folder = str(made_store(tmp_path))
    parts = in_group(len(shares), a_step_on_ranks, folder, shares, True)
    whole = a_step_on_ranks(distributed.start(), folder, [sum(shares)], False)
    assert all(np.array_equal(part, parts[0]) for part in parts)
    assert np.abs(parts[0] - whole).max() < 1e-5


class TestSizes:
    @staticmethod
    def drawn(steps: int, pairs: int, seed: int):
        """Counts as `train.min_keypoints` 128 draws them, of views of 300 to 1,024 keypoints."""
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            wanted = np.exp(rng.uniform(np.log(128), np.log(1025), (2, pairs)))
            counts = torch.from_numpy(np.minimum(wanted, rng.uniform(300, 1400, (2, pairs)))).long()
            yield counts[0], counts[1]

    def test_padding_is_below_a_tenth_and_few_batches_fit_none(self):
        sizes = step_graphs.sizes_for(list(self.drawn(step_graphs.SAMPLED, 64, 0)))
        found = step_graphs.padding(sizes, list(self.drawn(100, 64, 1)), NETWORK)
        assert len(sizes) == step_graphs.SIZES and sizes[0].tokens == max(size.tokens for size in sizes)
        assert 0 < found.layers < 0.1 and found.missed < 0.1 and 0 < found.products < 1
        assert found.layers < found.total < 1.1 * found.layers  # which are most of the work

    def test_each_batch_is_held_by_the_largest(self):
        sampled = [*self.drawn(3, 8, 0), *self.drawn(3, 7, 1)]  # micro-batches of one pair more and less
        sizes = step_graphs.sizes_for(sampled)
        assert all(sizes[0].holds(*counts) for counts in sampled)
        assert {len(size.widths) for size in sizes} == {8} and {size.width for size in sizes} == {1024}

    def test_padding_of_a_batch_that_fills_its_size(self):
        full = torch.full((8,), 256)
        found = step_graphs.padding([size_of([256] * 8, 8 * 256, 256)], [(full, full), (full + 1, full)], NETWORK)
        assert found == (0.0, 0.0, 0.0, 0.5)

    def test_padding_counts_tokens_and_entries(self):
        """Half of the tokens: linear layers double; products of 128 instead of 64 keypoints are four times as many."""
        counts, wide = torch.full((8,), 64), SuperGlueConfig(dim=4096)
        found = step_graphs.padding([size_of([128] * 8, 8 * 128, 128)], [(counts, counts)], wide)
        assert found.layers == pytest.approx(1.0, rel=1e-3) and found.products == 3.0
        assert found.total == pytest.approx(found.layers, rel=1e-3)


class TestTraining:
    def test_a_stopped_run_ends_with_the_same_bytes(self, tmp_path, request_of, monkeypatch, capsys):  # noqa: F811
        """The sizes are those of the whole run, and the weights those of a run without graphs, up to rounding."""
        monkeypatch.setattr(step, "_attempts", lambda device: (False, True))
        monkeypatch.setattr(step_graphs, "impossible", lambda train, device: "")
        replayed = []
        add = StepGraphs.add
        monkeypatch.setattr(StepGraphs, "add", lambda self, *rest: replayed.append(add(self, *rest)) or replayed[-1])
        keys = {"cuda_graph": True, "accumulate": 3, "optimizer": "muon", "keypoint_drop": 0.3}
        assert train.main(request_of("whole", **keys)) == 0
        assert len(replayed) == 18 and all(values is not None for values in replayed)
        assert " sizes of step: " in capsys.readouterr().out
        with monkeypatch.context() as patch:
            stop_after(patch, 3)
            assert train.main(request_of("parts", **keys)) == 143
        assert train.main(request_of("parts", **keys)) == 0
        assert train.main(request_of("without", **{**keys, "cuda_graph": False})) == 0
        last = "step-00000006.safetensors"
        homes = {run: home(tmp_path / run) for run in ("whole", "parts", "without")}
        assert (homes["whole"] / last).read_bytes() == (homes["parts"] / last).read_bytes()
        one, other = (load_model_file(homes[run] / last)[0] for run in ("whole", "without"))
        weights = [name for name in one if name.startswith("model.")]
        assert max(float((one[name] - other[name]).abs().max()) for name in weights) < 2e-3  # Adam, see test_options
        assert float(torch.cat([(one[name] - other[name]).abs().flatten() for name in weights]).median()) < 1e-6

    def test_validation_alone_loads_no_steps(self, request_of, monkeypatch, capsys):  # noqa: F811
        monkeypatch.setattr(step_graphs, "impossible", lambda train, device: "")
        assert train.main(request_of("run")) == 0
        loaded = []
        monkeypatch.setattr(trainer.StepBatches, "_loaded", lambda _, step: loaded.append(step) or [])
        assert train.main([*request_of("run", cuda_graph=True), "--validate-only"]) == 0
        assert "best.safetensors: loss " in capsys.readouterr().out and not loaded

    def test_it_says_where_it_does_nothing(self, request_of, capsys):  # noqa: F811
        assert train.main(request_of("run", cuda_graph=True)) == 0
        assert "--cuda-graph does nothing here: it needs a GPU and torch 2" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "keys, why",
        [({}, ""), ({"norm": "batch"}, "train.norm: batch"), ({"compile": True}, "--compile"),
         ({"parallel": "dp"}, "--parallel dp")],
    )  # fmt: skip
    def test_what_it_does_not_go_with(self, make_params, monkeypatch, keys, why):
        monkeypatch.setattr(step_graphs, "can_capture", lambda device: True)
        assert why in step_graphs.impossible(make_params("train", **keys), torch.device("cpu"))
        assert why or not step_graphs.impossible(make_params("train", **keys), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_captured_step_has_the_bits_of_the_same_layout(precision):
    """On a GPU: each size captured in shared memory, replayed in turn, beside the layout run without a graph."""
    device = torch.device("cuda")
    sizes = [FIXED, size_of([40] * 8, 300, 256)]
    results = []
    for captured in (True, False):
        with contextlib.ExitStack() as stack:
            if not captured:
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                patch.setattr(step_graphs, "capture_cuda_graph", lambda work, device, memory: (work(), work)[1])
            model = scrambled(CONFIG).to(device).train()
            scaler = grad_scaler(precision == "float16")
            graphs = graphs_of(MatchingObjective(model, 3.0, 5.0, precision), sizes, scaler)
            found = []
            for counts in (COUNTS, ((9, 4), (33, 20)), OTHERS, COUNTS):
                graphs.gradient.zero_()
                values = graphs.add(batch_of(counts).to(device), 1.0)
                assert values is not None
                found += [graphs.gradient.clone(), values["loss"]]
            results.append(found)
    assert torch.equal(results[0][0], results[0][-2])  # the same batch again
    assert all(torch.equal(one, other) for one, other in zip(*results))
