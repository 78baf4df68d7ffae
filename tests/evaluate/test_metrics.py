"""Metrics against closed forms, cases computed by hand, and independent computations."""

import cv2
import numpy as np
import pytest

from pipeline import bootstrap
from pipeline.evaluate import metrics
from pipeline.evaluate.scoring import MatchCounts, reprojection_errors

pytestmark = pytest.mark.cu111
INF = float("inf")


def auc(errors, threshold):
    """The area itself."""
    return bootstrap.mean_finite(bootstrap.auc_by_pair(errors, threshold))[0]


@pytest.mark.parametrize(
    "errors, threshold, expected",
    [
        ([0.0], 3, 1.0),
        ([3.0], 3, 0.0),
        ([1.5], 3, 0.5),
        ([float("nan")], 3, 0.0),
        ([0.0, INF], 3, 0.5),
        ([1.0, 2.0, 9.0], 4, (0.75 + 0.5) / 3),
    ],
)
def test_auc_of_cases_made_by_hand(errors, threshold, expected):
    assert auc(errors, threshold) == pytest.approx(expected, abs=1e-12)


def test_auc_without_pairs_is_no_number():
    assert np.isnan(auc([], 3))


def test_no_match_is_a_failure_and_no_truth_is_no_question():
    nothing = MatchCounts(matches=0, correct=0, truth=2, found=0)
    assert nothing.precision == 0.0 and nothing.recall == 0.0
    no_truth = MatchCounts(matches=1, correct=0, truth=0, found=0)
    assert no_truth.precision == 0.0 and np.isnan(no_truth.recall)
    some = MatchCounts(matches=3, correct=2, truth=3, found=1)
    assert some.precision == pytest.approx(2 / 3) and some.recall == pytest.approx(1 / 3)


def test_reprojection_error_agrees_with_opencv():
    rng = np.random.default_rng(0)
    H = np.array([[1.1, 0.05, 5], [-0.03, 0.95, 9], [1e-4, -2e-4, 1]])
    points0, points1 = rng.uniform(0, 400, (2, 50, 2))
    forward = cv2.perspectiveTransform(points0[None], H)[0] - points1
    backward = cv2.perspectiveTransform(points1[None], np.linalg.inv(H))[0] - points0
    expected = np.maximum(*(np.linalg.norm(side, axis=1) for side in (forward, backward)))
    np.testing.assert_allclose(reprojection_errors(points0, points1, H), expected, rtol=1e-9)


def test_reprojection_error_on_the_horizon_and_of_nothing():
    H = np.array([[1.0, 0, 0], [0, 1, 0], [-0.01, 0, 1]])  # x = 100 maps to infinity
    assert reprojection_errors(np.array([[100.0, 5]]), np.array([[1.0, 1]]), H) == np.inf
    assert reprojection_errors(np.zeros((0, 2)), np.zeros((0, 2)), H).shape == (0,)


def test_recall_curve_counts_equality():
    found = metrics.recall_curve([1.0, 2.0, np.inf, np.nan], [0.5, 1.0, 2.0, 1e9])
    assert found.tolist() == [0, 0.25, 0.5, 0.5]
