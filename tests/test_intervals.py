"""Bootstrap intervals: against the closed form, paired differences, and what has no interval."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.evaluation import intervals, metrics
from pipeline.evaluation.matchers import MATCHERS
from pipeline.evaluation.scoring import Row


def test_interval_of_a_mean_agrees_with_the_normal_one():
    values = np.random.default_rng(1).normal(0.4, 0.2, 800)
    found = intervals.interval(values)
    half = 1.96 * values.std() / math.sqrt(800)
    assert found["value"] == pytest.approx(values.mean()) and found["pairs"] == 800
    assert found["low"] == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found["high"] == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_interval_is_the_same_every_time_and_ignores_what_is_no_number():
    values = np.array([0.1, 0.5, np.nan, 0.9])
    assert intervals.interval(values) == intervals.interval(values[[0, 1, 3]])


def test_one_value_and_none_have_no_interval():
    one, none = intervals.interval(np.array([0.5])), intervals.interval(np.array([]))
    assert one["value"] == 0.5 and math.isnan(one["low"]) and one["pairs"] == 1
    assert math.isnan(none["value"]) and none["pairs"] == 0
    assert intervals.verdict(math.nan, math.nan) == "undecided"


def test_coverage_of_the_interval_is_near_its_level():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(60):
        found = intervals.interval(rng.uniform(0, 1, 60))
        hits += found["low"] <= 0.5 <= found["high"]
    assert hits >= 51  # 57 expected


def rows_of(ours, baseline):
    rows = []
    for index, (first, second) in enumerate(zip(ours, baseline)):
        for matcher in MATCHERS:
            error = first if matcher == "superglue" else second + (matcher == "nn")
            counts = metrics.MatchCounts(10, 5, 8, 4)
            errors = {"ransac": error, "dlt": error}
            rows.append(Row(str(index), "s", matcher, 10, 10, counts, errors, {}))
    return rows


def test_paired_differences_see_what_separate_intervals_cannot():
    rng = np.random.default_rng(3)
    hard = rng.uniform(0, 9, 40)  # pairs differ much, matchers by a constant 0.3 px
    rows = rows_of(hard, hard + 0.3)
    lines = {line["figure"]: line for line in intervals.differences(rows)}
    found = lines["auc_ransac_10"]
    assert found["baseline"] in ("mutual_nn", "ratio_test") and found["verdict"] == "better"
    assert found["value"] == pytest.approx(0.03, abs=1e-6) and found["high"] - found["low"] < 0.001
    assert lines["precision"]["verdict"] == "undecided" and lines["precision"]["value"] == 0.0
    separate = {(line["matcher"], line["figure"]): line for line in intervals.intervals(rows, MATCHERS)}
    ours, theirs = (separate[name, "auc_ransac_10"] for name in ("superglue", "ratio_test"))
    assert ours["low"] < theirs["high"]  # their intervals overlap
    assert ours["value"] == pytest.approx(metrics.auc(hard, 10), abs=1e-6)


def test_failures_count_in_intervals():
    rows = rows_of([math.inf, 0.0], [0.5, 0.5])
    lines = {(line["matcher"], line["figure"]): line for line in intervals.intervals(rows, MATCHERS)}
    assert lines["superglue", "auc_dlt_1"]["value"] == 0.5 and lines["superglue", "auc_dlt_1"]["pairs"] == 2
