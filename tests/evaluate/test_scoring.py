"""Rows of one pair: exact answers on synthetic pairs, counts, and how much two views differ."""

import math

import numpy as np
import pytest
from made_pairs import make_features_at
from made_scenes import SHIFT, TURN

from pipeline.evaluate import estimators, matchers, scoring
from pipeline.evaluate.matchers import OURS
from pipeline.evaluate.pairs import CameraPair, ImagePair, LabeledPair
from superglue_sift.geometry.two_view import transform
from superglue_sift.matches import Matches

SIZE = (320, 240)


def make_labeled_pair(points0, points1, H):
    features = make_features_at(points0), make_features_at(points1)
    return LabeledPair(ImagePair("p", 0, 1, H), "s", 0, features, features)


@pytest.fixture
def settings(make_params):
    return scoring.ScoringSettings(make_params("evaluate"))


def score(labeled_pair, matches, settings):
    """The values of one matcher: of errors by estimator, of others by metric."""
    rows = scoring.score_pair(labeled_pair, {OURS: matches}, {}, settings).rows
    return {estimator or metric: value for _, _, _, estimator, _, metric, value in rows}


@pytest.fixture
def exact():
    """Twenty points and their exact images, in another order; and the match of each."""
    rng = np.random.default_rng(3)
    points0 = rng.uniform([80, 60], [240, 180], (20, 2))
    order = rng.permutation(20)
    points1 = transform(points0, TURN)[order]
    return make_labeled_pair(points0, points1, TURN), np.argsort(order)


def test_perfect_matches_give_perfect_metrics(exact, settings):
    labeled_pair, partner = exact
    np.testing.assert_array_equal(scoring.find_true_matches0(labeled_pair.oriented, TURN), partner)
    values = score(labeled_pair, Matches.from_dense(partner, np.ones(20)), settings)
    assert [values[name] for name in ("matches", "correct", "true_matches", "found")] == [20] * 4
    assert values["precision"] == values["recall"] == 1.0
    assert values["ransac"] < 0.01 and values["dlt"] < 0.01


def test_a_match_near_its_partner_counts_for_precision_and_not_for_recall(settings):
    """Precision asks for less than 3 px, strictly; recall asks for the true partner itself."""
    points0 = np.array([[10.0, 10], [60, 10], [110, 10], [160, 10]])
    points1 = np.concatenate([points0, [[62.5, 10], [113.0, 10]]])
    labeled_pair = make_labeled_pair(points0, points1, np.eye(3))
    values = score(labeled_pair, Matches.from_dense(np.array([0, 4, 5, -1]), np.ones(4)), settings)
    assert values["precision"] == pytest.approx(2 / 3) and values["recall"] == 1 / 4


def test_of_two_keypoints_near_one_only_the_nearer_has_a_true_match(settings):
    points0 = [[10.0, 10], [11.5, 10], [60, 10]]
    labeled_pair = make_labeled_pair(points0, [[10.0, 10], [60, 10]], np.eye(3))
    values = score(labeled_pair, Matches.from_dense(np.array([0, -1, 1]), np.ones(3)), settings)
    assert values["true_matches"] == 2 and values["recall"] == 1.0


def test_the_error_of_a_homography_is_that_of_the_corners_of_image_0(settings):
    """Image 1 is twice as large. Matches are enlarged by 2, and the truth is 2.02."""
    points = np.random.default_rng(0).uniform(0, [319, 239], (20, 2))
    features = make_features_at(points, SIZE), make_features_at(2 * points, (640, 480))
    truth = np.diag([2.02, 2.02, 1])
    labeled_pair = LabeledPair(ImagePair("p", 0, 1, truth), "s", 0, features, features)
    matches = Matches(np.stack([np.arange(20)] * 2, 1), np.ones(20))
    lengths = [0, 319, math.hypot(319, 239), 239]
    error = score(labeled_pair, matches, settings)["dlt"]
    assert error == pytest.approx(0.02 * np.mean(lengths), rel=1e-3)


def find_correct(labeled_pair, count):
    """Whether the match of each keypoint with the one of its number is correct."""
    matches = Matches(np.stack([np.arange(count)] * 2, axis=1), np.ones(count))
    points = scoring.get_matched_points(labeled_pair.oriented, matches)
    return scoring.find_correct_matches(*points, labeled_pair.images.truth)


def test_a_match_is_correct_below_3_px_in_the_image_of_the_larger_error():
    """As in the SuperGlue paper and the protocols of HPatches."""
    points0 = np.float32([[0, 10], [0, 20], [0, 30]])
    below, above = (np.nextafter(np.float32(3), np.float32(end)) for end in (0, 4))
    points1 = points0 + np.float32([[below, 0], [3, 0], [above, 0]])
    for points in ((points0, points1), (points1, points0)):
        is_correct = find_correct(make_labeled_pair(*points, np.eye(3)), 3)
        assert is_correct.tolist() == [True, False, False]
    # 2 px in image 0 are 4 px in image 1, which is twice as large
    enlarged = make_labeled_pair(
        points0[:2], 2 * points0[:2] + [[2.9, 0], [4, 0]], np.diag([2.0, 2, 1])
    )
    assert find_correct(enlarged, 2).tolist() == [True, False]


def test_a_match_of_two_cameras_is_correct_near_its_epipolar_line():
    """The camera moves to the side, so the lines are level. A match that is d px off has the
    squared symmetric distance 2 (d / 1000)^2, which is below 5e-4 up to d = 15.811 px.
    """
    K = np.array([[1000.0, 0, 160], [0, 1000, 120], [0, 0, 1]])
    T = np.eye(4)
    T[0, 3] = 1.0
    points0 = np.array([[60.0, 100], [80, 100], [100, 100]])
    points1 = points0 - [[30, 0], [30, -15.80], [30, -15.82]]
    labeled_pair = make_labeled_pair(points0, points1, CameraPair(K, K, T))
    assert find_correct(labeled_pair, 3).tolist() == [True, True, False]


def test_metrics_are_of_matches_above_the_threshold_and_curves_of_all(settings):
    points = np.array([[10.0, 10], [60, 10], [110, 10], [160, 10]])
    labeled_pair = make_labeled_pair(points, [*points, [300, 200]], np.eye(3))
    scores = np.array([0.1, 0.2, 0.3, 0.9])
    matches = Matches(np.array([[0, 0], [1, 1], [2, 2], [3, 4]]), scores)
    rows, outcomes = scoring.score_pair(labeled_pair, {OURS: matches}, {OURS: 0.2}, settings)[2:4]
    values = {metric: value for *_, metric, value in rows}
    assert [values[name] for name in ("matches", "correct", "found")] == [2, 1, 1]
    assert values["precision"] == 1 / 2 and values["recall"] == 1 / 4
    confidences, is_correct, is_exact, true_count = outcomes[OURS]
    assert confidences.tolist() == scores.tolist() and true_count == 4
    assert is_correct.tolist() == is_exact.tolist() == [True, True, True, False]


def test_recall_is_undefined_without_a_true_match(settings):
    """Here all keypoints of image 0 lie outside of image 1."""
    points = np.array([[10.0, 10], [60, 10]])
    labeled_pair = make_labeled_pair(
        points, points, np.array([[1.0, 0, 900], [0, 1, 0], [0, 0, 1]])
    )
    values = score(labeled_pair, Matches.from_dense(np.array([0, 1]), np.ones(2)), settings)
    assert values["true_matches"] == values["precision"] == 0 and values["matches"] == 2
    assert math.isnan(values["recall"])


def test_pairs_without_keypoints_have_rows(settings):
    for count0, count1 in ((0, 0), (1, 0), (0, 1)):
        labeled_pair = make_labeled_pair(np.ones((count0, 2)), np.ones((count1, 2)), SHIFT)
        for matches in matchers.match_baselines(labeled_pair.oriented).values():
            values = score(labeled_pair, matches, settings)
            assert math.isinf(values["ransac"]) and values["precision"] == 0.0
            assert math.isnan(values["recall"])


def test_matches_of_photographs_with_nothing_in_common_are_counted(settings):
    points = np.array([[10.0, 10], [60, 10], [110, 10]])
    labeled_pair = make_labeled_pair(points, points, None)
    matches = Matches(np.array([[0, 0], [1, 1], [2, 2]]), np.array([0.1, 0.3, 0.9]))
    rows = scoring.score_pair(labeled_pair, {OURS: matches}, {OURS: 0.2}, settings).rows
    assert [row[-2:] for row in rows] == [("matches", 2.0)]


def test_reprojection_error_is_the_larger_of_both_directions():
    H = np.diag([2.0, 2.0, 1.0])
    points0 = np.array([[10.0, 5], [10, 5], [0, 0]])
    points1 = np.array([[20.0, 10], [24, 10], [0, -6]])
    errors = scoring.compute_reprojection_errors(points0, points1, H)
    np.testing.assert_allclose(errors, [0, 4, 6])
    errors = scoring.compute_reprojection_errors(points1, points0, np.linalg.inv(H))
    np.testing.assert_allclose(errors, [0, 4, 6])


@pytest.mark.parametrize("name", estimators.ESTIMATORS)
def test_every_estimator_finds_an_exact_homography(exact, settings, name):
    labeled_pair, partner = exact
    settings = settings._replace(estimators=(name,))
    matches = Matches.from_dense(partner, np.ones(20))
    assert score(labeled_pair, matches, settings)[name] < 0.05
    assert math.isinf(score(labeled_pair, matches.select(np.arange(3)), settings)[name])


@pytest.mark.parametrize("matcher", [OURS, *matchers.BASELINES])
@pytest.mark.parametrize("estimator", ["dlt", "confident"])
def test_least_squares_uses_the_confidences_of_every_matcher(exact, settings, estimator, matcher):
    """One wrong match with a low confidence: with equal weights it would decide."""
    labeled_pair, partner = exact
    wrong = partner.copy()
    wrong[[0, 1]] = partner[[1, 0]]
    errors = []
    for doubtful in (0.1, 0.95):
        scores = np.full(20, 0.95)
        scores[:2] = doubtful
        matches = Matches.from_dense(wrong, scores)
        rows = scoring.compute_errors(labeled_pair, matcher, matches, settings)
        errors.append({name: error for name, _, error in rows}[estimator])
    assert errors[0] < 0.1 and errors[1] > 5
