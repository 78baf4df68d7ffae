"""Relative poses of two cameras, with and without parallax."""

import math

import cv2
import numpy as np
import pytest

from superglue_sift.geometry import two_view
from superglue_sift.geometry.pose import estimate_relative_pose

pytest.importorskip("poselib")

FOCAL = 900.0
CAMERA = np.array([[FOCAL, 0, 512], [0, FOCAL, 384], [0, 0, 1.0]])
ROTATION = cv2.Rodrigues(np.array([0.02, 0.2, 0.05]))[0]


def view_points(t, noise_px, wrong, count=400, rotation=ROTATION, depths=(4, 12)):
    """Match points at depths of 4 to 12 m in two views of 1,024 x 768 px that are t meters apart.

    wrong: this part of the matches is at random positions in image 1.
    """
    rng = np.random.default_rng(0)
    points0 = rng.uniform([0, 0], [1024, 768], (count, 2))
    rays = two_view.to_homogeneous(two_view.transform(points0, np.linalg.inv(CAMERA)))
    xyz = (rays * rng.uniform(*depths, (count, 1))) @ rotation.T + t
    points1 = two_view.transform(xyz[:, :2] / xyz[:, 2:], CAMERA)
    points0, points1 = (p + rng.normal(0, noise_px, p.shape) for p in (points0, points1))
    is_wrong = np.arange(count) < wrong * count
    points1[is_wrong] = rng.uniform([0, 0], [1024, 768], (is_wrong.sum(), 2))
    return points0, points1, is_wrong


def angle_between(R, true_R):
    return np.degrees(np.arccos(np.clip((np.trace(R.T @ true_R) - 1) / 2, -1, 1)))


@pytest.mark.parametrize("rotation", [ROTATION, np.eye(3)], ids=["rotation", "identity"])
@pytest.mark.parametrize(
    "count, noise_px, wrong",
    [
        (8, 0.0, 0.0),
        (30, 0.2, 0.0),
        (30, 0.7, 0.3),
        (400, 0.0, 0.0),
        (400, 0.2, 0.4),
        (400, 0.7, 0.3),
    ],
)
def test_a_camera_that_stays_at_its_place_shows_no_parallax(rotation, count, noise_px, wrong):
    *points, is_wrong = view_points(np.zeros(3), noise_px, wrong, count, rotation)
    R, t, inliers = estimate_relative_pose(*points, CAMERA, CAMERA)
    assert R is not None and t is None
    right_inliers = inliers[~is_wrong]
    # A match is off by 1.4 times the noise along each axis. At 1 px, 77 % are within 1.7 px.
    assert right_inliers.mean() > 0.6 and not inliers[is_wrong].any()
    # Five deviations of the mean of the right matches, and rounding
    rounding = 1e-5
    noise = np.degrees(1.4 * noise_px / FOCAL)
    assert angle_between(R, rotation) < rounding + 5 * 2 * noise / math.sqrt(right_inliers.sum())


DEPTH = (4, 12)
PLANE = (8, 8.0001)


@pytest.mark.parametrize(
    "baseline, noise_px, depths",
    [
        (0.02, 0.02, DEPTH),
        (0.05, 0.2, DEPTH),
        (0.2, 0.7, DEPTH),
        (1.0, 0.7, DEPTH),
        (3.0, 0.2, DEPTH),
        (0.2, 0.2, PLANE),
        (1.0, 0.7, PLANE),
    ],
)
def test_a_camera_that_moves_has_a_direction(baseline, noise_px, depths):
    """From two centimeters on, at depths of meters. Matches of one plane have parallax, too."""
    true_t = baseline * np.array([0.9, 0.1, 0.4]) / np.linalg.norm([0.9, 0.1, 0.4])
    *points, is_wrong = view_points(true_t, noise_px, 0.2, depths=depths)
    R, t, inliers = estimate_relative_pose(*points, CAMERA, CAMERA)
    assert np.degrees(np.arccos(abs(t @ true_t) / baseline)) < 15
    assert angle_between(R, ROTATION) < 1.5
    # A wrong match at random lies within 1.7 px of its line in about 3.4 of 768 px, or 0.4 %.
    assert inliers[is_wrong].mean() < 0.1


def test_a_few_near_points_in_front_of_far_ones_show_parallax():
    near = view_points(np.array([0.3, 0, 0]), 0.1, 0.0, 100)
    far = view_points(np.zeros(3), 0.1, 0.0, 600)
    points = (np.concatenate(pair) for pair in zip(near[:2], far[:2]))
    _, t, _ = estimate_relative_pose(*points, CAMERA, CAMERA)
    assert np.degrees(np.arccos(abs(t[0]))) < 5


@pytest.mark.parametrize("count", [5, 6, 8])
def test_few_matches_that_no_rotation_explains_keep_their_direction(count):
    *points, _ = view_points(np.array([1.0, 0.1, 0.2]), 0.0, 0.0, count)
    assert estimate_relative_pose(*points, CAMERA, CAMERA)[1] is not None


@pytest.mark.parametrize("factors", [(4.0, 4.0), (1.0, 3.0)])
def test_a_pose_does_not_depend_on_the_sizes_of_the_files(factors):
    *points, _ = view_points(np.array([1.0, 0.1, 0.2]), 0.3, 0.3)
    expected_R, expected_t, expected = estimate_relative_pose(*points, CAMERA, CAMERA)
    files = [xy * factor for xy, factor in zip(points, factors)]
    cameras = [np.diag([factor, factor, 1]) @ CAMERA for factor in factors]
    R, t, inliers = estimate_relative_pose(*files, *cameras, factors=factors)
    np.testing.assert_array_equal(inliers, expected)
    np.testing.assert_allclose(R, expected_R, atol=1e-6)
    np.testing.assert_allclose(t, expected_t, atol=1e-6)
