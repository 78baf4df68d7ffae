"""What a person sees of long work: the line of a training, and the mark it has to beat."""

from __future__ import annotations

import io
import os
import sys
import time

import made_views
import numpy as np
import pytest
from processes import in_group

from pipeline.features.store import Store
from pipeline.processes import distributed
from pipeline.train.live_line import LiveLine
from pipeline.train.objective import MatchingObjective
from pipeline.train.pairs.loader import load_batch
from pipeline.train.pairs.order import validation_pairs
from pipeline.train.validation import CONFIDENCE_BINS, HeldOut, ratio_test_f1
from superglue_sift.classical import neighbours, unit_rows
from superglue_sift.pair_inputs import choose_orientations
from superglue_sift.progress import Progress
from superglue_sift.sift import KEYPOINT
from superglue_sift.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.truth import IGNORED, ground_truth

FIGURES = {"loss": 0.951, "precision": 0.845, "recall": 0.637, "f1": 0.7266}


def objective() -> MatchingObjective:
    return MatchingObjective(SuperGlue(SuperGlueConfig(dim=16, layers=1, heads=2)), 3.0, 5.0)


def mark_of(context, folder: str) -> float:
    store = Store(folder)
    samples = validation_pairs(0, len(store), store.views_per_image, 12)
    return ratio_test_f1(objective(), HeldOut(store, samples, 48, context))


def by_hand(folder: str) -> float:
    """The best F1 over the ratios of the bins, pair by pair with the matcher of the evaluation."""
    store = Store(folder)
    batch = choose_orientations(
        load_batch(store, validation_pairs(0, len(store), store.views_per_image, 12), 48)
    )
    truth = ground_truth(batch, 3.0, 5.0).matches0.numpy()
    records = [
        [each[i, : counts[i]].numpy().reshape(-1).view(KEYPOINT) for i in range(len(batch))]
        for each, counts in (
            (batch.records0, batch.counts0.tolist()),
            (batch.records1, batch.counts1.tolist()),
        )
    ]
    best = 0.0
    for ratio in 1.0 - np.arange(CONFIDENCE_BINS) / CONFIDENCE_BINS:
        right = found = 0
        for own, other, partners in zip(*records, truth):
            near = neighbours(unit_rows(own), unit_rows(other))
            passed = near.mutual & (near.ratio < min(ratio, 1.0 - 1e-9))
            matches = np.where(passed, near.nearest, -1)
            asked = partners[: len(matches)]
            counted = (matches >= 0) & (asked != IGNORED)
            found = found + counted.sum()
            right = right + (counted & (matches == asked)).sum()
        best = max(best, 2 * right / (found + (truth >= 0).sum()))
    return best


def test_the_mark_is_the_best_f1_of_the_ratio_test_whatever_the_ratio(tmp_path, monkeypatch):
    """2 TP / (found + true) is the harmonic mean of precision and recall."""
    easy = made_views.made_records
    harder = lambda rng, xy, rows: easy(rng, xy, rows + rng.normal(0, 70, rows.shape))  # noqa: E731
    monkeypatch.setattr(made_views, "made_records", harder)
    folder = str(made_views.made_store(tmp_path))
    mark = mark_of(distributed.start(), folder)
    assert 0.2 < mark < 1.0 and mark == pytest.approx(by_hand(folder), abs=0.01)
    assert in_group(2, mark_of, folder) == [mark, mark]


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self):
        return True

    def fileno(self):
        return 2


def test_on_a_terminal_a_training_is_one_line(monkeypatch):
    monkeypatch.setattr("superglue_sift.progress.EVERY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((80, 24)))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    line = LiveLine(2400, 400, 0.6512, 0.7224, True)
    time.sleep(0.01)
    line.step({"loss": 2.0, "pairs": 4.0})
    line.validated(401, FIGURES)
    line.step({"loss": float("nan"), "pairs": 4.0})
    line.validated(402, {**FIGURES, "f1": 0.7216})
    line.step({"loss": 6.0, "pairs": 4.0})
    line.close()
    drawn = terminal.getvalue()
    assert drawn.count("\n") == 1 and drawn.endswith("\n")  # drawn over, but for the last
    lines = drawn.split("\r")[2:]
    assert max(map(len, lines)) <= 80
    assert "train:  17%" in lines[0] and "401/2400" in lines[0]
    assert lines[0].endswith(", loss 0.50, ratio test 65.1]")
    assert ", loss 0.50, F1 72.7 (+0.4), " in lines[1]  # what 80 columns hold
    assert ", loss 0.60, F1 72.2 (-0.5), " in lines[2]  # 0.9 of the loss before, 0.1 of 1.5


def test_in_a_log_a_training_is_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr("superglue_sift.progress.EVERY_SECONDS", (0.0, 0.0))
    line = LiveLine(100, 0, 0.6512, None, True)
    time.sleep(0.01)
    line.validated(0, {**FIGURES, "f1": 0.7224})
    line.step({"loss": 2.0, "pairs": 4.0})
    line.validated(1, FIGURES)
    first, step, second = capsys.readouterr().err.splitlines()
    rest = "ratio test 65.1 %; loss 0.951, precision 84.5 %, recall 63.7 %"
    assert first == f"validation at step 0: F1 72.2 %; {rest}"
    assert step.startswith("train:   1% 1/100 [00:00<")
    assert "loss 0.50, F1 72.2, ratio test 65.1" in step
    assert (
        second == f"validation at step 1: F1 72.7 %, +0.4 from the best before; {rest}"
        and "\033" not in second
    )
    other = LiveLine(100, 0, 0.65, None, False)  # of another rank
    other.step({"loss": 2.0, "pairs": 4.0})
    other.validated(1, FIGURES)
    other.close()
    assert capsys.readouterr().err == ""


def test_progress_prints_lines_with_an_eta_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("superglue_sift.progress.EVERY_SECONDS", (0.0, 0.0))
    bar = Progress(total=100, desc="train", unit="step", initial=40)
    bar.show("loss 0.25")
    time.sleep(0.01)
    bar.update(30)
    shown = capsys.readouterr().err
    assert "train:  70% 70/100 [00:00<00:00," in shown and "loss 0.25" in shown
    monkeypatch.setattr("superglue_sift.progress.EVERY_SECONDS", (1e9, 1e9))
    assert list(Progress([1, 2], desc="two", unit="thing")) == [1, 2]
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "two: 100% 2/2" in shown
    list(Progress([1, 2], desc="two", unit="thing", disable=True))
    list(Progress([], desc="none", unit="thing"))
    assert capsys.readouterr().err == ""
