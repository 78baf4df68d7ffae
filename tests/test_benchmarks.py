"""The speed table: equal work on both sides, correct comparison with targets, rows that cannot run say why."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import re
import sys
import time

import cv2
import numpy as np
import pytest
import torch
from made_scenes import write_image_set
from test_matching import scrambled

from benchmarks import __main__ as benchmark
from benchmarks import (
    evaluation_rows,
    flops,
    gpu_rows,
    group_rows,
    memory,
    mode_rank,
    mode_rows,
    model_rows,
    parity_rows,
    peer,
    peer_rows,
    plain,
    row,
    stage_rows,
    table,
    timing,
    training_rows,
    transformers_module,
)
from benchmarks.row import Row, Setting
from benchmarks.synthetic import made_batch, made_store
from pipeline.errors import RequestError
from pipeline.features.store import Store
from pipeline.processes import distributed
from pipeline.train.objective import assignment_loss
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig, mutual_matches
from superglue_sift.truth import ground_truth


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """`timing` collects garbage before each round, which takes half a second among the objects of all tests."""
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)


SMALL = SuperGlueConfig(dim=16, layers=2, heads=2, sinkhorn_iterations=20)


def setting(**changes) -> Setting:
    given = {"rounds": 2, "seconds": 5.0, "keypoint_counts": (16, 32), "batches": (1, 2), **changes}
    return Setting(torch.device("cpu"), SMALL, **given)


class TestPlain:
    """Ours must equal the plain path: the table's ratios are worth nothing otherwise."""

    @pytest.mark.parametrize("norm", ["layer", "batch"])
    def test_assignment_loss_and_gradient_equal_ours(self, norm):
        model = scrambled(SuperGlueConfig(dim=32, layers=3, heads=4, norm=norm, sinkhorn_iterations=50)).double()
        twin = plain.plain_from(model).double()
        batch = made_batch(40, 3)
        truths = ground_truth(batch)
        ours, theirs = model(batch), twin(batch)
        assert max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs)) < 1e-9
        losses = assignment_loss(ours, truths).total.sum(), plain.dense_loss(theirs, truths).sum()
        assert float((losses[0] - losses[1]).detach().abs()) < 1e-9
        for loss in losses:
            loss.backward()
        pairs = [
            (model.dustbin.grad, twin.dustbin.grad),
            (model.final_projection.weight.grad, twin.final.weight.grad[..., 0]),
            (model.descriptor_projection.weight.grad, twin.projection.weight.grad[..., 0]),
            (model.self_attention[0].merge.weight.grad, twin.layers[0].merge.weight.grad[..., 0]),
            (model.cross_attention[2].mlp[0].weight.grad, twin.layers[5].mlp[0].weight.grad[..., 0]),
        ]
        for ours_grad, theirs_grad in pairs:
            assert torch.allclose(ours_grad, theirs_grad, atol=1e-9, rtol=1e-7)

    def test_the_loss_in_float32_stays_within_1e_5(self):
        model = scrambled(SuperGlueConfig(dim=32, layers=3, heads=4))
        batch = made_batch(60, 2)
        truths = ground_truth(batch)
        with torch.no_grad():
            ours = assignment_loss(model(batch), truths).total
            theirs = plain.dense_loss(plain.plain_from(model)(batch), truths)
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)

    def test_its_layer_norm_leaves_nothing_to_copy(self):
        """Handed on transposed it costs a layer 1.05 times as much."""
        assert plain.ChannelNorm(6)(torch.rand(2, 6, 5)).is_contiguous()

    @pytest.mark.parametrize("cheaper", ["LayerNorm", "BatchNorm"])
    def test_a_step_is_compared_with_the_cheaper_norm(self, cheaper, monkeypatch):
        def timed(_, ways, seconds):
            assert sorted(ways) == ["bfloat16", "float32", "plain with BatchNorm", "plain with LayerNorm"]
            costs = {"float32": 1.0, "bfloat16": 0.5, f"plain with {cheaper}": 2.0}
            return {way: timing.Seconds([costs.get(way, 3.0)] * 2, [1.0] * 2) for way in ways}

        monkeypatch.setattr(Setting, "timed", timed)
        rows = list(model_rows.against_plain(setting(seconds=1e3)))
        assert [each.ratio.value for each in rows] == [2.0, 4.0] * 2
        assert all(each.against.startswith(f"plain with {cheaper} (the cheaper norm), ") for each in rows)
        assert [each.target for each in rows] == [1.4, 2.2, 2.0, 2.2]

    def test_the_module_of_transformers_gives_the_same_matches(self):
        config = SuperGlueConfig(dim=64, layers=3, heads=4, norm="batch", scale_angle=False, sinkhorn_iterations=50)
        model, batch = scrambled(config).eval(), made_batch(80, 1)
        try:
            matches, scores = transformers_module.matching_call(model, batch)()
        except ImportError as error:
            pytest.skip(f"transformers cannot be imported: {error}")
        with torch.no_grad():
            ours = mutual_matches(model(batch), (80, 80), 0.0)
        assert torch.equal(ours.matches0[0], matches[0]) and torch.equal(ours.matches1[0], matches[1])
        assert (matches[0] >= 0).sum() > 10
        assert torch.allclose(ours.matching_scores0[0], scores[0], atol=1e-5)


class TestTiming:
    def test_every_way_has_equally_many_rounds_in_turns(self):
        order = []
        taken = timing.interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
        assert order == list("ab" + "abbaab")
        assert all(len(each.wall) == len(each.cpu) == 3 for each in taken.values())

    def test_two_rounds_are_made_whatever_they_cost(self):
        taken = timing.interleaved({"a": lambda: sum(range(200_000))}, rounds=9, seconds=0.0)
        assert len(taken["a"].wall) == 2

    def test_the_interval_holds_the_ratio(self):
        random = np.random.default_rng(0)
        fast = random.uniform(1, 1.1, 15)
        found = timing.speed_up(3 * fast * random.uniform(0.98, 1.02, 15), fast)
        assert found.low <= found.value <= found.high and found.low > 2.9 and found.high < 3.1

    @pytest.mark.parametrize(("target", "met"), [(2.0, "yes"), (3.0, "near"), (4.0, "no"), (None, "")])
    def test_a_target_is_met_when_the_interval_reaches_it(self, target, met):
        assert Row("g", "w", 1.0, "s", timing.Ratio(3.0, 2.5, 3.5), target=target).met == met


class TestCounts:
    def test_operations_of_the_paper_size(self):
        """performance: 24.2 + 9.7 GFLOP at D = 256, N = 512."""
        counted = flops.forward_flops(SuperGlueConfig(dim=256), 512)
        assert counted["linear"] == pytest.approx(24.2e9, rel=0.01)
        assert counted["attention"] == pytest.approx(9.7e9, rel=0.01)

    def test_a_peak_says_which_it_is_and_what_a_product_reaches(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
        monkeypatch.setattr(flops, "gpu_rate", lambda *_: 790e12)
        rate, source = flops.peak(torch.device("cuda"), "bfloat16")
        assert rate == 989e12
        assert source == "of 989 TFLOP/s, data sheet of H200; a matrix product reaches 80%"
        monkeypatch.setattr(flops, "measured_rate", lambda _: 1e11)
        assert flops.peak(torch.device("cpu"), "float32") == (1e11, "of a measured matrix product")


class TestRows:
    @pytest.mark.slow
    def test_the_grid(self):
        rows = list(model_rows.grid(setting()))
        assert len(rows) == 8 and all(each.value > 0 for each in rows)

    def test_a_row_that_is_too_dear_says_so(self):
        rows = list(model_rows.grid(setting(rate=1.0)))
        assert all("--seconds" in each.skipped for each in rows)
        assert "GiB" in setting().too_dear(0.0, 1e18)

    def test_sinkhorn_ways_have_the_same_gradient(self):
        calls = {way: model_rows.sinkhorn_call(torch.device("cpu"), way, 20, 2) for way in ("plain", "ours")}
        gradients = []
        for call in calls.values():
            call()
            gradients.append(next(c.cell_contents for c in call.__closure__ if torch.is_tensor(c.cell_contents)
                                  and c.cell_contents.dim() == 3).grad)  # fmt: skip
        assert torch.allclose(*gradients, atol=1e-5)

    def test_the_peers_work_trains(self, photo):
        training = peer.PeerTraining([photo], 30, torch.device("cpu"))
        assert math.isfinite(training()) and len(training.seen) == 2

    @pytest.mark.slow
    def test_peak_memory(self):
        few, many = (memory.peak_mib(_allocate, "cpu", mib) for mib in (10, 100))
        assert few < 40 < 90 < many < 140

    @pytest.mark.slow
    def test_rows_of_a_gpu(self, monkeypatch):
        """Every row that a GPU fills, on what there is: so that they run where nobody has tried them."""
        monkeypatch.setattr(gpu_rows, "GOALS", {16: 1.0})
        monkeypatch.setattr(gpu_rows, "BATCH", 2)
        found = list(gpu_rows.rows(setting(seconds=0.1)))
        names = [each.what for each in found]
        assert names[0].startswith("training, bfloat16") and found[0].target == 1.0 and found[0].met
        for what in ("training, ragged", "Sinkhorn of the step", "waits of the host"):
            assert sum(name.startswith(what) for name in names) == 1
        assert sum(name.startswith("latency") for name in names) == 4
        skipped = {each.what for each in found if each.skipped}
        assert skipped == {"attention, packed"}
        assert all(each.value > 0 for each in found if not each.skipped and "waits" not in each.what)

    def test_the_peers_work_is_skipped_where_it_outlasts_the_budget(self, tmp_path, photo, monkeypatch):
        images = write_image_set(tmp_path / "images", {"a.png": photo}, "train")
        monkeypatch.setattr(peer.PeerTraining, "__call__", lambda self: time.sleep(0.05))
        found = list(peer_rows.peer(setting(images=images, seconds=0.01)))
        assert [bool(row.skipped) for row in found] == [True, True]
        assert "--seconds 1 runs it" in found[0].skipped

    @pytest.mark.slow
    def test_a_group_of_ranks_steps_at_the_same_time_as_the_peer(self, tmp_path):
        kept = made_store(tmp_path / "store", 20, images=16)
        changes = {"dim": 32, "sinkhorn_iterations": 5, "precision": "float32"}
        group = group_rows.training_group(setting(), kept, 20, 4, changes, processes=2)
        try:
            group(), group()
        finally:
            group.close()
        assert group.items == 4 and [rank.returncode for rank in group.ranks.all] == [0, 0]

    def test_training_rows_heed_the_limit_of_keypoints(self, tmp_path):
        store = Store(made_store(tmp_path / "store", 40, images=8))
        for limit in (40, 25):
            (batch,) = training_rows.Trainer(setting(), store, 2, keypoints=limit).loaded()
            assert batch.counts0.tolist() == [limit] * 2

    def test_fraction_of_equal_matches(self):
        a, b = torch.tensor([1, -1, 2, -1]), torch.tensor([1, -1, 3, 0])
        assert parity_rows.equal(a, b) == pytest.approx(1 / 3)

    def test_parity_compares_layers_that_do_something(self):
        """An untrained network's branches are zero in every precision; float16 says why a CPU leaves it out."""
        wide = dataclasses.replace(setting(), config=SuperGlueConfig(dim=128, layers=1, sinkhorn_iterations=20))
        found = {each.what: each for each in parity_rows.parity(wide)}
        assert "GPU" in found.pop("float16").skipped and len(found) == 6
        values = {what.split(", N")[0]: each.value for what, each in found.items()}
        assert 0.5 < values["bfloat16, autocast: equal matches"] <= 1
        assert 0 < values["bfloat16, autocast: difference of the loss"] < 0.1
        assert 1e-3 < values["bfloat16, autocast: difference of the whole gradient"] < 0.1
        for way in ("autocast", "fused"):
            assert 0.01 < values[f"bfloat16, {way}: largest difference of log P"] < 1

    def test_the_perturbed_network_uses_every_weight(self):
        model = parity_rows.perturbed(setting().model())
        answer = parity_rows.answer(model, made_batch(30, 2), "float32")
        moving = [bool(p.grad.abs().sum() > 0) for name, p in model.named_parameters() if "bias" not in name]
        assert all(moving) and not torch.equal(model.dustbin, setting().model().dustbin)
        assert answer.gradient.dtype == torch.float64 and answer.loss > 0

    def test_the_plain_network_refuses_weights_that_it_has_not(self):
        with pytest.raises(ValueError, match="has no rotary"):
            plain.plain_from(SuperGlue(SuperGlueConfig(dim=32, layers=1, rotary=True)))

    def test_the_difference_to_plain_is_taken_where_layers_do_something(self, monkeypatch):
        seen = []
        inner = plain.plain_from
        monkeypatch.setattr(model_rows.plain, "plain_from", lambda model: seen.append(model) or inner(model))
        difference = model_rows._difference(setting(), made_batch(30, 1), 30)
        assert 0 < difference.value < 1e-3
        assert all(bool((layer.mlp[-1].weight != 0).any()) for layer in seen[0].self_attention)


def _allocate(device: str, mib: int):
    return lambda: torch.ones(mib << 18).sum()


class TestTable:
    def test_it_is_printed_written_and_a_failing_group_costs_itself_alone(self, tmp_path, monkeypatch, capsys):
        def good(_):
            yield Row("a", "one", 1.5, "ms", timing.Ratio(2.0, 1.5, 2.5), target=1.4, against="plain")
            yield Row("a", "two", skipped="no such device")

        def bad(_):
            raise RuntimeError("out of memory\nand more")
            yield

        monkeypatch.setattr(table, "groups", lambda: {"good": good, "bad": bad})
        arguments = ["--no-tracking", "--device", "cpu", "--out", str(tmp_path)]
        assert benchmark.main(arguments) == 0
        printed = capsys.readouterr().out
        assert "2.00x [1.50, 2.50]" in printed and "target 1.4: yes" in printed
        assert "SKIP       no such device" in printed and "failed: RuntimeError: out of memory\n" in printed
        held = json.loads((tmp_path / "table.json").read_text())
        assert held["rows"][0]["ratio_low"] == 1.5 and held["machine"]["network"]["dim"] == 128
        with open(tmp_path / "table.csv") as file:
            lines = list(csv.DictReader(file))
        assert [line["skipped"][-14:] for line in lines[:3]] == ["", "no such device", " out of memory"]

    def test_it_goes_to_the_tracking_server(self, tmp_path, monkeypatch):
        logged = {}

        class Log:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                logged["closed"] = True

            def log(self, metrics, step):
                logged.update(metrics)

            def artifact(self, path, folder=""):
                logged.setdefault("files", []).append(path)

        monkeypatch.setattr("pipeline.tracking.open_run", lambda *_, **__: Log())
        table.track([Row("a", "N = 512: ours", 1.0)], {}, tmp_path, ["f"])
        assert logged == {"a/N   512  ours": 1.0, "files": ["f"], "closed": True}

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [(["--only", "nothing"], "no such group"), (["--seconds", "0"], "--seconds"), (["--dim", "7"], "--dim")],
    )
    def test_wrong_requests_are_named(self, arguments, said):
        with pytest.raises(RequestError, match=said):
            benchmark.main([*arguments, "--device", "cpu", "--no-tracking"])

    def test_load_is_printed(self):
        assert "cores" in row.load()
        assert dataclasses.asdict(Row("a", "b"))["skipped"] == ""


class TestRanks:
    def ranks(self, code):
        return setting(), [sys.executable, "-c", f"import os, sys, time; rank = int(os.environ['RANK']); {code}"]

    def test_a_rank_that_dies_takes_the_others_along_and_is_named(self):
        with pytest.raises(RuntimeError, match="rank 1 ended with 3, of 3 ranks"):
            group_rows.in_processes(*self.ranks("sys.exit(3) if rank == 1 else time.sleep(3600)"), 3, 1)
        said = group_rows.in_processes(*self.ranks("print(rank)"), 2, 1)
        assert said == "0\n"

    def test_so_does_one_next_to_the_peer_while_nobody_asks_for_a_step(self):
        group = group_rows.Group.__new__(group_rows.Group)
        code = "print('ready', flush=True); sys.stdin.readline(); print('ready', flush=True); time.sleep(60)"
        group.ranks = group_rows.Ranks(*self.ranks(code), 2, 1)
        group._answered(), group()
        group.ranks.all[1].kill()
        with pytest.raises(RuntimeError, match="rank 1 ended with -9, of 2 ranks"):
            group()
        group.close()

    def test_idle_ranks_next_to_the_peer_wait_for_their_own_input(self, tmp_path, monkeypatch, capsys):
        """Not in a collective, which would work on the GPU of the group that is timed."""
        context = distributed.Context(1, 2, 1, torch.device("cpu"))
        monkeypatch.setattr(distributed, "process_group", lambda: contextlib.nullcontext(context))
        monkeypatch.setattr(distributed, "broadcast", lambda _: pytest.fail("waits in a collective"))
        steps = []
        monkeypatch.setattr(mode_rank, "Trainer", lambda *_, **__: lambda: steps.append(1))
        monkeypatch.setattr("sys.stdin", io.StringIO("step\n" * 3))
        kept = made_store(tmp_path / "store", 20, images=2)
        given = {"store": kept, "params": "p", "config": "{}", "keypoints": 20, "pairs": 2, "changes": "{}"}
        arguments = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        assert mode_rank.main(arguments) == 0 and len(steps) == 3 and capsys.readouterr().out == ""

    @pytest.mark.parametrize(("device", "sharing"), [("cpu", (1, 2, 4, 8)), ("cuda", (1, 1, 1, 1))])
    def test_ranks_share_a_cpus_memory_and_have_a_gpu_each(self, device, sharing, monkeypatch):
        asked = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(group_rows.os, "cpu_count", lambda: 8)
        monkeypatch.setattr(Setting, "too_dear", lambda self, _, memory, **__: asked.append(memory) or "dear")
        assert all(each.skipped for each in group_rows.groups(Setting(torch.device(device), SMALL)))
        one = row.activation_bytes(SMALL, 512, 64 if device == "cuda" else 2)
        assert asked == [ranks * one for ranks in sharing]

    def test_the_step_of_several_processes_compared_with_that_of_one(self, monkeypatch):
        monkeypatch.setattr(group_rows.os, "cpu_count", lambda: 4)
        monkeypatch.setattr(group_rows, "step_seconds", lambda _, processes, __: [[float(processes)] * 3, [1.0] * 3])
        found = [each for each in group_rows.groups(setting()) if not each.skipped]
        assert [each.value for each in found] == [2.0] * 3  # two pairs each, in as many seconds as processes
        assert [each.target for each in found] == [None, 0.95, 0.95]


class TestModes:
    @pytest.fixture
    def small(self, monkeypatch):
        monkeypatch.setattr(mode_rows, "KEYPOINTS", 24)
        monkeypatch.setattr(mode_rows, "DECODED", 3)

    @pytest.mark.slow  # starts eight processes
    def test_each_mode_compared_with_plain_and_one_that_fails_costs_its_own_row(self, small, monkeypatch):
        wrong = {"weights that are not there": mode_rows.Mode({"init_from": "nothing.safetensors"})}
        right = {"gradient accumulation": mode_rows.Mode({"accumulate": 2})}
        monkeypatch.setattr(mode_rows, "modes", lambda _: {**wrong, **right})
        quick = setting(seconds=0.1, rounds=2)
        found = {each.what: each for rows in (mode_rows.training, mode_rows.decoders) for each in rows(quick)}
        plain_row, parts = found[mode_rows.PLAIN], found["gradient accumulation"]
        assert plain_row.unit == parts.unit == "pairs/s"
        assert parts.ratio.value > 0 and not parts.skipped
        said = found["weights that are not there"].skipped
        assert "rank 0 ended with 1" in said and "nothing.safetensors" in said
        opencv = found["decoder: OpenCV, one thread"]
        assert opencv.unit == "images/s" and opencv.value > 0
        for name in ("torchvision, one thread", "DALI, two threads"):
            row = found[f"decoder: {name}"]
            assert row.value or "install" in row.skipped

    def test_what_cannot_run_says_why_before_it_starts(self, monkeypatch):
        monkeypatch.setattr(mode_rows, "places", lambda _: 1)
        monkeypatch.setattr(mode_rows.compat, "no_compiler", lambda _: "no compiler")
        here = Setting(torch.device("cpu"), SMALL)
        reasons = {name: mode_rows._reason(here, mode) for name, mode in mode_rows.modes(here).items()}
        assert reasons["DataParallel"] == "needs two GPUs"
        assert reasons["DDP, 2 processes"] == "needs 2 cores, there is 1"
        assert reasons["torch.compile"] == "no compiler" and "needs a GPU" in reasons["AMP, float16"]
        assert reasons["DDP, 1 process"] == reasons["gradient accumulation, 2 parts"] == ""

    def test_a_mode_short_of_memory_names_it(self):
        code = "import sys; print('ready', flush=True); sys.stdin.readline(); raise MemoryError('at 80 GiB')"
        group = group_rows.Group(setting(), [sys.executable, "-c", code], 1, 1, 1, "pairs/s")
        with pytest.raises(RuntimeError, match="rank 0 ended with 1, of 1 ranks: MemoryError: at 80 GiB"):
            group()

    def test_the_chart_has_a_bar_for_each_row_that_ran(self, tmp_path):
        rows = [
            Row("modes", "plain", 2.0, "pairs/s"),
            Row("modes", "DDP", skipped="one core"),
            Row("step", "x", 1.0, "ms"),
        ]
        file = table.chart(rows, tmp_path)
        assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert table.chart(rows[1:], tmp_path) is None

    def test_a_table_of_another_run_is_not_replaced_unasked(self, tmp_path, monkeypatch):
        monkeypatch.setattr(table, "groups", lambda: {"good": lambda _: iter([Row("a", "one", 1.0)])})
        arguments = ["--no-tracking", "--device", "cpu", "--out", str(tmp_path)]
        assert benchmark.main(arguments) == 0
        before = (tmp_path / "table.json").read_bytes()
        with pytest.raises(RequestError, match="--replace"):
            benchmark.main(arguments)
        assert (tmp_path / "table.json").read_bytes() == before
        assert benchmark.main([*arguments, "--replace"]) == 0


class TestStages:
    def test_loaders_that_work_ahead_train_like_the_one_that_does_not(self, tmp_path):
        """Two steps from the same weights; the synthetic one has other pairs."""
        store = Store(made_store(tmp_path / "store", 30, images=8))
        with contextlib.ExitStack() as stack:
            ways = training_rows._ahead(setting(), store, 4, stack)
            torch.manual_seed(0)
            ways["no loader"] = training_rows.Trainer(setting(), store, 4)
            for way in ways.values():
                way(), way()
            weights = {name: [p.detach() for p in way.parts.ddp_model.parameters()] for name, way in ways.items()}
        synthetic = weights.pop("synthetic loader")
        assert all(torch.equal(a, b) for own in weights.values() for a, b in zip(own, weights["no loader"]))
        assert not all(torch.equal(a, b) for a, b in zip(synthetic, weights["no loader"]))

    def test_loaders_are_compared_by_pairs_a_second(self, monkeypatch):
        monkeypatch.setattr(training_rows, "KEYPOINTS", 40)
        monkeypatch.setattr(training_rows, "DRAWN", 2)
        found = {each.what.split(", N")[0]: each for each in training_rows.loader(setting(seconds=0.1))}
        rows = [found.get(f"{name} alone") for name in training_rows.LOADERS]
        assert [each.unit for each in rows] == ["pairs/s"] * 2 and rows[1].ratio.value > 0
        assert rows[1].against.startswith("plain loader")

    def test_what_params_say_does_not_change_the_rows_of_training(self, tmp_path, make_params, monkeypatch):
        odd = {"checkpoint_layers": True, "ema": 0.9, "deterministic": True}
        section = make_params("train", **odd, optimizer="sgd", loader="synthetic", compile=True)
        monkeypatch.setattr(training_rows.params, "load", lambda *_: section)
        store = Store(made_store(tmp_path / "store", 20, images=4))
        train = training_rows.Trainer(setting(), store, 2).train
        assert (train.checkpoint_layers, train.ema, train.deterministic) == (False, 0, False)
        assert (train.optimizer, train.loader, train.compile) == ("adam", "plain", False)

    @pytest.mark.slow
    def test_the_rows_of_the_store_tell_their_bounds(self):
        rows = list(stage_rows.store(setting()))
        assert [each.unit for each in rows] == ["us"] * 4
        assert [each.at_most for each in rows] == [None, 20.0, 2500.0, None]

    def test_aligning_is_a_small_part_of_matching(self):
        (found,) = stage_rows.aligned(setting(seconds=1.0))
        assert found.unit == "of the time" and 0 < found.value < 1 and "250 matches" in found.what

    def test_batches_are_matched_and_compared_with_the_plain_network(self):
        (found,) = evaluation_rows.batched(setting(seconds=0.5))
        assert found.unit == "pairs/s" and found.value > 0 and found.ratio.low > 0

    @pytest.mark.slow
    def test_evaluation_is_counted_by_part_and_as_a_whole(self, tmp_path, photo, monkeypatch):
        images = write_image_set(tmp_path / "images", {"a.png": photo, "b.png": photo[::-1].copy()}, "test")
        monkeypatch.setattr(evaluation_rows, "EVALUATED", 4)
        parts, alone, compared, whole = evaluation_rows.evaluation(setting(images=images, seconds=0.1))
        assert all(f"{part} " in parts.note for part in ("SIFT", "matcher", "baselines", "truth", "ours", "all"))
        assert 0 < alone.value < compared.value < 1
        assert whole.unit == "pairs/s" and whole.value > 0 and whole.ratio.low > 0


@pytest.mark.slow
def test_the_first_picture_of_the_readme_is_what_its_command_draws(root, tmp_path, capsys):
    from benchmarks.dev import first_picture

    assert first_picture.main([str(tmp_path / "m.jpg")]) == 0
    ours, baseline = (tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+)", capsys.readouterr().out))
    assert ours[0] > 2 * baseline[0] and ours[0] / ours[1] > baseline[0] / baseline[1] + 0.2
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert f"{ours[0]} of {ours[1]} matches right; below the ratio test, {baseline[0]} of {baseline[1]}" in readme
    drawn, shipped = (cv2.imread(str(path)) for path in (tmp_path / "m.jpg", root / "docs" / "matches.jpg"))
    assert drawn.shape == shipped.shape and np.abs(drawn.astype(int) - shipped).mean() < 2
    assert (root / "docs" / "matches.jpg").stat().st_size < 300_000
