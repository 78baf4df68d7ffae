"""The speed table: equal work on both sides, rows that cannot run say why."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from made_pairs import scrambled

from benchmarks import __main__ as benchmark
from benchmarks import images, network, peer, plain, timing, training
from benchmarks.row import Row, Setting, run
from benchmarks.synthetic import made_batch
from pipeline.errors import RequestError
from pipeline.train.objective import assignment_loss
from superglue_sift.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.truth import ground_truth

ROOT = Path(__file__).resolve().parents[2]
SETTING = Setting(
    torch.device("cpu"),
    SuperGlueConfig(dim=16, layers=2, heads=2, sinkhorn_iterations=20),
    rounds=2,
    seconds=0.5,
    params=ROOT / "presets" / "sample.yaml",
)


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """`timing` collects garbage before each round, which takes half a second among the objects of
    all tests.
    """
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)


class TestPlain:
    """Ours must equal the plain path: the table's ratios are worth nothing otherwise."""

    @pytest.mark.parametrize("norm", ["layer", "batch"])
    def test_assignment_loss_and_gradient_equal_ours(self, norm):
        model = scrambled(
            SuperGlueConfig(dim=32, layers=3, heads=4, norm=norm, sinkhorn_iterations=50)
        ).double()
        twin = plain.plain_from(model).double()
        batch = made_batch(40, 3)
        truths = ground_truth(batch)
        ours = model(batch)
        theirs = twin(batch)
        assert max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs)) < 1e-9
        losses = assignment_loss(ours, truths).total.sum(), plain.dense_loss(theirs, truths).sum()
        assert float((losses[0] - losses[1]).detach().abs()) < 1e-9
        for loss in losses:
            loss.backward()
        gradients, others = (dict(each.named_parameters()) for each in (model, twin))
        for name in (
            "dustbin",
            "final_projection.weight",
            "descriptor_projection.weight",
            "self_attention.0.merge.weight",
            "cross_attention.2.mlp.0.weight",
        ):
            found = others[name].grad.reshape(gradients[name].shape)
            assert torch.allclose(gradients[name].grad, found, atol=1e-9, rtol=1e-7)

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

    def test_the_plain_network_refuses_weights_that_it_has_not(self):
        with pytest.raises(RuntimeError, match="rotary"):
            plain.plain_from(SuperGlue(SuperGlueConfig(dim=32, layers=1, rotary=True)))


class TestTiming:
    def test_every_way_has_equally_many_rounds_in_turns(self):
        order = []
        taken = timing.alternate(
            {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3
        )
        assert order == list("ab" + "abbaab")
        assert all(len(each.wall) == len(each.cpu) == 3 for each in taken.values())

    def test_two_rounds_are_made_whatever_they_cost(self):
        taken = timing.alternate({"a": lambda: sum(range(200_000))}, rounds=9, seconds=0.0)
        assert len(taken["a"].wall) == 2

    def test_the_interval_holds_the_ratio(self):
        random = np.random.default_rng(0)
        fast = random.uniform(1, 1.1, 15)
        found = timing.speed_up(3 * fast * random.uniform(0.98, 1.02, 15), fast)
        assert found.low <= found.value <= found.high and found.low > 2.9 and found.high < 3.1


class TestRows:
    def test_sinkhorn_ways_have_the_same_gradient(self):
        gradient, other = (network.sinkhorn_call("cpu", way, 20, 2)() for way in ("ours", "plain"))
        assert gradient.abs().max() > 0.1 and torch.allclose(gradient, other, atol=1e-5)

    def test_a_step_is_compared_with_the_faster_norm(self, monkeypatch):
        costs = {"plain network, batch norm": 2.0, "float32": 1.0, "bfloat16": 0.5}

        def time(_, ways):
            return {way: timing.Seconds([costs.get(way, 3.0)] * 2, [1.0] * 2) for way in ways}

        monkeypatch.setattr(Setting, "time", time)
        rows = list(network.step(SETTING))
        assert [each.ratio.value for each in rows] == [2.0, 4.0] * 2
        assert all(each.note.startswith("of plain network, batch norm") for each in rows)

    def test_the_peers_work_trains(self, photo):
        work = peer.PeerTraining([photo], 30, torch.device("cpu"))
        assert math.isfinite(work())

    @pytest.mark.slow
    def test_peak_memory(self):
        few, many = (network.peak_mib(_allocate, "cpu", mib) for mib in (10, 100))
        assert few < 40 < 90 < many < 140

    def test_fraction_of_equal_matches(self):
        a = torch.tensor([1, -1, 2, -1])
        b = torch.tensor([1, -1, 3, 0])
        assert network.equal(a, b) == pytest.approx(1 / 3)

    def test_parity_compares_layers_that_do_something(self):
        """An untrained network's branches are zero in every precision; float16 says why a CPU
        leaves it out.
        """
        config = SuperGlueConfig(dim=128, layers=1, sinkhorn_iterations=20)
        rows = list(network.parity(dataclasses.replace(SETTING, config=config)))
        assert "GPU" in rows.pop().skipped
        matches, log_P, loss, gradient = (each.value for each in rows)
        assert 0.5 < matches <= 1 and 0.01 < log_P < 1 and 0 < loss < 0.1 and 1e-3 < gradient < 0.1

    def test_the_perturbed_network_uses_every_weight(self):
        model = network.perturb(SETTING.model())
        answer = network.answer(model, made_batch(30, 2), "float32")
        moving = [
            bool(p.grad.abs().sum() > 0)
            for name, p in model.named_parameters()
            if "bias" not in name
        ]
        assert all(moving) and not torch.equal(model.dustbin, SETTING.model().dustbin)
        assert answer.gradient.dtype == torch.float64 and answer.loss > 0

    def test_rows_of_images_on_the_bundled_photographs(self):
        for group, unit in ((images.keypoints, "ms"), (images.files, "s"), (images.aligned, "ms")):
            (found,) = group(SETTING)
            assert found.unit == unit and found.value > 0

    def test_photographs_are_cut_to_one_size(self):
        found = images.photographs(8)
        assert [each.shape for each in found] == [(480, 640)] * 8
        assert all(each.dtype == np.uint8 and each.std() > 10 for each in found)


def _allocate(_device: str, mib: int):
    return lambda: torch.ones(mib << 18).sum()


class TestModes:
    @pytest.mark.slow  # starts three processes
    def test_each_mode_is_compared_with_plain(self, monkeypatch):
        monkeypatch.setattr(training, "KEYPOINTS", 24)
        rows = {each.name: each for each in training.modes(SETTING)}
        assert rows["mode: DataParallel"].skipped == "needs two GPUs"
        several = rows["mode: DDP, 2 processes"]
        assert several.skipped or (several.unit == "pairs/s" and several.ratio.low > 0)
        assert rows["mode: gradient accumulation, 2 parts"].value > 0

    @pytest.mark.slow
    def test_a_rank_that_fails_says_why(self, tmp_path):
        with pytest.raises(RuntimeError, match="Error"):
            training._run_ranks(SETTING, tmp_path / "no store", 1)


class TestTable:
    def test_it_is_printed_and_written_and_a_failing_group_costs_itself_alone(
        self, tmp_path, monkeypatch, capsys
    ):
        def good(_):
            yield Row("one", 1.5, "ms", timing.Ratio(2.0, 1.5, 2.5), note="of plain")
            yield Row("two", skipped="no such device")

        def bad(_):
            yield Row("first", 1.0)
            raise RuntimeError("out of memory\nand more")

        monkeypatch.setattr(benchmark, "GROUPS", {"bad": bad, "good": good})
        assert benchmark.main(["--device", "cpu", "--json", str(tmp_path / "rows.json")]) == 0
        printed = capsys.readouterr().out
        assert "2.00x [1.50, 2.50]  of plain" in printed and "SKIP: no such device" in printed
        assert "SKIP: failed: RuntimeError: out of memory\n" in printed
        held = json.loads((tmp_path / "rows.json").read_text())
        assert [each["name"] for each in held["rows"]] == ["first", "bad", "one", "two"]
        assert "D = 128" in held["machine"]

    def test_a_table_can_be_stopped(self):
        def stopped(_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(run("stopped", stopped, SETTING))

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--only", "nothing"], "no such group"),
            (["--rounds", "1"], "--rounds"),
            (["--dim", "7"], "--dim"),
        ],
    )
    def test_wrong_requests_are_named(self, arguments, said):
        with pytest.raises(RequestError, match=said):
            benchmark.main([*arguments, "--device", "cpu"])

    def test_the_command_runs_the_benchmarks_next_to_the_package(self, tmp_path):
        """From any folder: neither the bench nor the packages have to be installed."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "pipeline.benchmark", "--only", "nothing"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 2 and done.stderr.startswith(
            "error: --only nothing: no such group of rows"
        )

    def test_a_package_without_its_bench_says_so_in_one_line(self, tmp_path):
        """As an installed wheel: the packages alone."""
        for package in ("pipeline", "superglue_sift"):
            shutil.copytree(ROOT / package, tmp_path / "installed" / package)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
        command = [sys.executable, "-m", "pipeline.benchmark"]
        done = subprocess.run(
            command, cwd=tmp_path / "installed", env=environment, capture_output=True, text=True
        )
        folder = tmp_path / "installed" / "benchmarks"
        assert done.returncode == 2 and done.stderr.splitlines() == [
            f"error: {folder}: not there; the benchmark comes with a clone, not with the wheel"
        ]


@pytest.mark.slow
def test_the_first_picture_of_the_readme_is_what_its_command_draws(root, tmp_path, capsys):
    from benchmarks.dev import first_picture

    assert first_picture.main([str(tmp_path / "m.jpg")]) == 0
    ours, baseline = (
        tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+)", capsys.readouterr().out)
    )
    assert ours[0] > 2 * baseline[0] and ours[0] / ours[1] > baseline[0] / baseline[1] + 0.2
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert (
        f"{ours[0]} of {ours[1]} matches right; below the ratio test, {baseline[0]} of"
        f" {baseline[1]}" in readme
    )
    drawn, shipped = (
        cv2.imread(str(path)) for path in (tmp_path / "m.jpg", root / "docs" / "matches.jpg")
    )
    assert drawn.shape == shipped.shape and np.abs(drawn.astype(int) - shipped).mean() < 2
    assert (root / "docs" / "matches.jpg").stat().st_size < 300_000
