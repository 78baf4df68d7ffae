"""Rows and means: exact answers on made pairs, every pair in every mean, conditions read off homographies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_scenes import SHIFT, TURN

from pipeline.errors import RequestError
from pipeline.evaluation import confidence, estimators, matchers, metrics, run, scoring, summary
from pipeline.evaluation.conditions import conditions_of
from pipeline.evaluation.matchers import OURS, PairMatches
from pipeline.evaluation.pairs import Pair
from superglue_sift.geometry import transform
from superglue_sift.sift import KEYPOINT

SIZE = (320, 240)


def pair_of(points0, points1, H):
    records = []
    for points in (points0, points1):
        rows = np.zeros(len(points), KEYPOINT)
        rows["x"], rows["y"] = np.asarray(points, np.float32).reshape(-1, 2).T
        records.append(rows)
    return Pair("p", "s", 0, 0, *records, SIZE, SIZE, H, {})


@pytest.fixture
def exact():
    """Twenty points and their exact images, in another order."""
    rng = np.random.default_rng(3)
    points0 = rng.uniform([80, 60], [240, 180], (20, 2))
    order = rng.permutation(20)
    points1 = transform(points0, TURN)[order]
    return pair_of(points0, points1, TURN), np.argsort(order)


def test_perfect_matches_give_perfect_figures(exact):
    pair, partner = exact
    truth0 = scoring.true_matches(pair, 3.0)
    np.testing.assert_array_equal(truth0, partner)
    answer = PairMatches(partner, np.ones(20, np.float32))
    row = scoring.score(pair, OURS, answer, truth0, scoring.Limits())
    assert row.counts == metrics.MatchCounts(20, 20, 20, 20)
    assert row.errors["ransac"] < 0.01 and row.errors["dlt"] < 0.01


def test_confidence_weighs_the_least_squares_fit(exact):
    pair, partner = exact
    wrong = partner.copy()
    wrong[:3] = np.roll(partner[:3], 1)
    trusting = PairMatches(wrong, np.ones(20, np.float32))
    doubting = PairMatches(wrong, np.where(np.arange(20) < 3, 1e-6, 1.0).astype(np.float32))
    truth0 = scoring.true_matches(pair, 3.0)
    rows = [scoring.score(pair, OURS, answer, truth0, scoring.Limits()) for answer in (trusting, doubting)]
    assert rows[0].errors["dlt"] > 10 * rows[1].errors["dlt"] and rows[1].errors["dlt"] < 0.1
    assert rows[0].errors["ransac"] < 0.1  # three wrong of twenty do not disturb RANSAC


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_matches_are_an_infinite_error(exact, count):
    pair, partner = exact
    few = PairMatches(np.where(np.arange(20) < count, partner, -1), np.ones(20, np.float32))
    row = scoring.score(pair, OURS, few, scoring.true_matches(pair, 3.0), scoring.Limits())
    assert math.isinf(row.errors["ransac"]) and math.isinf(row.errors["dlt"])
    assert row.counts.matches == count and row.counts.precision == (1.0 if count else 0.0)


def test_pairs_without_keypoints_have_a_row():
    for points0, points1 in (([], []), ([[1, 2]], []), ([], [[3, 4]])):
        pair = pair_of(np.reshape(points0, (-1, 2)), np.reshape(points1, (-1, 2)), SHIFT)
        truth0 = scoring.true_matches(pair, 3.0)
        assert truth0.shape == (len(points0),)
        for answer in matchers.match_baselines(pair, 0.8).values():
            row = scoring.score(pair, "nn", answer, truth0, scoring.Limits())
            assert math.isinf(row.errors["ransac"]) and row.counts.truth == 0


def row(error, matches=10, correct=5, truth=8, found=4, matcher=OURS, pair="p", scene="s"):
    counts = metrics.MatchCounts(matches, correct, truth, found)
    return scoring.Row(pair, scene, matcher, 20, 20, counts, {"ransac": error, "dlt": error}, {"scale": 1.0})


def test_no_pair_is_dropped_from_a_mean():
    rows = [row(0.5), row(math.inf, matches=0, correct=0, found=0), row(2.0, truth=0, found=0)]
    figures = summary.figures_of(rows)
    assert figures["pairs"] == 3 and figures["recall_pairs"] == 2 and figures["estimated_ransac"] == 2
    assert figures["precision"] == pytest.approx((0.5 + 0 + 0.5) / 3, abs=1e-6)
    assert figures["recall"] == pytest.approx((0.5 + 0) / 2, abs=1e-6)
    assert figures["auc_ransac_1"] == pytest.approx(0.5 / 3, abs=1e-6)
    assert figures["auc_ransac_10"] == pytest.approx((0.95 + 0 + 0.8) / 3, abs=1e-6)
    assert figures["mean_error_ransac"] == 1.25 and figures["median_error_ransac"] == 2.0


def test_what_has_no_value_is_null_not_infinity():
    figures = summary.figures_of([row(math.inf), row(math.inf)])
    assert figures["median_error_ransac"] is None and figures["mean_error_dlt"] is None
    assert summary.figures_of([])["auc_dlt_3"] is None


def test_figures_by_scene_keep_their_order():
    rows = [row(1.0, scene=scene, matcher=matcher) for scene in "ba" for matcher in (OURS, "nn")]
    lines = summary.by_scene(rows, (OURS, "nn"))
    assert [(line["scene"], line["matcher"]) for line in lines] == [
        ("b", OURS),
        ("b", "nn"),
        ("a", OURS),
        ("a", "nn"),
    ]


def test_threshold_curve_and_calibration():
    judged = [
        confidence.Judged(np.array([0.9, 0.3]), np.array([True, False]), np.array([True, False]), truth=2),
        confidence.Judged(np.array([0.35]), np.array([True]), np.array([False]), truth=0),
    ]
    low, high = confidence.threshold_curve(judged, (0.0, 0.5))
    assert low["precision"] == pytest.approx((0.5 + 1.0) / 2) and low["recall"] == pytest.approx(0.5)
    assert (low["pairs"], low["recall_pairs"]) == (2, 1)
    assert high["precision"] == pytest.approx((1.0 + 0.0) / 2) and high["matches"] == pytest.approx(0.5)
    lines = confidence.calibration(judged, bins=10)
    assert [line["matches"] for line in lines] == [2, 1]
    assert confidence.calibration_error(lines) == pytest.approx((2 * abs(0.325 - 0.5) + 0.1) / 3)
    assert confidence.calibration([]) == [] and math.isnan(confidence.calibration_error([]))


def test_curve_at_the_threshold_is_the_table(exact):
    pair, partner = exact
    scores = np.linspace(0.05, 0.95, 20).astype(np.float32)
    answer, truth0 = PairMatches(partner, scores), scoring.true_matches(pair, 3.0)
    judged = confidence.judge(pair, answer, truth0, 3.0)
    expected = scoring.score(pair, OURS, answer.above(0.4), truth0, scoring.Limits()).counts
    assert confidence.counts_above(judged, 0.4) == expected


@given(st.lists(st.one_of(st.floats(0, 99), st.just(math.inf)), max_size=30), st.integers(0, 12))
def test_pictures_are_distinct_pairs(errors, count):
    chosen = run.picture_choice([row(error) for error in errors], count)
    assert len(chosen) == min(count, len(errors)) == len({index for _, index in chosen})
    names = [name for name, _ in chosen]
    assert len(set(names)) == len(names)
    best = [errors[index] for name, index in chosen if name.startswith("best")]
    worst = [errors[index] for name, index in chosen if name.startswith("worst")]
    assert not best or not worst or max(best) <= min(worst)


@pytest.mark.parametrize(
    "H, rotation, scale",
    [
        (np.eye(3), 0, 1),
        (np.diag([2.0, 2.0, 1.0]), 0, 2),
        (np.diag([0.5, 0.5, 1.0]), 0, 2),
        (np.array([[0.0, -1, 239], [1, 0, 0], [0, 0, 1]]), 90, 1),
        (np.array([[-1.0, 0, 319], [0, -1, 239], [0, 0, 1]]), 180, 1),
    ],
)
def test_conditions_of_similarities(H, rotation, scale):
    found = conditions_of(H, SIZE, SIZE)
    assert found["rotation_deg"] == pytest.approx(rotation, abs=1e-9)
    assert found["scale"] == pytest.approx(scale) and found["tilt"] == pytest.approx(1.0)
    assert found["perspective"] == pytest.approx(1.0)


def test_conditions_of_shifts_and_perspective():
    half = np.array([[1.0, 0, 160], [0, 1, 0], [0, 0, 1]])
    assert conditions_of(half, SIZE, SIZE)["overlap"] == pytest.approx(0.5)
    assert conditions_of(np.diag([2.0, 1.0, 1.0]), SIZE, SIZE)["tilt"] == pytest.approx(2.0)
    leaning = np.array([[1.0, 0, 0], [0, 1, 0], [1 / 319, 0, 1]])  # depth 1 at the left, 2 at the right
    assert conditions_of(leaning, SIZE, SIZE)["perspective"] == pytest.approx(8.0)


@pytest.mark.parametrize("name", ["ransac", "dlt", "opencv", "magsac", "poselib"])
def test_every_estimator_finds_an_exact_homography(exact, name):
    if name == "poselib":
        pytest.importorskip("poselib")
    pair, partner = exact
    limits = scoring.Limits(estimators=estimators.choose([name]))
    answer = PairMatches(partner, np.ones(20, np.float32))
    assert scoring.score(pair, OURS, answer, scoring.true_matches(pair, 3.0), limits).errors[name] < 0.05
    for count in (0, 3):
        few = PairMatches(np.where(np.arange(20) < count, partner, -1), np.ones(20, np.float32))
        assert scoring.estimates(pair, few, limits)[name] is None


def test_estimators_are_checked(monkeypatch):
    with pytest.raises(RequestError, match="choose from ransac, dlt"):
        estimators.choose(["best"])
    monkeypatch.setattr(estimators.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="pip install poselib"):
        estimators.choose(["poselib"])
