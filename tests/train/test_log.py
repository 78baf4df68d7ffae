"""What DVC tracks of a training beside its model: curves, their picture, and metrics.json."""

import json
from pathlib import Path
from unittest import mock

import pytest
from processes import in_group

from pipeline.train import log
from pipeline.train.log import TrainingLog

CURVES = {
    "train": [{"step": 10, "loss": 2.5}, {"step": 20, "loss": 0.8}],
    "val": [
        {"step": 0, "loss": 3.1, "f1": 52.2, "f1_ratio_test": 63.8},
        {"step": 20, "loss": 0.7, "f1": 66.6, "f1_ratio_test": 63.8},
    ],
}


def test_the_same_curves_give_the_same_files(tmp_path):
    log.write_curves(tmp_path, CURVES, 20)
    picture = (tmp_path / "curves.svg").read_bytes()
    assert b"<svg" in picture
    log.write_curves(tmp_path, CURVES, 20)
    assert (tmp_path / "curves.svg").read_bytes() == picture
    assert (tmp_path / "curves/train.csv").read_text() == "step,loss\n10,2.5\n20,0.8\n"
    # a training that has only begun, in the folder of another
    log.write_curves(tmp_path, {"val": CURVES["val"][:1]}, 0)
    assert not (tmp_path / "curves/train.csv").exists()


def test_a_point_with_other_values_keeps_those_of_all_points(tmp_path):
    """Such as after `--continue` with negative pairs among the validation pairs."""
    curves = {"val": [{"step": 1234567, "f1": 50.0}, {"step": 1234568, "loss": 1 / 3}]}
    columns, tensors = log.pack_curves(curves)
    curves = log.unpack_curves(tensors, {"columns": columns})
    log.write_curves(tmp_path, curves, 0)
    lines = (tmp_path / "curves/validation.csv").read_text().splitlines()
    assert lines == ["step,f1,loss", "1234567,50,nan", "1234568,nan,0.333333"]


def test_metrics_are_in_percent(tmp_path):
    figures = {"f1": 0.66995, "f1_ratio_test": 0.638, "precision": 1.0, "recall": 0.0, "loss": 0.5}
    best = {"step": 20, "validation": figures, "skipped_steps": 1, "train": {"steps": 30}}
    log.write_metrics(tmp_path, best)
    metrics = json.loads((tmp_path / log.METRICS).read_text())
    assert metrics["f1"] == pytest.approx(67.0, abs=0.006) and metrics["precision"] == 100.0
    assert metrics["best_step"] == 20 and metrics["step"] == 30 and metrics["skipped_steps"] == 1


def log_two_steps(context):
    """Return the curves of two steps of one pair on rank 0, and of three on rank 1."""
    loss = (4.0, 6.0)[context.rank]  # sum over the pairs of this rank
    pairs = (1.0, 3.0)[context.rank]
    run, bar = mock.Mock(), mock.Mock()
    reports = TrainingLog(Path("unused"), run, bar, context, 4, 0.5, None)
    for _ in range(2):
        reports.add_step({"loss": loss, "pairs": pairs}, 0.0)
    reports.log_point(2, {"lr": 0.1})
    return reports.curves


def test_a_point_has_the_mean_over_the_pairs_of_all_ranks():
    point = {"step": 2, "loss": 2.5, "lr": 0.1}  # (4 + 6) / (1 + 3)
    assert in_group(2, log_two_steps) == [{"train": [point]}] * 2
