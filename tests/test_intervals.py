"""Means and their intervals: against closed forms, over clusters, paired differences, and what has
no interval.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline import bootstrap
from pipeline.evaluate import metrics
from pipeline.evaluate.matchers import MATCHERS, OURS
from pipeline.evaluate.scoring import MatchCounts, PairResult, Row, ScoredMatches


def mean(values, clusters=None):
    """The line of a mean; without clusters, each pair is one."""
    values = np.asarray(values, np.float64)
    names = [str(n) for n in (range(len(values)) if clusters is None else clusters)]
    return bootstrap.Clusters(names).mean(values).line()


def test_interval_of_a_mean_agrees_with_the_normal_one():
    values = np.random.default_rng(1).normal(0.4, 0.2, 800)
    found = mean(values)
    half = 1.96 * values.std() / math.sqrt(800)
    assert found["value"] == pytest.approx(values.mean(), abs=1e-6) and found["pairs"] == 800
    assert found["low"] == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found["high"] == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_interval_agrees_with_scipys_bootstrap():
    from scipy import stats

    values = np.random.default_rng(8).uniform(0, 1, 40)
    reference = stats.bootstrap(
        (values,), np.mean, n_resamples=4000, method="percentile"
    ).confidence_interval
    found = mean(values)
    assert found["low"] == pytest.approx(reference.low, abs=0.01)
    assert found["high"] == pytest.approx(reference.high, abs=0.01)


def test_pairs_of_one_photograph_count_as_one():
    """Twenty equal pairs of each of thirty photographs have the interval of one pair of each."""
    values = np.random.default_rng(5).uniform(0, 1, 30)
    one = mean(values)
    many = mean(np.repeat(values, 20), np.repeat(np.arange(30), 20))
    assert many["low"] == one["low"] and many["high"] == one["high"] and many["pairs"] == 600
    independent = mean(np.repeat(values, 20))
    assert many["high"] - many["low"] > 3 * (independent["high"] - independent["low"])


def test_clusters_of_unequal_size_weigh_by_their_pairs():
    values = np.array([1.0, 0.0, 0.0, 0.0])
    clusters = [0, 1, 1, 1]
    found = bootstrap.Clusters([str(n) for n in clusters]).mean(values)
    assert found.value == 0.25 and set(np.round(found.samples, 6)) == {0.0, 0.25, 1.0}


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


def test_coverage_of_the_interval_is_near_its_level():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(60):
        centres = rng.uniform(-0.3, 0.3, 40)
        found = mean(
            (0.5 + centres[:, None] + rng.uniform(-0.2, 0.2, (40, 5))).ravel(),
            np.repeat(range(40), 5),
        )
        hits += found["low"] <= 0.5 <= found["high"]
    assert hits >= 51  # 57 expected


def results_of(ours, baseline, scored=None, matchers=MATCHERS):
    """Synthetic results, each pair of another photograph."""
    results = []
    for index, (first, second) in enumerate(zip(ours, baseline)):
        rows = {}
        for matcher in matchers:
            error = first if matcher == OURS else second + (matcher == "nn")
            errors = {"ransac": error, "dlt": error}
            counts = MatchCounts(10, 5, 8, 4)
            rows[matcher] = Row(
                str(index), f"photograph {index}", matcher, 10, 10, counts, errors, {}
            )
        results.append(PairResult((index, 0), rows, {OURS: scored[index]} if scored else {}))
    return results


def test_areas_of_aligned_matches_are_their_own():
    counts = MatchCounts(10, 5, 8, 4)
    rows = [
        Row("p", "s", OURS, 10, 10, counts, {"ransac": 2.0, "ransac_aligned": 0.5}, {})
        for _ in range(2)
    ]
    found = metrics.summarize(rows)
    assert (found["auc_ransac_5"], found["auc_ransac_aligned_5"]) == (0.6, 0.9)
    assert (found["median_error_ransac"], found["median_error_ransac_aligned"]) == (2.0, 0.5)
    areas = [name for name in found if name.startswith("auc_")]
    assert areas == [
        f"auc_{name}_{px}" for name in ("ransac", "ransac_aligned") for px in (1, 3, 5, 10)
    ]


def test_of_poses_the_matching_score_is_found_at_the_ratio_tests_precision():
    """Four matches of ours by falling confidence: right, right, wrong, right, of eight keypoints;
    two pairs alike.
    """
    right = np.array([True, True, False, True])
    scored = ScoredMatches(np.array([0.9, 0.8, 0.7, 0.6]), right, right, 8)
    results = []
    for index in range(2):
        counts = {OURS: MatchCounts(4, 3, 8, 3), "ratio_test": MatchCounts(3, 2, 8, 2)}
        rows = {
            name: Row(
                str(index),
                f"scene {index}",
                name,
                8,
                9,
                counts.get(name, counts[OURS]),
                {"pose": 1.0},
                {},
            )
            for name in MATCHERS
        }
        results.append(PairResult((index, 0), rows, {OURS: scored}))
    found = metrics.compare(results, {OURS: 0.2}).metrics
    assert found["ratio_test.precision"] == pytest.approx(2 / 3, abs=1e-6)
    assert found["ratio_test.matching_score"] == 0.25
    # all four have precision 3/4, above 2/3; the two surest have the ratio test's matching score
    # and no wrong one
    assert found["superglue.matching_score_at_ratio_precision"] == pytest.approx(3 / 8)
    assert found["superglue.precision_at_ratio_matching_score"] == 1.0
    assert not any("recall" in name for name in found)


def by_metric(lines):
    return {line["figure"]: line for line in lines}


def test_paired_differences_see_what_separate_intervals_cannot():
    rng = np.random.default_rng(3)
    hard = rng.uniform(0, 9, 40)  # pairs differ much, matchers by a constant 0.3 px
    compared = metrics.compare(results_of(hard, hard + 0.3), {OURS: 0.2})
    lines = by_metric(compared.differences)
    found = lines["auc_ransac_10"]
    assert found["baseline"] in ("mutual_nn", "ratio_test") and found["verdict"] == "better"
    assert found["value"] == pytest.approx(0.03, abs=1e-6) and found["high"] - found["low"] < 0.001
    assert lines["precision"]["verdict"] == "equal" and lines["precision"]["value"] == 0.0
    separate = {(line["matcher"], line["figure"]): line for line in compared.intervals}
    ours, theirs = (separate[name, "auc_ransac_10"] for name in (OURS, "ratio_test"))
    assert ours["low"] < theirs["high"]  # their intervals overlap
    assert ours["value"] == pytest.approx(bootstrap.auc_by_pair(hard, 10).mean(), abs=1e-6)


@pytest.mark.parametrize("photographs, verdict", [(5, "too few"), (6, "better")])
def test_a_few_photographs_decide_nothing(photographs, verdict):
    """Ours is better on every pair; with five photographs that happens by chance once in sixteen
    times.
    """
    errors = np.linspace(1, 2, photographs)
    compared = metrics.compare(results_of(errors, errors + 1), {OURS: 0.2})
    line = by_metric(compared.differences)["auc_ransac_10"]
    assert (line["verdict"], line["clusters"]) == (verdict, photographs)
    assert compared.clusters == photographs


def test_failures_count_in_intervals():
    compared = metrics.compare(results_of([math.inf, 0.0], [0.5, 0.5]), {OURS: 0.2})
    lines = {(line["matcher"], line["figure"]): line for line in compared.intervals}
    assert lines[OURS, "auc_dlt_1"]["value"] == 0.5 and lines[OURS, "auc_dlt_1"]["pairs"] == 2


def scored_of(rng, pairs):
    """Matches whose chance to be right is their confidence; half of the right ones' partners are
    found.
    """
    scores = rng.uniform(0, 1, (pairs, 50))
    right = rng.uniform(0, 1, scores.shape) < scores
    return [ScoredMatches(own, correct, correct, 40) for own, correct in zip(scores, right)]


def test_ours_at_the_operating_point_of_the_ratio_test():
    """The ratio test of the synthetic results has precision 0.5 and recall 0.5."""
    scored = scored_of(np.random.default_rng(6), 30)
    compared = metrics.compare(results_of([1.0] * 30, [1.0] * 30, scored), {OURS: 0.2})
    found = compared.metrics
    assert found["ratio_test.recall_at_ratio_precision"] == found["ratio_test.recall"] == 0.5
    assert found["ratio_test.precision_at_ratio_recall"] == found["ratio_test.precision"] == 0.5
    assert "nn.recall_at_ratio_precision" not in found and found["superglue.threshold"] == 0.2
    right = np.mean([one.correct.sum() for one in scored])
    assert right / 50 >= 0.5  # so all matches together have the precision that is asked
    assert found["superglue.recall_at_ratio_precision"] == pytest.approx(right / 40, abs=1e-6)
    # the most confident fraction f of the matches holds (1 - (1 - f)^2) / 2 * 50 right ones: 20 of
    # them at f = 0.553
    assert found["superglue.precision_at_ratio_recall"] == pytest.approx(
        20 / (0.553 * 50), abs=0.04
    )
    for line in compared.intervals:
        if "_at_" in line["figure"] and line["matcher"] == OURS:
            assert line["low"] - 0.01 <= line["value"] <= line["high"] + 0.01
            assert 0.005 < line["high"] - line["low"] < 0.15
    difference = by_metric(compared.differences)["precision_at_ratio_recall"]
    assert difference["baseline"] == "ratio_test" and difference["verdict"] == "better"
    assert difference["value"] == pytest.approx(
        found["superglue.precision_at_ratio_recall"] - 0.5, abs=1e-6
    )


def test_a_further_network_is_compared_and_is_no_baseline():
    names = (OURS, "shipped", *MATCHERS[1:])
    compared = metrics.compare(
        results_of([2.0] * 8, [1.0] * 8, matchers=names), {OURS: 0.2, "shipped": 0.3}
    )
    lines = [line for line in compared.differences if line["figure"] == "auc_ransac_10"]
    assert [line["baseline"] for line in lines] == ["mutual_nn", "shipped"]
    assert compared.metrics["shipped.threshold"] == 0.3
