"""The stage from end to end on tiny images with an untrained model, and what it refuses."""

import math
import shutil
import threading
from unittest import mock

import cv2
import numpy as np
import pytest
from made_evaluations import make_workspace, read_csv, read_metrics, run
from made_scenes import (
    CAMERA,
    SHIFT,
    TURN,
    format_pair,
    write_image_set,
    write_model,
    write_sequence,
)
from reading import read_error, read_files, read_json

from pipeline import errors
from pipeline.evaluate import __main__ as evaluate
from pipeline.evaluate import evaluation, pairs
from pipeline.evaluate.estimators import DEFAULT
from pipeline.evaluate.matchers import BOUND, MATCHERS

ERRORS = [f"error_{name}{end}" for name in DEFAULT for end in ("", "_refined")]


@pytest.fixture
def work(tmp_path, photo):
    return make_workspace(tmp_path, photo)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, photo):
    """The folder of an evaluation with `--bound`, run once."""
    folder = make_workspace(tmp_path_factory.mktemp("evaluated"), photo)
    assert run(folder, "--bound", draw=True) == 0
    return folder


def test_held_out_images_from_end_to_end(evaluated):
    out = evaluated / "out"
    lines = read_csv(out / "pairs.csv")
    assert {line["matcher"] for line in lines} == {*MATCHERS, BOUND}
    names = [line["pair"] for line in lines if line["matcher"] == BOUND]
    assert names == [f"{n}.png#{k}" for n in "ab" for k in range(3)]
    assert {"best-1", "median-1"} < {path.stem for path in (out / "pictures").iterdir()}
    curves = {path.stem for path in (out / "curves").iterdir()}
    assert curves == {*ERRORS, "calibration", "precision_recall"}
    assert read_json(out / "protocol.json")["models"]["superglue"]["step"] == 7
    assert read_csv(out / "bad_images.csv") == []
    # the bound is no baseline
    metrics = read_metrics(evaluated)
    assert metrics["true_matches.precision"] == metrics["true_matches.recall"] == 1.0
    assert BOUND not in {line["baseline"] for line in read_csv(out / "differences.csv")}


def test_metrics_can_be_computed_again_from_pairs_csv(evaluated):
    metrics = read_metrics(evaluated)
    for matcher in MATCHERS:
        lines = read_csv(evaluated / "out/pairs.csv")
        lines = [line for line in lines if line["matcher"] == matcher]
        for name in ERRORS:
            pair_errors = np.array([float(line[name]) for line in lines])
            for pixels in (1, 3, 5, 10):
                by_hand = np.mean(np.maximum(0.0, 1 - pair_errors / pixels))
                area = metrics[f"{matcher}.{name.replace('error', 'auc')}_{pixels}"]
                assert area == pytest.approx(by_hand, abs=2e-4)  # four decimals in both files
        precision = [int(line["correct"]) / max(1, int(line["matches"])) for line in lines]
        assert metrics[f"{matcher}.precision"] == pytest.approx(np.mean(precision), abs=6e-5)
    for row in read_csv(evaluated / "out/intervals.csv"):
        assert float(row["value"]) == metrics[f"{row['matcher']}.{row['metric']}"]


def test_operating_points_lie_on_the_precision_recall_curves(evaluated):
    values = read_metrics(evaluated)
    rows = read_csv(evaluated / "out/curves/precision_recall.csv")
    for matcher in ("superglue", "ratio_test"):
        curve = [row for row in rows if row["matcher"] == matcher]
        points = np.array([(float(row["recall"]), float(row["precision"])) for row in curve])
        point = values[f"{matcher}.recall"], values[f"{matcher}.precision"]
        # The curve has at most 512 of the thresholds, so a few matches lie between two points.
        assert np.linalg.norm(points - point, axis=1).min() < 0.02
    assert b"<svg" in (evaluated / "out/curves/precision_recall.svg").read_bytes()


def test_only_estimates_change_with_refined_matches(work, evaluated):
    assert run(work, "--no-refine", "--bound") == 0
    values = read_metrics(evaluated)
    detected = {name: value for name, value in values.items() if "refined" not in name}
    assert detected == read_metrics(work)
    for matcher in ("mutual_nn", "ratio_test", "true_matches"):
        assert values[f"{matcher}.auc_ransac_refined_1"] != values[f"{matcher}.auc_ransac_1"] > 0.05


def test_files_of_another_evaluation_are_replaced(work, evaluated):
    shutil.copytree(evaluated / "out", work / "out")
    assert run(work, "--estimators", "magsac") == 0
    metrics = read_metrics(work)
    assert "superglue.auc_magsac_3" in metrics and not any("ransac" in name for name in metrics)
    curves = {path.stem for path in (work / "out/curves").iterdir()}
    assert curves == {
        "error_magsac", "error_magsac_refined", "calibration", "precision_recall"
    }  # fmt: skip


@pytest.mark.slow
def test_all_files_have_the_same_bytes_in_another_clone(work, monkeypatch):
    """Two clones have one dvc.lock: no output has a time, a path or the name of a machine."""
    levels = {"blur (px)": (pairs.blur, (0.0, 3.0))}
    monkeypatch.setattr("pipeline.evaluate.pairs.DISTURBANCES", levels)
    shutil.copytree(work, work / "elsewhere")
    options = ("--robustness", "2", "--no-refine")
    assert run(work, *options) == run(work / "elsewhere", *options) == 0
    files = read_files(work / "out")
    assert len(files) > 10 and files == read_files(work / "elsewhere/out")
    lines = read_csv(work / "out/robustness.csv")
    assert list(lines[0]) == ["condition", "level", "matcher", "metric", "value", "pairs"]
    rows = {
        (float(line["level"]), line["matcher"], line["pairs"])
        for line in lines
        if (line["condition"], line["metric"]) == ("blur (px)", "auc_ransac_5")
    }
    names = ("superglue", "ratio_test")
    assert rows == {(level, name, "2") for level in (0.0, 3.0) for name in names}


def test_another_model_is_in_every_table_with_its_own_threshold(work):
    write_model(work / "model.safetensors", about={"match_threshold": 0.35, "step": 0})
    write_model(work / "other.safetensors", sinkhorn_iterations=11)
    also = "--also", f"b={work}/other.safetensors"
    assert run(work, "--no-refine", *also, threshold=()) == 0
    values = read_metrics(work)
    models = read_json(work / "out/protocol.json")["models"]
    assert [models[name]["threshold"] for name in ("superglue", "b")] == [0.35, 0.2]
    assert values["superglue.matches"] < values["b.matches"]
    rows = read_csv(work / "out/differences.csv")
    (gain,) = (row["value"] for row in rows if (row["metric"], row["baseline"]) == ("recall", "b"))
    by_hand = values["superglue.recall"] - values["b.recall"]
    assert float(gain) == pytest.approx(by_hand, abs=2e-4)


MINE = """
def first(features0, features1):
    return [0] * len(features0.keypoints), [0.5] * len(features0.keypoints)
"""


def test_a_function_is_a_matcher_too(work, monkeypatch):
    (work / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(work)
    assert run(work, "--no-refine", "--also", "mine=mine:first") == 0
    rows = [row for row in read_csv(work / "out/pairs.csv") if row["matcher"] == "mine"]
    assert rows and all(row["matches"] == row["keypoints0"] for row in rows)


def test_unreadable_and_tiny_images_are_counted_and_listed(work, photo, capsys):
    """Validation images stand in where there are no test images."""
    images = {"good.png": photo, "tiny.png": photo[:40, :40]}
    write_image_set(work / "mixed", images, "val", broken=["broken.jpg"])
    assert run(work, "--no-refine", "--images", work / "mixed") == 0
    lines = read_csv(work / "out/bad_images.csv")
    assert {line["file"] for line in lines} == {"tiny.png", "broken.jpg"}
    printed = capsys.readouterr()
    assert "bad_images.csv" in printed.out
    assert "validation images" in printed.err and "(val)" in printed.out
    write_image_set(work / "none", {}, "test", broken=["broken.jpg"])
    assert run(work, "--images", work / "none") == 1
    assert "broken.jpg" in capsys.readouterr().err


def test_a_folder_of_pairs_from_end_to_end(work, photo, capsys, monkeypatch):
    """It needs no params.yaml at hand, and pairs without any match are failures, not gaps."""
    for name, H in (("shifted", SHIFT), ("turned", TURN)):
        image = np.ascontiguousarray(photo[:240, :320])
        write_sequence(work / "pairs" / name, image, {2: H, 3: np.eye(3)})
    write_sequence(work / "pairs/flat", np.full((240, 320), 90, np.uint8), {2: SHIFT})
    (work / "params.yaml").unlink()
    monkeypatch.chdir(work)
    words = ["--model", "model.safetensors", "--pairs", "pairs", "--resize", "0"]
    words += ["--max-keypoints", "300", "--threshold", "0.1"]
    assert errors.run(evaluate.main, [*words, "--out", "out"]) == 0
    rows = read_csv(work / "out/pairs.csv")
    assert {row["scene"] for row in rows} == {"flat", "shifted", "turned"}
    assert all(math.isinf(float(row["error_ransac"])) for row in rows if row["scene"] == "flat")
    rows_by_pair = {(row["pair"], row["matcher"]): row for row in rows}
    for matcher in ("ratio_test", "superglue"):
        assert float(rows_by_pair["shifted/1-2", matcher]["precision"]) > 0.8
        assert float(rows_by_pair["shifted/1-2", matcher]["error_ransac"]) < 1.5
    (work / "pairs/turned/2.png").write_bytes(b"nothing")
    assert errors.run(evaluate.main, [*words, "--out", "out"]) == 2
    assert "2.png" in read_error(capsys)


@pytest.mark.parametrize("count", [1, 6])
def test_ctrl_c_ends_the_evaluation_and_its_threads(work, monkeypatch, count):
    """Also just after the last pair: Python loses a Ctrl-C while it deletes a generator."""
    update = evaluation.Progress.update

    def interrupt(bar, n=1):
        update(bar, n)
        if bar.n == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(evaluation.Progress, "update", interrupt)
    assert run(work, "--no-refine") == 130
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    assert not (work / "out/metrics.json").exists()


@pytest.mark.parametrize(
    "options, name",
    [
        (["--images", "nowhere"], "nowhere"),
        (["--threshold", "1"], "--threshold"),
        (["--short-side", "480"], "--short-side"),  # without --pairs
        (["--out", __file__], "test_evaluate.py"),  # a file that would be replaced
    ],
)
def test_a_wrong_request_names_the_file_or_option(work, capsys, options, name):
    assert run(work, *options, threshold=()) == 2
    assert name in read_error(capsys)


def test_results_reach_the_run_of_the_training(work, monkeypatch):
    mlflow_run = mock.MagicMock()
    mlflow_run.__enter__.return_value = mlflow_run
    monkeypatch.setattr(evaluate.tracking, "attach", lambda path, training: mlflow_run)
    assert run(work, "--mlflow-run", "mlflow.json") == 0
    values, step = mlflow_run.log_metrics.call_args[0]
    assert step == 7 and all(name.startswith("test/") for name in values)
    full = read_metrics(work)
    area = 100 * full["superglue.auc_ransac_5"]
    assert values["test/auc_5"] == pytest.approx(area, abs=6e-3)  # in percent, two decimals
    summary = read_json(work / "out/summary.json")
    assert {f"test/{name}": summary[name] for name in summary} == values
    title, description = mlflow_run.describe.call_args[0]
    assert f"{area:.1f}" in title and "test/index.html" in description
    mlflow_run.add_artifact.assert_any_call(work / "out", "test")


def test_a_textured_plane_from_end_to_end(tmp_path, photo, root, capsys):
    """Three pairs of a plane at depth 5 in front of camera 0."""
    moved = np.eye(4)
    moved[:3, 3] = [0.5, 0.1, 0.0]
    H = CAMERA @ (np.eye(3) + np.outer(moved[:3, 3], [0, 0, 1]) / 5) @ np.linalg.inv(CAMERA)
    image = cv2.resize(photo, (640, 480))
    cv2.imwrite(str(tmp_path / "a.png"), image)
    cv2.imwrite(str(tmp_path / "b.png"), cv2.warpPerspective(image, H, (640, 480)))
    back = format_pair("b.png", "a.png", pose=np.linalg.inv(moved))
    (tmp_path / "pairs.txt").write_text(
        "\n".join([format_pair("a.png", "b.png", pose=moved), back, back])
    )
    model = write_model(tmp_path / "model.safetensors", layers=1)
    words = ["--model", model, "--poses", tmp_path / "pairs.txt", "--images", tmp_path]
    words += ["--params", root / "presets/sample.yaml", "--device", "cpu"]
    words = [str(word) for word in (*words, "--out", tmp_path / "out")]
    assert errors.run(evaluate.main, words) == 0
    values = read_json(tmp_path / "out/metrics.json")
    assert values["ratio_test.precision"] > 0.8
    # the operating point of the ratio test, and the best of ours there
    name = "matching_score_at_ratio_precision"
    assert values[f"ratio_test.{name}"] == values["ratio_test.matching_score"]
    assert 0 <= values[f"superglue.{name}"] <= 1 and "superglue.recall" not in values
    page = (tmp_path / "out/index.html").read_text()
    pictures = list((tmp_path / "out/pictures").iterdir())
    assert page.count("data:image/jpeg") == len(pictures) == 3
    (tmp_path / "b.png").unlink()
    assert errors.run(evaluate.main, words) == 2
    assert "b.png" in read_error(capsys)
