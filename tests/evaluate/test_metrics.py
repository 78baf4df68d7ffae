"""Metrics against closed forms, cases computed by hand, and independent computations; intervals
over scenes, and paired differences.
"""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_evaluations import make_results, make_rows

from pipeline.evaluate import metrics
from pipeline.evaluate.matchers import OURS, RATIO_TEST

pytestmark = pytest.mark.cu111
INF = float("inf")
ROUNDED = 1e-6  # six decimals
N = 26


def test_auc_of_cases_made_by_hand():
    aucs = metrics.compute_pair_aucs([0.0, 1.0, 4.0, 9.0, INF, float("nan")], 4)
    assert aucs.tolist() == [1.0, 0.75, 0.0, 0.0, 0.0, 0.0]


def mean(values, scenes=None):
    """The row of a mean. Without scenes, each pair is a scene."""
    index = pd.Index(range(len(values)) if scenes is None else scenes, name="scene")
    frame = pd.DataFrame({"mean": values}, index)
    return metrics.summarize(frame, metrics.bootstrap_scenes(frame)).loc["mean"]


def test_the_interval_of_a_mean_of_zeros_and_ones_is_that_of_the_binomial():
    """Of 26 draws, each 1 with probability 0.5, at most 7 are ones in 1.4 % of the resamples, and
    at most 8 in 3.8 %: with 2,000 resamples, 2.5 % are three deviations away from both. An interval
    of 90 % would end at 9.
    """
    row = mean(np.arange(N) % 2)
    assert row["value"] == 0.5 and row["pairs"] == N
    assert row["low"] == pytest.approx(8 / N, abs=ROUNDED)
    assert row["high"] == pytest.approx(18 / N, abs=ROUNDED)


def test_pairs_of_one_photograph_count_as_one():
    """Twenty equal pairs of each of thirty photographs have the interval of one pair of each."""
    values = np.random.default_rng(5).uniform(0, 1, 30)
    many = mean(np.repeat(values, 20), np.repeat(np.arange(30), 20))
    assert many.drop("pairs").to_dict() == pytest.approx(mean(values).drop("pairs").to_dict())
    assert many["pairs"] == 600
    independent = mean(np.repeat(values, 20))
    assert many["high"] - many["low"] > 3 * (independent["high"] - independent["low"])


def test_a_resample_has_all_pairs_of_its_scenes():
    """Scene a has one pair, and b has three. Together they have the mean 3/4, not 1/2."""
    values = pd.DataFrame({"mean": [0.0, 1, 1, 1]}, pd.Index(list("abbb"), name="scene"))
    assert set(metrics.bootstrap_scenes(values)["mean"]) == {0.0, 0.75, 1.0}


def test_a_table_has_the_intervals_of_its_columns():
    """All columns are resampled at once, each as it would be alone, without its gaps."""
    recalls = [0.1, 0.5, np.nan, 0.9, 0.3]
    scenes = ["a", "b", "b", "c", "a"]
    rows = [
        [
            row
            for name in (OURS, RATIO_TEST)
            for row in make_rows(str(n), name, n, scenes[n], recall=recalls[n])
        ]
        for n in range(5)
    ]
    values = metrics.compute_pair_values(metrics.make_table(rows), {})
    summary = metrics.summarize(values, metrics.bootstrap_scenes(values, {})).loc[
        (OURS, "recall", "", False)
    ]
    assert summary.to_dict() == pytest.approx(mean(recalls, scenes).to_dict(), abs=ROUNDED)


def means_of(rows, outcomes=()):
    """The metrics of the network and of the ratio test on these pairs, by name."""
    outcomes = {OURS: outcomes} if len(outcomes) else {}
    means = metrics.compute_pair_values(metrics.make_table(rows), outcomes).mean()
    return {
        matcher: {metrics.name_metric(*key): value for key, value in means[matcher].items()}
        for matcher in (OURS, RATIO_TEST)
    }


def test_pairs_without_matches_or_an_estimate_count_in_means():
    """No match is precision 0, no estimate an infinite error; no truth asks nothing."""
    cases = [(0.5, {}), (INF, {"precision": 0.0, "recall": 0.0}), (2.0, {"recall": np.nan})]
    rows = [
        make_rows(str(n), OURS, error, **values) + make_rows(str(n), RATIO_TEST, error)
        for n, (error, values) in enumerate(cases)
    ]
    values = means_of(rows)[OURS]
    assert values["precision"] == pytest.approx((0.5 + 0 + 0.5) / 3) and values["recall"] == 0.25
    assert values["auc_ransac_10"] == pytest.approx((0.95 + 0 + 0.8) / 3)
    assert values["within_ransac_5"] == pytest.approx(2 / 3)


def test_a_metric_is_named_by_its_estimator_and_limit():
    assert metrics.name_metric("auc_5", "ransac", True) == "auc_ransac_refined_5"
    assert metrics.name_metric("negative_matches") == "negative_matches"


def make_outcomes(scores, correct, exact, truth=1):
    """Confidences of matches, whether they are correct and exact, and the number of true ones."""
    return np.array(scores, float), np.array(correct, bool), np.array(exact, bool), truth


def test_calibration_has_confidence_precision_and_count_of_each_bin():
    outcomes = [make_outcomes([0.9, 0.3], [1, 0], [1, 0]), make_outcomes([0.35], [1], [0])]
    bins = metrics.compute_calibration(outcomes).to_numpy()
    np.testing.assert_allclose(bins, [[0.325, 0.5, 2], [0.9, 1.0, 1]])


verdicts = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8)


@given(st.lists(verdicts, min_size=1, max_size=6), st.floats(0, 1))
def test_the_threshold_at_a_precision_is_that_of_trying_every_one(cases, least):
    """With ties among confidences, and pairs without matches."""
    outcomes = []
    for matches in cases:
        tenths, correct = zip(*matches) if matches else ((), ())
        outcomes.append(make_outcomes(np.array(tenths) / 10, correct, correct))
    thresholds = [INF]
    for threshold in np.unique(np.concatenate([scores for scores, *_ in outcomes])):
        precisions = []
        for scores, correct, *_ in outcomes:
            is_above = scores >= threshold
            precisions.append(correct[is_above].mean() if is_above.any() else 0.0)
        if np.mean(precisions) >= least - 1e-12:
            thresholds.append(threshold)
    assert metrics.find_threshold(outcomes, least) == min(thresholds)


def test_recall_at_the_precision_of_the_ratio_test():
    """The ratio test has 15 of 20 right and 12 of 30 found. Down to a confidence of 0.8, two of two
    of ours are right, and two of four found.
    """
    counts = {"matches": 20, "precision": 0.75, "true_matches": 30, "recall": 0.4}
    rows = make_rows("p", OURS, 1.0, true_matches=4) + make_rows("p", RATIO_TEST, 1.0, **counts)
    outcomes = [make_outcomes([0.9, 0.8, 0.7], [1, 1, 0], [1, 1, 0], truth=4)]
    values = means_of([rows], outcomes)
    assert values[OURS]["recall_at_ratio_precision"] == 0.5
    assert values[RATIO_TEST]["recall_at_ratio_precision"] == 0.4


def test_precision_and_recall_over_the_threshold():
    """Two pairs. The second has no true match, so it has no recall."""
    outcomes = [
        make_outcomes([0.9, 0.8, 0.3], [1, 0, 1], [1, 0, 1], truth=4),
        make_outcomes([0.6], [0], [0], truth=0),
    ]
    precision, recall = metrics.compute_precision_recall(outcomes, np.array([0.0, 0.7, 0.95]))
    np.testing.assert_allclose(precision, [[2 / 3, 1 / 2, 0], [0, 0, 0]])
    np.testing.assert_allclose(recall, [[2 / 4, 1 / 4, 0], [np.nan] * 3])
    curve = metrics.compute_precision_recall_curve(outcomes).set_index("threshold")
    assert curve.loc[0.3].to_dict() == pytest.approx({"precision": 1 / 3, "recall": 2 / 4})


def test_an_error_curve_has_the_auc_below_it():
    errors = [0.3, 2.2, INF, 8.0]
    table = metrics.make_table([make_rows(str(n), OURS, error) for n, error in enumerate(errors)])
    fractions = metrics.compute_error_curves(table)["error", "ransac", False][OURS].to_numpy()
    assert (np.diff(fractions) >= 0).all() and fractions[-1] == 0.75 and fractions[3] == 0.25
    # left and right sums enclose the exact area
    area = metrics.compute_pair_aucs(errors, 10).mean()
    assert fractions[:-1].mean() <= area <= fractions[1:].mean()


def gain_of(results, *key):
    """The row of a metric's difference from the best baseline, with the name of this baseline."""
    return results.differences.reset_index("baseline").loc[[key]].iloc[0]


def test_a_paired_difference_is_significant_although_intervals_overlap():
    hard = np.random.default_rng(3).uniform(0, 9, 40)  # pairs differ much, matchers by 0.3 px
    results = make_results(hard, hard + 0.3)
    gain = gain_of(results, "auc_10", "ransac", False)
    assert gain["baseline"] in ("mutual_nn", "ratio_test") and gain["verdict"] == "better"
    assert gain["value"] == pytest.approx(0.03) and gain["high"] - gain["low"] < 0.001
    assert gain_of(results, "precision", "", False)["verdict"] == "equal"
    intervals = results.metrics.xs(("auc_10", "ransac", False), level=metrics.KEY)
    assert intervals.loc[OURS, "low"] < intervals.loc[RATIO_TEST, "high"]  # they overlap


@pytest.mark.parametrize("photographs, verdict", [(5, "too few"), (6, "better")])
def test_fewer_than_six_photographs_have_no_verdict(photographs, verdict):
    """Ours is better on every pair; with five photographs that happens by chance once in sixteen
    times.
    """
    errors = np.linspace(1, 2, photographs)
    gain = gain_of(make_results(errors, errors + 1), "auc_10", "ransac", False)
    assert gain["verdict"] == verdict


@pytest.mark.parametrize(
    "low, high, verdict",
    [
        (0.001, 0.5, "better"),
        (-0.5, -0.001, "worse"),
        (0.0, 0.02, "equal"),
        (-0.02, 0.02, "equal"),
        (-0.067, 0.117, "no difference found"),
        (-0.021, 0.0, "no difference found"),
        (math.nan, math.nan, "too few"),
    ],
)
def test_a_difference_is_equal_only_where_its_interval_is_narrow(low, high, verdict):
    assert metrics.judge(low, high, scenes=metrics.MIN_SCENES) == verdict
    assert metrics.judge(low, high, scenes=metrics.MIN_SCENES - 1) == "too few"
