"""Means and their intervals: against closed forms, over clusters, paired differences, and what has
no interval.
"""

import numpy as np
import pytest

from pipeline import bootstrap
from pipeline.evaluate import metrics
from pipeline.evaluate.matchers import MATCHERS, OURS, RATIO_TEST
from pipeline.evaluate.scoring import MatchCounts, PairResult, PairRow, ScoredMatches
from pipeline.report.rows import Measure

ROUNDED = 1e-6  # six decimals
AUC = Measure("auc", "ransac", limit=10)
PRECISION = Measure("precision")


def mean(values, clusters=None):
    """The line of a mean; without clusters, each pair is one."""
    values = np.asarray(values, np.float64)
    names = [str(n) for n in (range(len(values)) if clusters is None else clusters)]
    return bootstrap.Clusters(names).mean(values).line()


def test_interval_of_a_mean_agrees_with_scipys():
    from scipy import stats

    values = np.random.default_rng(1).normal(0.4, 0.2, 40)
    found = mean(values)
    assert found["value"] == pytest.approx(values.mean(), abs=ROUNDED) and found["pairs"] == 40
    other = stats.bootstrap((values,), np.mean, n_resamples=4000, method="percentile")
    assert found["low"] == pytest.approx(other.confidence_interval.low, abs=0.01)
    assert found["high"] == pytest.approx(other.confidence_interval.high, abs=0.01)


def test_pairs_of_one_photograph_count_as_one():
    """Twenty equal pairs of each of thirty photographs have the interval of one pair of each."""
    values = np.random.default_rng(5).uniform(0, 1, 30)
    many = mean(np.repeat(values, 20), np.repeat(np.arange(30), 20))
    assert many == {**mean(values), "pairs": 600}
    independent = mean(np.repeat(values, 20))
    assert many["high"] - many["low"] > 3 * (independent["high"] - independent["low"])


def test_interval_is_the_same_every_time_and_ignores_what_is_no_number():
    known = np.array([0.1, 0.5, np.nan, 0.9])
    names = ["a", "b", "b", "c"]
    assert mean(known, names) == mean(known, names)
    assert mean(known, names) == mean(known[[0, 1, 3]], ["a", "b", "c"])


def test_one_cluster_and_none_have_no_interval():
    one = mean([0.5, 0.7], ["a", "a"])
    none = mean([])
    assert one["value"] == pytest.approx(0.6) and one["low"] is None and one["pairs"] == 2
    assert none["value"] is None and none["pairs"] == 0


NOTHING = ScoredMatches(np.zeros(0), np.zeros(0, bool), np.zeros(0, bool), 8)


def compare(ours, baseline):
    """Our errors with a baseline's, each pair of another photograph."""
    results = []
    for index, (first, second) in enumerate(zip(ours, baseline)):
        rows = {}
        for matcher in MATCHERS:
            error = first if matcher == OURS else second + (matcher == "nn")
            errors = {Measure("error", name): error for name in ("ransac", "dlt")}
            names = str(index), f"photograph {index}", matcher
            rows[matcher] = PairRow(*names, 10, 10, MatchCounts(10, 5, 8, 4), errors, {})
        results.append(PairResult((index, 0), rows, {OURS: NOTHING}))
    return metrics.compare(results, {OURS: 0.2})


def test_paired_differences_see_what_separate_intervals_cannot():
    rng = np.random.default_rng(3)
    hard = rng.uniform(0, 9, 40)  # pairs differ much, matchers by a constant 0.3 px
    compared = compare(hard, hard + 0.3)
    lines = {row.measure: row for row in compared.differences}
    found = lines[AUC]
    assert found.baseline in ("mutual_nn", "ratio_test") and found.verdict == "better"
    assert found.value == pytest.approx(0.03, abs=ROUNDED) and found.high - found.low < 0.001
    assert lines[PRECISION].verdict == "equal" and lines[PRECISION].value == 0.0
    separate = {row[:2]: row for row in compared.rows}
    ours, theirs = (separate[name, AUC] for name in (OURS, RATIO_TEST))
    assert ours.low < theirs.high  # their intervals overlap
    assert ours.value == pytest.approx(bootstrap.auc_by_pair(hard, 10).mean(), abs=ROUNDED)


@pytest.mark.parametrize("photographs, verdict", [(5, "too few"), (6, "better")])
def test_a_few_photographs_decide_nothing(photographs, verdict):
    """Ours is better on every pair; with five photographs that happens by chance once in sixteen
    times.
    """
    errors = np.linspace(1, 2, photographs)
    compared = compare(errors, errors + 1)
    (found,) = (row.verdict for row in compared.differences if row.measure == AUC)
    assert (found, compared.clusters) == (verdict, photographs)
