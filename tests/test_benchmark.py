"""The speed table: runs, compares equal work, says what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cv2
import pytest
import torch

from benchmarks import __main__ as benchmark
from benchmarks import evaluation_rows, gpu_rows, memory_rows, stage_rows, table, timing
from benchmarks.keypoint_rows import keypoint_rows
from benchmarks.row import Row, Setting
from benchmarks.timing import Ratio
from pipeline.errors import RequestError
from pipeline.image_sets.sources import ImageSet, folder_entries
from superglue_sift.network.superglue import SuperGlueConfig

ROOT = Path(__file__).resolve().parents[1]
SETTING = Setting(torch.device("cpu"), SuperGlueConfig(dim=16))
ON_GPU = Setting(torch.device("cuda"), SuperGlueConfig(dim=16))


@pytest.mark.slow
def test_keypoints_are_measured_against_the_floor_and_a_plain_pool(tmp_path, photo, make_params):
    """Ours and the plain pool must give the same bytes; `keypoint_rows` raises where they do not."""
    for index in range(4):
        cv2.imwrite(str(tmp_path / f"{index}.jpg"), photo[:, index * 10 :])
    names = [f"{index}.jpg" for index in range(4)]
    entries = folder_entries(tmp_path, names, "train", "train")
    settings = make_params("keypoints", views_per_image=2, width=128, height=96)
    rows = keypoint_rows(ImageSet(entries, {"train": str(tmp_path)}), entries, settings, 2, rounds=1)
    assert [row["what"] for row in rows] == [f"keypoints {way}, 128x96" for way in ("floor", "ours", "plain")]
    assert rows[0]["of_floor"] == rows[2]["of_plain"] == 1.0
    for row in rows:
        assert row["views_per_second"] > 0 and row["cpu_ms"] > 0 and row["faults"] >= 0
        assert row["of_plain_low"] <= row["of_plain"] <= row["of_plain_high"]


@pytest.mark.slow
def test_bad_and_small_images_do_not_stop_the_measurement(tmp_path, photo, make_params):
    (tmp_path / "0.jpg").write_bytes(b"")
    cv2.imwrite(str(tmp_path / "1.jpg"), photo[:20, :20])
    cv2.imwrite(str(tmp_path / "2.jpg"), photo)
    entries = folder_entries(tmp_path, ["0.jpg", "1.jpg", "2.jpg"], "train", "train")
    settings = make_params("keypoints", views_per_image=2, width=128, height=96)
    assert len(keypoint_rows(ImageSet(entries, {"train": str(tmp_path)}), entries, settings, 2, rounds=1)) == 3


def test_the_table_is_printed_and_written(tmp_path, monkeypatch, capsys):
    rows = [
        {"what": "a long name", "speed": 1.5, "of": 1.0, "of_low": 0.9, "of_high": 1.25},
        {"what": "b", "speed": 12.25, "of": "", "of_low": "", "of_high": ""},
    ]
    monkeypatch.setattr(benchmark, "_store", lambda _: rows)
    assert benchmark.main(["--json", str(tmp_path / "rows.json"), "store"]) == 0
    lines = ["what         speed                 of", "a long name    1.5  1.00 [0.90, 1.25]"]
    assert capsys.readouterr().out.splitlines() == [*lines, "b            12.25                   "]
    assert json.loads((tmp_path / "rows.json").read_text()) == rows


def test_wrong_requests_are_named(tmp_path, root):
    with pytest.raises(RequestError, match="--count and --rounds"):
        benchmark.main(["keypoints", "--count", "0"])
    sample = ["--params", str(root / "presets" / "sample.yaml")]
    with pytest.raises(RequestError, match="--size 640: must be WIDTHxHEIGHT"):
        benchmark.main([*sample, "keypoints", "--size", "640"])
    with pytest.raises(RequestError, match=r"--size: keypoints\.width"):
        benchmark.main([*sample, "keypoints", "--size", "641x480"])
    with pytest.raises(RequestError, match="no keypoint store here"):
        benchmark.main(["store", "--keypoints", str(tmp_path)])


def _table_of(monkeypatch, setting=SETTING, **groups):
    """The rows of these groups."""
    monkeypatch.setattr(table, "groups", lambda: groups)
    return table.run(setting, "", print, lambda *_: None)


def _failing(error):
    def group(_):
        yield Row("bad", "first", 1.0)
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("dim"), "failed: KeyError: 'dim'"),
        (AssertionError("they differ\nat 3"), "failed: AssertionError: they differ"),
        (RuntimeError(), "failed: RuntimeError"),
        (RequestError("no images here"), "no images here"),
    ],
)
def test_a_group_that_fails_costs_its_remaining_rows_alone(monkeypatch, error, said):
    rows = _table_of(monkeypatch, bad=_failing(error), good=lambda _: iter([Row("good", "row", 2.0)]))
    assert [(row.group, row.what, row.skipped) for row in rows] == [
        ("bad", "first", ""),
        ("bad", "bad", said),
        ("good", "row", ""),
    ]


def test_a_table_can_be_stopped(monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        _table_of(monkeypatch, bad=_failing(KeyboardInterrupt()))


def test_rows_of_a_gpu_fail_alone_and_are_named(monkeypatch):
    for name in ("_ragged", "_sinkhorn_share", "_attention", "_profile"):
        monkeypatch.setattr(gpu_rows, name, lambda _, name=name: iter([Row("gpu", name, 1.0)]))
    monkeypatch.setattr(gpu_rows, "GOALS", {16: 1.0})
    monkeypatch.setattr(gpu_rows, "_training", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(gpu_rows, "_latency", _failing(RuntimeError("CUDA error: launch failure\n...")))
    rows = list(gpu_rows.rows(SETTING))
    assert len(rows) == 7 and [(row.what, row.skipped) for row in rows if row.skipped] == [
        ("training, N = 16", "failed: ZeroDivisionError: division by zero"),
        ("latency", "failed: RuntimeError: CUDA error: launch failure"),
    ]


def test_a_run_cut_off_leaves_the_groups_it_has_done(tmp_path, monkeypatch):
    groups = {
        "one": lambda _: iter([Row("one", "row", 1.0)]),
        "none": lambda _: iter([]),
        "cut": _failing(KeyboardInterrupt()),
    }
    monkeypatch.setattr(table, "groups", lambda: groups)
    arguments = ["--no-tracking", "--device", "cpu", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(arguments)
    held = json.loads((tmp_path / "table.json").read_text())
    assert list(held["machine"]["groups"]) == ["one", "none"] and [row["group"] for row in held["rows"]] == ["one"]
    assert "load at the end" not in held["machine"]
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 2
    assert benchmark.main([*arguments, "--replace", "--only", "none,one"]) == 0
    held = json.loads((tmp_path / "table.json").read_text())
    assert list(held["machine"]["groups"]) == ["none", "one"] and "load at the end" in held["machine"]


def test_every_row_of_a_network_has_its_dim(monkeypatch):
    rows = [
        Row("plain", "training step: float32", 1.0, "ms"),
        Row("plain", "too dear", skipped="about 9 s"),
        Row("peer", "end to end, D = 128, T = 20", 1.0),
        Row("sinkhorn", "Sinkhorn T = 100", 1.0),
        Row("memory", "Sinkhorn T = 100, N = 512: ours", 1.0),
        Row("keypoints", "keypoints ours, 640x480", 1.0),
    ]
    own = [Row("gpu", "Sinkhorn of the step, N = 512", 1.0)]
    work = SimpleNamespace(parts=lambda: rows[:1], whole=lambda: rows[:1], dim=64)
    monkeypatch.setattr(gpu_rows, "rows", lambda _: iter(own))
    monkeypatch.setattr(evaluation_rows, "_Evaluation", lambda _: work)
    groups = {"a": lambda _: iter(rows), "gpu": gpu_rows.gpu, "evaluation": evaluation_rows.evaluation}
    monkeypatch.setattr(table, "groups", lambda: groups)
    found = table.run(ON_GPU, "", print, lambda *_: None)
    assert [row.flat()["dim"] for row in found] == [16, None, 128, *[None] * 3, 256, 64, 64]
    assert "ms  D=16" in table.line(found[0]) and "D=" not in table.line(found[3])


def test_a_gpu_is_not_compared_with_targets_of_the_host(monkeypatch):
    """Neither by its processor seconds nor by a rate that nobody measured."""
    ratio = Ratio(2.0, 1.0, 3.0)
    group = {"a": lambda _: iter([Row("a", "b", 1.0, "s", ratio, ratio)])}
    assert _table_of(monkeypatch, **group)[0].ratio_cpu == ratio
    (found,) = _table_of(monkeypatch, ON_GPU, **group)
    assert found.ratio == ratio and found.ratio_cpu is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert table.machine(ON_GPU)["device"] == "a GPU"
    assert [table.machine(each).get("matrix product GFLOP/s") for each in (SETTING, ON_GPU)] == [100.0, None]


def test_ratios_go_to_the_tracking_server_too(tmp_path, monkeypatch):
    logged = {}
    log = SimpleNamespace(log=lambda metrics, _: logged.update(metrics), artifact=None)
    monkeypatch.setattr("pipeline.tracking.open_run", lambda *_, **__: contextlib.nullcontext(log))
    rows = [Row("a", "step: ours", 1.5, "ms", Ratio(2.0, 1.0, 3.0)), Row("a", "none", skipped="no")]
    table.track(rows, {}, tmp_path, [])
    key = "a/step  ours"
    assert logged == {key: 1.5, f"{key} ratio": 2.0, f"{key} ratio low": 1.0, f"{key} ratio high": 3.0}


@pytest.mark.parametrize(
    ("low", "high", "met"), [(0.1, 0.2, "yes"), (0.2, 0.3, "near"), (0.3, 0.4, "no"), (None, None, "no")]
)
def test_a_target_is_compared_with_the_interval_of_the_value(low, high, met):
    spread = Ratio(0.3, low, high) if low else None
    row = Row("a", "b", 0.3, "s", Ratio(9.0, 8.0, 9.5), spread=spread, at_most=0.25)
    assert (row.met, row.met_cpu) == (met, "")
    assert f"  target at most 0.25: {met}" in table.line(row)
    flat = row.flat()
    assert (flat["value_low"], flat["value_high"], flat["at_most"]) == (low, high, 0.25)
    assert Row("a", "b", skipped="no", at_most=0.25).met == ""


def test_two_files_to_matches_are_held_to_their_seconds(monkeypatch):
    wall = [0.2, 0.21, 0.3]
    monkeypatch.setattr(Setting, "timed", lambda *_: {"call": timing.Seconds(wall, wall)})
    (row,) = stage_rows.files(SETTING)
    assert row.spread == timing.interval(wall) and row.at_most == 0.25 and row.met == "near"


def test_parts_of_the_evaluation_are_held_to_a_twentieth(monkeypatch):
    """By the interval over the rounds: here 1 of 25 ms in one and 3 of 27 ms in the other."""
    ways = ("views", "SIFT", "matcher", "baselines", "truth", "ours", "all")
    walls = [[1.0, 1.0], [12.0, 12.0], [12.0, 12.0], [0.0, 0.0], [0.5, 1.5], [1.0, 3.0], [1.0, 3.0]]
    taken = {way: timing.Seconds(wall, wall) for way, wall in zip(ways, walls)}
    work = object.__new__(evaluation_rows._Evaluation)
    setting = SimpleNamespace(timed=lambda _: taken)
    network = SimpleNamespace(threshold=0.2)
    vars(work).update(setting=setting, pairs=[None], name="")
    vars(work).update(matchers=SimpleNamespace(networks={"superglue": network}))
    total, *parts = work.parts()
    assert total.value == pytest.approx(1e3 * (1 + 24 + 2))
    for part in parts:
        assert part.spread.low == pytest.approx(1 / 25) and part.spread.high == pytest.approx(3 / 27)
        assert part.value == pytest.approx((1 / 25 + 3 / 27) / 2) and part.met == "near"


def test_sinkhorns_fraction_of_the_gpu_is_held_to_a_fifth(monkeypatch):
    taken = {"step": timing.Seconds([1.0, 1.0], []), "sinkhorn": timing.Seconds([0.1, 0.15], [])}
    monkeypatch.setattr(Setting, "timed", lambda *_: taken)
    for name in ("_step", "made_batch", "sinkhorn_call"):
        monkeypatch.setattr(gpu_rows, name, lambda *_: None)
    (row,) = gpu_rows._sinkhorn_share(SETTING)
    assert (row.value, row.spread.high, row.met) == (pytest.approx(0.125), 0.15, "yes")


def test_memory_measured_once_has_no_interval(monkeypatch):
    monkeypatch.setattr(memory_rows.memory, "peak_mib", lambda _, __, way, *___: 70.0 if way == "plain" else 20.0)
    found = list(memory_rows.peaks(SETTING))
    assert [row.ratio for row in found] == [Ratio(3.5)] * 5
    assert [row.met for row in found] == ["yes"] * 4 + ["no"]
    assert str(found[0].ratio) == "3.50x"
    flat = found[0].flat()
    assert (flat["ratio"], flat["ratio_low"], flat["ratio_high"]) == (3.5, None, None)


def test_the_command_runs_the_benchmarks_next_to_the_package(tmp_path):
    """From any folder: neither the bench nor the packages have to be installed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pipeline.benchmark", "--only", "nothing"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: --only nothing: no such group of rows")


def test_a_package_without_its_bench_says_so_in_one_line(tmp_path):
    """As an installed wheel: the packages alone."""
    for package in ("pipeline", "superglue_sift"):
        shutil.copytree(ROOT / package, tmp_path / "installed" / package)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-m", "pipeline.benchmark"]
    done = subprocess.run(command, cwd=tmp_path / "installed", env=environment, capture_output=True, text=True)
    folder = tmp_path / "installed" / "benchmarks"
    assert done.returncode == 2 and done.stderr.splitlines() == [
        f"error: {folder}: not there; the benchmark comes with a clone, not with the wheel"
    ]


def test_scaling_on_paper_is_what_a_person_reckons(capsys):
    from benchmarks.dev import scaling

    model = scaling.Model(ms_a_pair=0.5, host_ms=10.0, bytes=4 << 20, adapters=8)
    assert model.exchange_ms(1) == 0.0
    # 3/2 of 4 MiB at 370 GB/s, and one bucket's latency
    assert model.exchange_ms(4) == pytest.approx(1.5 * (4 << 20) / 370e6 + 0.02)
    assert model.step_ms(1, 8) == 10.0  # the host
    assert model.step_ms(1, 40) == 20.0 and model.rate(1, 40) == 2000.0  # the kernels
    assert model.step_ms(4, 40) == pytest.approx(20.0 + model.exchange_ms(4) / 2)
    assert model.least_pairs(1) == 18  # 9 of the 10 ms
    assert model.efficiency(64, model.least_pairs(64)) >= 0.9 > model.efficiency(64, model.least_pairs(64) - 1)
    assert scaling.main([]) == 0
    assert "| 64 |" in capsys.readouterr().out
    with pytest.raises(RequestError, match="--batch"):
        scaling.main(["--batch", "0"])
