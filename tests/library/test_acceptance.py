"""The probability that two photographs show one place: what chance gives, what is counted, and what
surfaces and mirror images look like.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from superglue_sift.geometry import acceptance
from superglue_sift.geometry.acceptance import Matched

SIZES = ((640, 480), (640, 480))


def surface(count, seed=0):
    """Matches of two views of a wavy surface, from cameras that moved and turned."""
    rng = np.random.default_rng(seed)
    points = rng.uniform([-2, -1.5, 0], [2, 1.5, 0], (count, 3))
    points[:, 2] = 6 + np.sin(2 * points[:, 0]) + 0.5 * np.cos(points[:, 1])
    angle = 0.2
    turn = np.array(
        [[math.cos(angle), 0, -math.sin(angle)], [0, 1, 0], [math.sin(angle), 0, math.cos(angle)]]
    )
    views = [points, points @ turn.T + [-1.0, 0.1, 0.3]]
    return [each[:, :2] / each[:, 2:] * 500 + [320, 240] for each in views]


def matched(points0, points1, score=0.6):
    return Matched(points0, points1, np.full(len(points0), score), SIZES)


def anywhere(count, seed=0):
    return np.random.default_rng(seed).uniform(0, [639, 479], (2, count, 2))


@given(st.integers(8, 400), st.data())
def test_significance_is_never_above_what_the_binomial_distribution_says(count, data):
    inliers = data.draw(st.integers(7, count))
    chance = data.draw(st.floats(1e-3, 0.5))
    rest = count - 7
    choices = math.log10(math.comb(count, 7))
    exact = -binom.logsf(inliers - 7 - 1, rest, chance) / math.log(10) - choices
    found = acceptance.significance(count, inliers, chance)
    assert found >= 0
    if exact < 250:  # scipy knows smaller probabilities with few digits, then none
        assert found <= max(exact, 0) + 1e-6
        assert found >= exact - 1 - math.log10(rest + 1)  # the bound loses few digits
    if inliers < count:
        assert acceptance.significance(count, inliers + 1, chance) >= found


def test_known_significance():
    assert acceptance.significance(107, 7, 0.01) == 0
    # all of 57: a hundredth to the fiftieth, in 264,385,836 choices of seven
    assert acceptance.significance(57, 57, 0.01) == pytest.approx(100 - math.log10(264385836))


def test_one_place_is_probable_and_wrong_matches_are_not():
    right = matched(*surface(60))
    judged = acceptance.judge(right)
    assert judged.inliers.mean() > 0.95 and judged.probability > 0.9
    wrong = acceptance.judge(matched(*anywhere(60)))
    assert 0 < wrong.probability < 0.2
    few = acceptance.judge(matched(*surface(6)))
    assert few.F is None and not few.inliers.any() and not few.features.any()
    assert 0 < few.probability < 0.2


def test_wrong_matches_of_low_confidence_do_not_count():
    points = [np.concatenate(each) for each in zip(surface(40), anywhere(300))]
    scores = np.concatenate([np.full(40, 0.6), np.full(300, acceptance.COUNTED)])
    mixed = acceptance.judge(Matched(*points, scores, SIZES))
    alone = acceptance.judge(matched(*surface(40)))
    assert mixed.probability == pytest.approx(alone.probability, abs=1e-6)
    assert not mixed.inliers[40:].any()


def test_a_mirror_image_is_another_place():
    points0, points1 = surface(80)
    mirrored = acceptance.judge(matched(points0, points0 * [-1, 1] + [639, 0]))
    assert mirrored.features[acceptance.FEATURES.index("orientation")] < -3
    assert mirrored.probability < 0.2 < acceptance.judge(matched(points0, points1)).probability


def test_matches_that_slide_along_their_lines_are_less_probable():
    points0, points1 = surface(60)
    judged = acceptance.judge(matched(points0, points1))
    lines = np.column_stack([points0, np.ones(60)]) @ judged.F.T
    along = np.column_stack([lines[:, 1], -lines[:, 0]]) / np.hypot(lines[:, :1], lines[:, 1:2])
    slid = points1 + along * np.random.default_rng(1).uniform(-150, 150, (60, 1))
    found = acceptance.judge(matched(points0, slid), judged.F)
    assert found.inliers.mean() > 0.9
    order = acceptance.FEATURES.index("order")
    assert found.features[order] < 0.5 < 0.8 < judged.features[order]
    assert found.probability < judged.probability


def test_known_agreement():
    """Half of the matches agree, with three quarters of the confidence."""
    points = [np.concatenate(each) for each in zip(surface(40), anywhere(40))]
    scores = np.repeat([0.9, 0.3], 40)
    inliers = np.arange(80) < 40
    found = acceptance.features_of(Matched(*points, scores, SIZES), inliers)
    assert found[acceptance.FEATURES.index("agreement")] == pytest.approx(0.75)


@settings(max_examples=30)
@given(st.integers(9, 60), st.integers(0, 1000))
def test_two_orientations_at_one_position_count_once(count, seed):
    points0, points1 = surface(count, seed)
    once = acceptance.judge(matched(points0, points1))
    rng = np.random.default_rng(seed)
    twice = rng.integers(0, count, 3 * count)
    points = [np.concatenate([each, each[twice]]) for each in (points0, points1)]
    scores = np.concatenate([np.full(count, 0.6), rng.uniform(0, 0.59, 3 * count)])
    again = acceptance.judge(Matched(*points, scores, SIZES), once.F)
    np.testing.assert_allclose(again.features, once.features)


@given(st.integers(0, 40), st.integers(0, 1000))
def test_features_are_finite_and_do_not_depend_on_the_order(count, seed):
    points0, points1 = anywhere(count, seed)
    points1[: count // 2] = points0[: count // 2] + 5
    given_ = matched(points0, points1)
    inliers = np.arange(count) < count // 2
    order = np.random.default_rng(seed).permutation(count)
    features = acceptance.features_of(given_, inliers)
    shuffled = acceptance.features_of(given_.only(order), inliers[order])
    np.testing.assert_allclose(shuffled, features, atol=1e-9)
    assert np.isfinite(features).all()
    assert features.any() == (count // 2 > acceptance.SEVEN)
    assert 0 < acceptance.probability(features) < 1
