"""What DVC tracks of a training beside its model: curves, their picture, and metrics.json."""

import json

import pytest

from pipeline.train import log

TEXTS = {
    "train": "step,loss\n10,2.5\n20,0.8\n",
    "val": "step,loss,f1,f1_ratio_test\n0,3.1,52.2,63.8\n20,0.7,66.6,63.8\n",
}


def test_the_picture_shows_both_curves_the_ratio_test_and_the_step_that_is_kept(tmp_path):
    log.write_curves(tmp_path, TEXTS, 20)
    first = (tmp_path / "curves.svg").read_bytes()
    for words in ("training", "validation", "ratio test", "kept: step 20", "F1 on validation"):
        assert words in first.decode()
    log.write_curves(tmp_path, TEXTS, 20)
    assert (tmp_path / "curves.svg").read_bytes() == first
    assert (tmp_path / "curves/train.csv").read_text() == TEXTS["train"]
    # a training that has only begun, in the folder of another
    log.write_curves(tmp_path, {"val": TEXTS["val"][:60]}, 0)
    assert not (tmp_path / "curves/train.csv").exists()


def test_metrics_are_in_percent(tmp_path):
    figures = {"f1": 0.66995, "f1_ratio_test": 0.638, "precision": 1.0, "recall": 0.0, "loss": 0.5}
    best = {"step": 20, "validation": figures, "skipped_steps": 1, "train": {"steps": 30}}
    log.write_metrics(tmp_path, best)
    found = json.loads((tmp_path / log.METRICS).read_text())
    assert found["f1"] == pytest.approx(67.0, abs=0.006) and found["precision"] == 100.0
    assert found["best_step"] == 20 and found["step"] == 30 and found["skipped_steps"] == 1
