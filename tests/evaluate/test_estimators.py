"""Poses of synthetic scenes with exact cameras, and least squares with weights."""

import math

import cv2
import numpy as np
import pytest
from made_scenes import TURN

from pipeline.evaluate import estimators
from pipeline.evaluate.estimators import MatchedPoints
from pipeline.evaluate.matchers import OURS
from pipeline.evaluate.pairs import CameraPair
from superglue_sift.geometry import two_view

K = np.array([[500.0, 0, 320], [0, 500, 240], [0, 0, 1]])


def pose(degrees, t):
    T = np.eye(4)
    T[:3, :3] = cv2.Rodrigues(np.radians(np.array(degrees, float)))[0]
    T[:3, 3] = t
    return T


T = pose([3, -8, 2], [1.0, 0.1, 0.2])


def scene(count=80, noise=0.0, seed=0):
    """Pixels of random points in space in both cameras."""
    rng = np.random.default_rng(seed)
    points = rng.uniform([-2, -1.5, 4], [2, 1.5, 9], (count, 3))
    other = points @ T[:3, :3].T + T[:3, 3]
    pixels = [(p / p[:, 2:]) @ K.T for p in (points, other)]
    return [p[:, :2] + rng.normal(0, noise, (count, 2)) if noise else p[:, :2] for p in pixels]


CAMERAS = CameraPair(K, K, T)


def compute_errors(points, cameras=CAMERAS):
    """Degrees, of the pose estimated from matched pixels by each estimator."""
    matched_points = MatchedPoints(*points, OURS, np.ones(len(points[0])))
    poses = [estimate(matched_points, cameras) for estimate in estimators.POSE_ESTIMATORS.values()]
    return [estimators.compute_pose_error(pose, cameras) for pose in poses]


def count_correct(points):
    return (estimators.compute_epipolar_errors(*points, CAMERAS) < estimators.EPIPOLAR_LIMIT).sum()


def test_exact_matches_give_the_exact_pose():
    assert max(compute_errors(scene())) < 0.05 and count_correct(scene()) == 80


def test_outliers_are_wrong_matches_and_do_not_move_the_pose():
    points = scene(noise=0.2)
    points[1][:30] = np.random.default_rng(5).uniform([0, 0], [640, 480], (30, 2))
    assert max(compute_errors(points)) < 2.0 and 50 <= count_correct(points) <= 56


@pytest.mark.parametrize("count", [0, 4])
def test_too_few_matches_are_an_infinite_error(count):
    assert min(compute_errors([side[:count] for side in scene()])) == math.inf


def test_epipolar_error_is_zero_on_the_truth_and_symmetric():
    points = scene()
    assert estimators.compute_epipolar_errors(*points, CAMERAS).max() < 1e-20
    moved = points[1] + [0, 5]  # px, 0.01 in normalized coordinates
    errors = estimators.compute_epipolar_errors(points[0], moved, CAMERAS)
    swapped = CameraPair(K, K, np.linalg.inv(T))
    errors_of_swapped = estimators.compute_epipolar_errors(moved, points[0], swapped)
    np.testing.assert_allclose(errors, errors_of_swapped, rtol=1e-6)
    # both distances squared, summed: about twice 0.01 squared for epipolar lines that lie nearly
    # level
    assert 0.5e-4 < np.median(errors) < 2.5e-4


def test_the_skew_of_a_camera_counts():
    skewed = K.copy()
    skewed[0, 1] = 40.0
    points = [two_view.transform(side, skewed @ np.linalg.inv(K)) for side in scene()]
    assert max(compute_errors(points, CameraPair(skewed, skewed, T))) < 0.1
    assert compute_errors(points)[1] > 0.5  # what ignoring the skew would give


def test_pose_error_is_the_larger_angle():
    """Neither the length nor the sign of t can be seen."""
    base = CameraPair(K, K, pose([0, 0, 0], [1.0, 0, 0]))
    aside = math.tan(math.radians(30))
    for degrees, t, error in ((7, [1, 0, 0], 7), (7, [-5, 0, 0], 7), (0, [1, aside, 0], 30)):
        estimate = pose([0, degrees, 0], t)
        estimate = estimate[:3, :3], estimate[:3, 3]
        assert estimators.compute_pose_error(estimate, base) == pytest.approx(error)


def test_an_estimate_without_a_direction_is_wrong_unless_the_camera_stays():
    """Matches without parallax give a rotation, and zeros in place of a direction."""
    rotation = pose([0, 7, 0], [0, 0, 0])
    for t, error in (([1.0, 0, 0], 90), ([0, 0, 0], 7)):
        truth = CameraPair(K, K, pose([0, 0, 0], t))
        estimate = rotation[:3, :3], rotation[:3, 3]
        assert estimators.compute_pose_error(estimate, truth) == pytest.approx(error)


def test_a_few_confident_matches_do_not_decide_alone():
    """Four matches at p = 1 and sixty at 0.5 have the weights of sixteen at 0.5 and above."""
    weights = estimators.weight_matches(OURS, np.repeat([1.0, 0.5], [4, 60]))
    assert weights == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("count, largest", [(64, 49), (10, 6), (6, 3)])
def test_odds_are_clipped_to_the_sixteenth_largest_or_the_middle_one(count, largest):
    """The fourth largest of few. The odds are 1, 2, 3 and so on."""
    odds = np.arange(1, count + 1)
    weights = estimators.weight_matches(OURS, odds / (1 + odds))
    np.testing.assert_allclose(weights, np.minimum(odds, largest), rtol=0.01)


def test_only_the_ratios_of_weights_count():
    points0 = np.random.default_rng(0).uniform(0, 300, (20, 2))
    points1 = points0 + np.random.default_rng(1).normal(0, 3, (20, 2))
    weights = np.linspace(0.1, 1, 20)
    H, H_other = (estimators.fit_dlt(points0, points1, w) for w in (weights, 100 * weights))
    np.testing.assert_allclose(H_other, H, rtol=1e-6)


def test_the_limit_of_an_inlier_is_a_pixel_at_the_mean_focal_length():
    """So cameras of 250 and 1,000 px, in any order, and of 625 px have one pose of equal rays."""
    rays = [two_view.transform(pixels, np.linalg.inv(K)) for pixels in scene(noise=0.8)]
    poses = []
    for focals in ((625, 625), (250, 1000), (1000, 250)):
        K0, K1 = (np.diag([focal, focal, 1.0]) for focal in focals)
        pixels = two_view.transform(rays[0], K0), two_view.transform(rays[1], K1)
        points = MatchedPoints(*pixels, OURS, np.ones(80))
        poses.append(np.column_stack(estimators.estimate_pose(points, CameraPair(K0, K1, T))))
    np.testing.assert_allclose(poses, [poses[0]] * 3, atol=1e-6)


def test_exact_matches_decide_if_the_deviations_of_refined_matches_are_known():
    points0 = np.random.default_rng(0).uniform(0, 300, (120, 2))
    deviations = np.repeat([0.02, 1.0], [50, 70])
    noise = np.random.default_rng(1).normal(size=(120, 2)) * deviations[:, None]
    points = MatchedPoints(points0, two_view.transform(points0, TURN) + noise, OURS, np.ones(120))
    weighted, equal = (
        two_view.compute_corner_error(estimators.fit_ransac(matches), TURN, (300, 300))
        for matches in (points._replace(deviations=deviations), points)
    )
    assert weighted < 0.7 * equal


def test_the_most_confident_of_few_matches_are_at_least_four():
    for count in range(4, 12):
        is_selected = estimators.select_most_confident("ratio_test", np.linspace(0.3, 0.9, count))
        assert is_selected.sum() == max(4, math.ceil(0.4 * count)) and is_selected[-4:].all()
