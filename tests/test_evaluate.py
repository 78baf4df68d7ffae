"""The stage from end to end on tiny images with an untrained model, and what it refuses."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_scenes import SHIFT, TURN, write_image_set, write_model, write_sequence

from pipeline import errors
from pipeline.evaluate import __main__ as evaluate
from pipeline.evaluate import heldout, inputs, lightglue, protocol
from pipeline.evaluate.estimators import DEFAULT
from pipeline.evaluate.matchers import MATCHERS
from pipeline.evaluate.protocol import map_over_ranks, units_of
from pipeline.image_sets import sources
from pipeline.launch import free_port
from pipeline.processes.prefetch import prefetched
from superglue_sift.matcher import PairMatches

PARAMS = """
views:
  homography:
    {scale_min: 0.6, perspective: 0.2, rotation_deg: 30.0, tilt_deg: 0.0, max_upscale: 2.0}
  photometric: {brightness: 0.1, contrast: 0.1, gamma: 0.1, blur: 0.3, noise: 0.01, jpeg: 0.2}
evaluate:
  width: 160
  height: 120
  pairs_per_image: 3
  max_keypoints: 100
"""
CONFIDENCE = (
    "precision_recall.csv",
    "precision_at_recall.csv",
    "operating_points.csv",
    "calibration.csv",
)


def workspace(folder, photo):
    """A folder with params.yaml, a model, and two held-out images."""
    (folder / "params.yaml").write_text(PARAMS)
    write_model(folder / "model.safetensors")
    images = {"a.png": photo[:300, :400], "b.png": photo[100:, 150:]}
    write_image_set(folder / "images", images, "test")
    return folder


@pytest.fixture
def work(tmp_path, photo):
    return workspace(tmp_path, photo)


@pytest.fixture(scope="module")
def done(tmp_path_factory, photo):
    """Evaluations without options and with `--bound`, run once: their folder, and what each
    printed.
    """
    folder = workspace(tmp_path_factory.mktemp("done"), photo)
    printed = {}
    for name, words in (("out", ()), ("bound", ("--bound",))):
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            assert run(folder, *words, out=name) == 0
        printed[name] = stream.getvalue()
    return SimpleNamespace(folder=folder, printed=printed)


def run(folder, *extra, out="out"):
    words = [
        "--model",
        folder / "model.safetensors",
        "--params",
        folder / "params.yaml",
        "--out",
        folder / out,
    ]
    words += ["--images", folder / "images", "--batch", "4", "--device", "cpu", "--pictures", "4"]
    words += ["--threshold", "0.1", *extra]
    return errors.run(evaluate.main, [str(word) for word in words])


def write(path, text):
    path.write_text(text)
    return path


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_held_out_images_from_end_to_end(done):
    out = done.folder / "out"
    metrics = json.loads((out / "metrics.json").read_text())
    assert all(metrics[f"{matcher}.pairs"] == 6 for matcher in MATCHERS)
    lines = read_csv(out / "pairs.csv")
    assert len(lines) == 6 * len(MATCHERS)
    assert [line["pair"] for line in lines[:: len(MATCHERS)]] == [
        f"{n}.png#{k}" for n in "ab" for k in range(3)
    ]
    printed = done.printed["out"]
    assert "2 held-out images (test), 160x120, 100 keypoints, 6 pairs" in printed
    assert "SuperGlue (ours)" in printed
    pictures = ["best-1", "gain-median", "gain-most", "median-1", "worst-1", "worst-2"]
    assert sorted(path.stem for path in (out / "pictures").glob("*.png")) == pictures
    assert {path.name for path in (out / "curves").iterdir()} == {
        *(f"error_{name}{end}.csv" for name in DEFAULT for end in ("", "_aligned")), *CONFIDENCE
    }  # fmt: skip
    assert json.loads((out / "protocol.json").read_text())["model"]["step"] == 7
    assert read_csv(out / "bad_images.csv") == []


def test_curves_of_precision_and_recall_agree_with_the_table(done):
    out = done.folder / "out"
    metrics = json.loads((out / "metrics.json").read_text())
    swept = read_csv(out / "curves" / "precision_at_recall.csv")
    precision = [float(line["superglue"]) for line in swept]
    assert precision == sorted(precision, reverse=True) and len(precision) > 20
    asked = metrics["ratio_test.recall"]
    below = math.floor(100 * asked)
    above = math.ceil(100 * asked)
    assert precision[above] <= metrics["superglue.precision_at_ratio_recall"] <= precision[below]
    points = read_csv(out / "curves" / "operating_points.csv")
    for line in points:
        assert float(line["recall"]) == metrics[f"{line['matcher']}.recall"]
        assert float(line["precision"]) == metrics[f"{line['matcher']}.precision"]
    assert [line["matcher"] for line in points] == list(MATCHERS)


def test_an_auc_can_be_made_again_by_hand_from_pairs_csv(done):
    out = done.folder / "out"
    metrics = json.loads((out / "metrics.json").read_text())
    for matcher in MATCHERS:
        lines = [line for line in read_csv(out / "pairs.csv") if line["matcher"] == matcher]
        for name in [f"{name}{end}" for name in DEFAULT for end in ("", "_aligned")]:
            found = [float(line[f"error_{name}"]) for line in lines]
            for pixels in (1, 3, 5, 10):
                by_hand = sum(max(0.0, 1 - error / pixels) for error in found) / len(found)
                assert metrics[f"{matcher}.auc_{name}_{pixels}"] == pytest.approx(by_hand, abs=2e-6)
        precision = [int(line["correct"]) / max(1, int(line["matches"])) for line in lines]
        assert metrics[f"{matcher}.precision"] == pytest.approx(np.mean(precision), abs=2e-6)


def test_every_matcher_has_metrics_of_aligned_matches(work, done, capsys):
    """Only estimates from the matches change; `--no-refine` leaves them out."""
    assert run(work, "--no-refine", "--bound", out="plain") == 0
    bound = done.folder / "bound"
    printed = done.printed["bound"]
    both, plain = (
        json.loads((out / "metrics.json").read_text()) for out in (bound, work / "plain")
    )
    assert {name: value for name, value in both.items() if "aligned" not in name} == plain
    for matcher in (*MATCHERS, "true_matches"):
        assert {
            f"{matcher}.auc_{name}_aligned_{px}"
            for name in ("ransac", "dlt")
            for px in (1, 3, 5, 10)
        } < set(both)
        assert both[f"{matcher}.estimated_ransac_aligned"] == both[f"{matcher}.estimated_ransac"]
    # Views of a photograph: pixels know better than SIFT
    for matcher in ("mutual_nn", "ratio_test", "true_matches"):
        assert both[f"{matcher}.auc_ransac_aligned_1"] > both[f"{matcher}.auc_ransac_1"] + 0.05
    for name in ("intervals.csv", "differences.csv"):
        assert "auc_ransac_aligned_3" in {line["figure"] for line in read_csv(bound / name)}
    detected = printed.split("\naligned ")[0]
    aligned = printed.split("\naligned ")[1]
    assert (
        "as detected" in detected
        and "true matches (bound)" in detected
        and "true matches (bound)" in aligned
    )
    assert "AUC@5 RANSAC aligned" in printed and "aligned" not in capsys.readouterr().out
    assert "aligned" in json.loads((bound / "protocol.json").read_text())
    assert "aligned" not in (work / "plain" / "index.html").read_text()


def test_the_true_matches_are_a_row_and_no_baseline(work, done, capsys):
    assert "true matches (bound)" in done.printed["bound"]
    metrics = json.loads((done.folder / "bound" / "metrics.json").read_text())
    assert metrics["true_matches.precision"] == metrics["true_matches.recall"] == 1.0
    assert "true_matches" not in {
        line["baseline"] for line in read_csv(done.folder / "bound" / "differences.csv")
    }
    assert run(work, "--bound", "--poses", "x") == 2
    assert "--bound needs homographies" in capsys.readouterr().err


def test_other_estimators_lead_where_they_were_asked_for(work, done, capsys):
    shutil.copytree(done.folder / "out", work / "out")
    assert run(work, "--estimators", "magsac") == 0
    metrics = json.loads((work / "out" / "metrics.json").read_text())
    assert "superglue.auc_magsac_3" in metrics and not any("ransac" in name for name in metrics)
    printed = capsys.readouterr().out
    assert "AUC MAGSAC" in printed and "AUC@5 MAGSAC" in printed
    assert "superglue.auc_magsac_5" in read_csv(work / "out" / "robustness.csv")[0]
    # nothing of the evaluation before is left to be taken for this one's
    left = {path.name for path in (work / "out" / "curves").iterdir()}
    assert left == {"error_magsac.csv", "error_magsac_aligned.csv", *CONFIDENCE}


def test_another_place_gives_the_same_bytes_of_every_file(work, monkeypatch):
    """So that two clones end with one dvc.lock: no time, path or name of a machine in any
    output.
    """
    monkeypatch.setattr("pipeline.evaluate.protocol.LEVELS", {"blur (px)": (heldout.blur, (3.0,))})
    shutil.copytree(work, work / "elsewhere")
    assert run(work, "--robustness", "1") == run(work / "elsewhere", "--robustness", "1") == 0
    first, second = (
        {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
        for out in (work / "out", work / "elsewhere" / "out")
    )
    assert len(first) > 12 and set(first) == set(second)
    assert [str(name) for name in first if first[name] != second[name]] == []


def test_workers_and_other_images_do_not_matter(work, make_params, photo):
    section = make_params("evaluate", width=160, height=120, pairs_per_image=2, max_keypoints=60)
    images = sources.open_manifest(work / "images")
    entries = images.entries("test")
    source = heldout.HeldOutPairs(images, entries * 4, section)
    threaded = list(
        prefetched(lambda unit: inputs.extract(source, unit, 60), [[n] for n in range(8)], 4, 4)
    )
    both = [pair for found, _ in threaded[:2] for pair in found]
    assert all(
        found[0].pair.records1.tobytes() == both[0].pair.records1.tobytes()
        for found, _ in threaded[::2]
    )
    only, _ = inputs.extract(heldout.HeldOutPairs(images, entries[1:], section), [0], 60)
    assert [pair.name for pair in both[2:]] == [pair.name for pair in only]
    for first, second in zip(both[2:], only):
        assert first.pair.records0.tobytes() == second.pair.records0.tobytes()
        assert first.pair.records1.tobytes() == second.pair.records1.tobytes()
        np.testing.assert_array_equal(first.truth, second.truth)


def test_units_come_in_order_up_to_a_wrong_request():
    def prepare(unit):
        if unit == 6:
            raise errors.RequestError("unit 6 is wrong")
        return unit

    def score(unit):
        time.sleep(0.01 * (unit % 3))
        return unit

    begun = []
    found = []
    with pytest.raises(errors.RequestError, match="unit 6 is wrong"):
        found.extend(
            map_over_ranks(range(9), None, prepare, lambda unit: begun.append(unit) or unit, score)
        )
    assert found == begun == [0, 1, 2, 3, 4, 5]


def test_pictures_have_the_colours_of_the_photograph(tmp_path, make_params, color_photo):
    """With the brightness that was matched: only the two other channels differ from the gray
    view.
    """
    bgr = np.ascontiguousarray(color_photo[..., ::-1])
    write_image_set(tmp_path / "images", {"cat.png": bgr}, "test")
    section = make_params("evaluate", width=160, height=120, pairs_per_image=1, max_keypoints=60)
    images = sources.open_manifest(tmp_path / "images")
    source = heldout.HeldOutPairs(images, images.entries("test"), section)
    for number, gray in enumerate(source.load(0).images):
        color = source.in_color(0, number, gray)
        assert color.shape == (120, 160, 3) and np.ptp(color.astype(int), axis=2).mean() > 20
        difference = np.abs(cv2.cvtColor(color, cv2.COLOR_BGR2GRAY).astype(int) - gray)
        assert np.median(difference) <= 1  # colours too bright or too dark for a screen are cut off


def test_homography_of_a_pair_maps_its_pixels(work, make_params):
    quiet = dict.fromkeys(("brightness", "contrast", "gamma", "blur", "noise", "jpeg"), 0.0)
    section = make_params(
        "evaluate", width=160, height=120, pairs_per_image=2, views={"photometric": quiet}
    )
    images = sources.open_manifest(work / "images")
    source = heldout.HeldOutPairs(images, images.entries("test"), section)
    scene = source.load(0)
    for pair in scene.pairs:
        image0 = scene.images[pair.first]
        image1 = scene.images[pair.second]
        warped = cv2.warpPerspective(image0, pair.truth, (160, 120))
        shown = cv2.warpPerspective(np.full_like(image0, 255), pair.truth, (160, 120)) == 255
        shown = cv2.erode(shown.astype(np.uint8), np.ones((9, 9))) > 0
        difference = np.abs(warped.astype(float) - image1)[shown]
        assert shown.mean() > 0.2 and np.median(difference) < 6


def test_validation_images_stand_in_and_are_named(work, photo, capsys):
    write_image_set(work / "held", {"a.png": photo}, "val")
    assert run(work, "--no-refine", "--images", work / "held") == 0
    printed = capsys.readouterr()
    assert "no test images: using the validation images" in printed.err and "(val)" in printed.out


def test_the_papers_protocol_and_its_variants(work, monkeypatch, capsys):
    monkeypatch.setattr(protocol, "VARIANTS", ((160, 120, 50), (120, 96, 80)))
    assert run(work, "--paper", "5") == 0
    lines = read_csv(work / "out" / "protocols.csv")
    assert [line["protocol"] for line in lines[:: len(MATCHERS)]] == ["160x120-50", "120x96-80"]
    assert {line["pairs"] for line in lines} == {"5"}
    for name, most in (("160x120-50", 50), ("120x96-80", 80)):
        rows = read_csv(work / "out" / name / "pairs.csv")
        assert max(int(row["keypoints0"]) for row in rows) <= most
        assert [row["pair"] for row in rows[:: len(MATCHERS)]] == [
            "a.png#0",
            "a.png#1",
            "a.png#2",
            "b.png#0",
            "b.png#1",
        ]
    printed = capsys.readouterr().out
    # two variants: matches, two tables of three estimators with aligned matches, negative pairs
    assert printed.count("SuperGlue (ours)") == 2 * (6 + 5)
    last = printed.split("side by side")[1]
    named = [line.split()[0] for line in last.splitlines() if "SuperGlue (ours)" in line]
    assert named == ["160x120-50", "120x96-80"] * 5
    assert "AUC RANSAC" in last and "AUC MAGSAC" in last and "AUC DLT" in last
    both = json.loads((work / "out" / "metrics.json").read_text())
    one = json.loads((work / "out" / "120x96-80" / "metrics.json").read_text())
    assert both["120x96-80.superglue.auc_dlt_10"] == one["superglue.auc_dlt_10"]
    page = (work / "out" / "index.html").read_text()
    assert 'href="160x120-50/index.html"' in page and "&ndash;" in page


def test_the_papers_protocol_takes_one_pair_of_a_photograph_where_that_is_enough(
    work, monkeypatch, capsys
):
    monkeypatch.setattr(protocol, "VARIANTS", ((160, 120, 50),))
    assert run(work, "--paper", "1", "--estimators", "dlt,ransac") == 0
    rows = read_csv(work / "out" / "160x120-50" / "pairs.csv")
    assert [row["pair"] for row in rows] == ["a.png#0"] * len(MATCHERS)
    assert "1 held-out images (test)," in capsys.readouterr().out
    assert "error_magsac" not in rows[0]


def test_what_is_not_installed_is_said_and_left_out(work, monkeypatch, capsys):
    monkeypatch.setattr(protocol, "VARIANTS", ((160, 120, 50),))
    monkeypatch.setattr(lightglue, "PACKAGES", ("no_such_package",))
    assert run(work, "--paper", "2", "--lightglue", "x") == 0
    printed = capsys.readouterr().out
    assert "SKIP LightGlue: neither kornia nor lightglue is installed" in printed
    assert "SKIP LightGlue" in (work / "out" / "index.html").read_text()


def test_a_further_baseline_stands_in_every_table(work, monkeypatch, capsys):
    def match(pair):
        count = min(len(pair.records0), len(pair.records1))
        found = np.where(np.arange(len(pair.records0)) < count, np.arange(len(pair.records0)), -1)
        return PairMatches(found, (found >= 0).astype(np.float32))

    monkeypatch.setattr(lightglue, "load", lambda *_: (match, "made"))
    assert run(work, "--no-refine", "--lightglue", "x") == 0
    metrics = json.loads((work / "out" / "metrics.json").read_text())
    assert metrics["lightglue.pairs"] == 6 and metrics["lightglue.matches"] > 20
    assert len(read_csv(work / "out" / "pairs.csv")) == 6 * (len(MATCHERS) + 1)
    assert {line["matcher"] for line in read_csv(work / "out" / "intervals.csv")} == {
        *MATCHERS,
        "lightglue",
    }
    assert "LightGlue" in (work / "out" / "index.html").read_text()
    assert "SKIP" not in capsys.readouterr().out


def test_a_further_model_stands_in_every_table(work, capsys):
    for name, layers in (("other", 2), ("third", 3)):
        write_model(work / f"{name}.safetensors", layers=layers)
    named = (f"shipped={work / 'other.safetensors'}", f"further={work / 'third.safetensors'}")
    assert run(work, "--no-refine", "--also", named[0], "--also", named[1]) == 0
    found = json.loads((work / "out" / "metrics.json").read_text())
    assert found["shipped.pairs"] == found["further.pairs"] == 6
    lines = [
        line for line in read_csv(work / "out" / "differences.csv") if line["figure"] == "precision"
    ]
    assert [line["baseline"] for line in lines][1:] == ["shipped", "further"]
    assert float(lines[-1]["value"]) == pytest.approx(
        found["superglue.precision"] - found["further.precision"]
    )
    models = json.loads((work / "out" / "protocol.json").read_text())["models beside it"]
    assert models["shipped"]["file"].endswith("other.safetensors") and list(models) == [
        "shipped",
        "further",
    ]
    order = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "  6  " in line]
    assert order[:3] == ["SuperGlue", "shipped", "further"]


def test_where_training_kept_its_weights_that_is_said_once_and_nothing_is_compared_with_itself(
    work, capsys
):
    write_model(work / "model.safetensors", about={"step": 0})
    write_model(work / "begun_from.safetensors", about={"step": 2400})
    assert run(work, "--no-refine", "--also", f"shipped={work / 'begun_from.safetensors'}") == 0
    said = (
        "Training kept the weights it began with: shipped is the same model as ours, so it has no"
        " rows of its own"
    )
    assert capsys.readouterr().out.count(said) == 1
    assert (work / "out" / "index.html").read_text().count(said) == 1
    assert not any(
        name.startswith("shipped.")
        for name in json.loads((work / "out" / "metrics.json").read_text())
    )
    baselines = {line["baseline"] for line in read_csv(work / "out" / "differences.csv")}
    assert baselines <= set(MATCHERS)
    # another threshold gives other matches, so these rows stay
    write_model(work / "begun_from.safetensors", about={"match_threshold": 0.05})
    assert (
        run(
            work,
            "--no-refine",
            "--threshold",
            "0",
            "--also",
            f"shipped={work / 'begun_from.safetensors'}",
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert (
        printed.count(
            "Training kept the weights it began with: shipped has the weights of ours and another"
        )
        == 1
    )
    assert "shipped.precision" in json.loads((work / "out" / "metrics.json").read_text())


def test_a_model_brings_its_own_threshold(work):
    """--threshold 0: the threshold of the model; another value is used for all models."""
    write_model(work / "model.safetensors", about={"match_threshold": 0.35})
    write_model(work / "other.safetensors")
    assert (
        run(
            work, "--no-refine", "--threshold", "0", "--also", f"other={work / 'other.safetensors'}"
        )
        == 0
    )
    found = json.loads((work / "out" / "metrics.json").read_text())
    assert (found["superglue.threshold"], found["other.threshold"]) == (0.35, 0.2)
    assert found["superglue.matches"] < found["other.matches"]
    assert found["superglue.recall_at_ratio_precision"] == found["other.recall_at_ratio_precision"]
    assert json.loads((work / "out" / "protocol.json").read_text())["model"]["threshold"] == 0.35


def test_growing_disturbances(work, monkeypatch):
    monkeypatch.setattr(
        "pipeline.evaluate.protocol.LEVELS", {"blur (px)": (heldout.blur, (0.0, 3.0))}
    )
    assert run(work, "--no-refine", "--robustness", "2") == 0
    lines = [
        line
        for line in read_csv(work / "out" / "robustness.csv")
        if line["condition"] == "blur (px)"
    ]
    assert [(line["level"], line["pairs"]) for line in lines] == [("0", "2"), ("3", "2")]
    page = (work / "out" / "index.html").read_text()
    assert "blur (px) 3" in page and "data:image/jpeg" in page


def test_unreadable_and_tiny_images_are_counted_and_listed(work, photo, capsys):
    images = {"good.png": photo, "tiny.png": photo[:40, :40]}
    write_image_set(work / "mixed", images, "test", broken=["broken.jpg"])
    assert run(work, "--no-refine", "--images", work / "mixed") == 0
    lines = read_csv(work / "out" / "bad_images.csv")
    assert {line["file"] for line in lines} == {"tiny.png", "broken.jpg"}
    assert "2 unreadable images left out" in capsys.readouterr().out
    write_image_set(work / "none", {}, "test", broken=["broken.jpg"])
    assert run(work, "--images", work / "none") == 1
    assert "none of the 1 images could be read" in capsys.readouterr().err


def test_a_folder_of_pairs_from_end_to_end(work, photo, capsys):
    for name, H in (("shifted", SHIFT), ("turned", TURN)):
        write_sequence(
            work / "pairs" / name, np.ascontiguousarray(photo[:240, :320]), {2: H, 3: np.eye(3)}
        )
    assert run(work, "--pairs", work / "pairs", "--resize", "0", "--max-keypoints", "300") == 0
    metrics = json.loads((work / "out" / "metrics.json").read_text())
    assert metrics["ratio_test.pairs"] == 4
    assert metrics["ratio_test.precision"] > 0.8 and metrics["ratio_test.auc_ransac_3"] > 0.5
    assert metrics["superglue.precision"] > 0.8 and metrics["superglue.auc_dlt_5"] > 0.5
    assert {line["scene"] for line in read_csv(work / "out" / "scenes.csv")} == {
        "shifted",
        "turned",
    }
    printed = capsys.readouterr().out
    assert (
        "pairs: 2 sequences, full size, 300 keypoints, 4 pairs" in printed and "turned" in printed
    )


def test_pairs_need_no_params_file_at_hand(work, photo, monkeypatch):
    write_sequence(work / "pairs" / "one", np.ascontiguousarray(photo[:240, :320]), {2: SHIFT})
    (work / "empty").mkdir()
    monkeypatch.chdir(work / "empty")
    words = ["--model", work / "model.safetensors", "--pairs", work / "pairs", "--out", "result"]
    assert errors.run(evaluate.main, [str(word) for word in words]) == 0
    assert (work / "empty" / "result" / "metrics.json").is_file()


def test_pairs_without_any_match_are_failures_not_gaps(work):
    flat = np.full((120, 160), 90, np.uint8)
    write_sequence(work / "pairs" / "flat", flat, {2: SHIFT})
    assert run(work, "--pairs", work / "pairs") == 0
    metrics = json.loads((work / "out" / "metrics.json").read_text())
    assert metrics["superglue.pairs"] == 1 and metrics["superglue.auc_ransac_10"] == 0.0
    assert metrics["superglue.precision"] == 0.0 and metrics["superglue.recall"] is None
    assert math.isinf(float(read_csv(work / "out" / "pairs.csv")[0]["error_ransac"]))


@pytest.mark.parametrize(
    "extra, words",
    [
        (["--model", "nowhere.safetensors"], "nowhere.safetensors: no such model"),
        (["--images", "nowhere"], "no manifest here"),
        (["--pairs", "nowhere"], "no such folder"),
        (["--params", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["--max-keypoints", "0"], "--max-keypoints 0: must be 1 or more"),
        (["--batch", "-1"], "--batch -1: must be 1 or more"),
        (["--device", "cuda:99"], "device cuda:99: not available here"),
        (["--out", __file__], "is a file; name a folder"),
        (["--paper", "0"], "--paper 0: must be 1 or more"),
        (["--paper", "--pairs", "x"], "--pairs and --paper are two evaluations"),
        (["--robustness", "3", "--pairs", "x"], "--robustness needs held-out images"),
        (["--estimators", "ransac,best"], "--estimators best: unknown"),
        (["--also", "x.safetensors"], "--also x.safetensors: must be NAME=FILE"),
        (["--also", "a.b=x"], "--also a.b=x: must be NAME=FILE"),
        (["--also", "nn=x"], "--also nn=x: there is a matcher called nn already"),
        (["--also", "shipped=nowhere.safetensors"], "nowhere.safetensors: no such model"),
    ],
)
def test_wrong_requests_are_one_line(work, capsys, extra, words):
    assert run(work, *extra) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1


def test_a_file_that_is_no_model(work, capsys):
    (work / "model.safetensors").write_bytes(b"\0" * 100)
    assert run(work) == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_no_held_out_image_at_all(work, photo, capsys):
    write_image_set(work / "held", {"a.png": photo}, "train")
    assert run(work, "--images", work / "held") == 2
    assert "no held-out image" in capsys.readouterr().err


def test_results_reach_the_run_of_the_training(work, monkeypatch):
    events = []

    class Run:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            events.append("closed")

        def log(self, metrics, step):
            events.append((metrics, step))

        def artifact(self, path, folder=""):
            assert path.exists()
            events.append((path.name, folder))

        def describe(self, result, note):
            events.append((result, note))

        def compare_with_champion(self, pairs):
            events.append(pairs.name)

    monkeypatch.setattr(evaluate.tracking, "attach", lambda path, training: Run())
    assert run(work, "--mlflow-run", "log.jsonl") == 0
    metrics, step = events[0]
    assert step == 7 and {"auc_5", "recall_at_p", "auc_5_gain"} <= set(metrics)
    assert (
        sum(name.startswith("verdict/") for name in metrics) == len(metrics) - 3
        and None not in metrics.values()
    )
    area = metrics["auc_5"]
    full = json.loads((work / "out" / "metrics.json").read_text())
    assert metrics["verdict/auc_5_aligned"] == full["superglue.auc_ransac_aligned_5"]
    best = max(full[f"{name}.auc_ransac_5"] for name in MATCHERS[1:])
    assert metrics["auc_5_gain"] == pytest.approx(area - best, abs=2e-6)
    short = json.loads((work / "out" / "summary.json").read_text())
    assert {name.rpartition("/")[2]: value for name, value in metrics.items()} == short and len(
        short
    ) <= 10
    (note,) = (event[1] for event in events if event[0] == f"AUC@5 {100 * area:.1f}")
    cells = [
        "SuperGlue (ours)",
        *(f"{100 * metrics[name]:.1f}" for name in ("auc_5", "verdict/auc_5_aligned")),
    ]
    assert f"| {' | '.join(cells)} |" in note.replace("&nbsp;&nbsp;&nbsp;", "").replace(
        "&nbsp;", " "
    )
    for name in ("gain-median", "gain-most"):
        assert f"get-artifact?path=test/pictures/{name}.png&run_uuid={{run_id}}" in note
        assert (work / "out" / "pictures" / f"{name}.png").is_file()
    assert ("pairs.csv", "test") in events and ("pictures", "test/pictures") in events
    assert events[-2:] == ["pairs.csv", "closed"]


def test_the_size_of_a_batch_does_not_matter(work, done):
    run(work, "--batch", "1")
    one, many = (read_csv(folder / "out" / "pairs.csv") for folder in (work, done.folder))
    assert [line["matches"] for line in one] == [line["matches"] for line in many]


class Counted:
    """A source that has only the number of pairs of each scene."""

    def __init__(self, counts):
        self.counts = counts

    def __len__(self):
        return len(self.counts)

    def pairs_in(self, index):
        return self.counts[index]


@given(st.lists(st.integers(1, 12), max_size=20), st.integers(1, 10))
def test_units_hold_every_scene_once_in_order(counts, batch):
    units = units_of(Counted(counts), batch)
    assert [index for unit in units for index in unit] == list(range(len(counts)))
    for unit in units:
        assert unit and (len(unit) == 1 or sum(counts[index] for index in unit) <= batch)


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_any_number_of_processes_gives_the_same_bytes(work, photo, root, processes):
    images = {f"{n}.png": np.ascontiguousarray(photo[20 * n : 20 * n + 280]) for n in range(5)}
    write_image_set(work / "five", images, "test", broken=["bad.jpg"])
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    assert run(work, "--images", work / "five") == 0
    words = [
        "--model",
        "model.safetensors",
        "--params",
        "params.yaml",
        "--images",
        "five",
        "--batch",
        "4",
    ]
    words += ["--threshold", "0.1"]
    torchrun = [
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={processes}",
        "--master_port",
        str(free_port()),
    ]
    command = [sys.executable, *torchrun, "-m", "pipeline.evaluate", *words, "--out", "many"]
    done = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    # Matches, as detected, aligned, pairs with nothing in common
    assert done.stdout.count("SuperGlue (ours)") == 4
    for name in (
        "metrics.json",
        "pairs.csv",
        "scenes.csv",
        "bad_images.csv",
        "curves/calibration.csv",
    ):
        assert (work / "out" / name).read_bytes() == (work / "many" / name).read_bytes(), name


def test_a_wrong_request_ends_every_process(work, photo, root):
    for name in "abc":
        write_sequence(work / "pairs" / name, np.ascontiguousarray(photo[:120, :160]), {2: SHIFT})
    (work / "pairs" / "b" / "2.png").write_bytes(b"nothing")
    words = [
        "--model",
        "model.safetensors",
        "--params",
        "params.yaml",
        "--pairs",
        "pairs",
        "--batch",
        "1",
    ]
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--master_port",
        str(free_port()),
    ]
    command = [sys.executable, *torchrun, "-m", "pipeline.evaluate", *words, "--out", "many"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0 and "2.png: not an image" in done.stderr, done.stderr
