"""Homographies and fundamental matrices: exact points, wrong matches, mirror images, chance."""

import math
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from made_scenes import MILD, TURN

from pipeline.evaluate.estimators import fit_dlt
from superglue_sift.geometry import two_view
from superglue_sift.geometry.pose import estimate_relative_pose

VIEW = (320, 240)
SIZE = (640, 480)
H = np.array([[1.2, 0.1, 5.0], [-0.05, 0.9, -3.0], [1e-4, 2e-4, 1.0]])


def least_squares(p, q):
    return fit_dlt(p, q, np.ones(len(p)))


def points_in(left, top, right, bottom, count, seed=0):
    return np.random.default_rng(seed).uniform([left, top], [right, bottom], (count, 2))


def scatter(points, seed=1):
    return points + np.random.default_rng(seed).normal(0, 0.3, points.shape)


def test_a_mirror_image_has_no_homography():
    points = points_in(5, 5, 634, 474, 80)
    mirrored = scatter(points * [-1, 1] + [639, 0])
    assert two_view.fit_ransac(points, mirrored) is None
    assert two_view.fit_homography(points, mirrored).model is None
    # two thirds wrong, and the rest is no mirror image
    mixed = np.concatenate(
        [two_view.transform(points, MILD), points_in(0, 0, 639, 479, 160, seed=5)]
    )
    both = np.concatenate([points, points_in(0, 0, 639, 479, 160, seed=6)])
    found = two_view.fit_homography(both, mixed)
    assert two_view.corner_error(found.model, MILD, SIZE) < 0.5


def test_wrong_matches_at_which_opencv_fails_have_no_geometry():
    """Nine classical matches of two sides of the door of Herz-Jesus."""
    points0 = [154.1, 453.7, 565.3, 418.0, 562.3, 605.9, 553.7, 606.7, 817.8, 493.8, 288.1, 470.1]
    points0 += [557.6, 602.0, 327.2, 476.6, 780.8, 307.8]
    points1 = [68.2, 522.9, 67.0, 531.7, 131.2, 609.4, 126.7, 609.8, 333.2, 555.6, 115.2, 538.9]
    points1 += [129.2, 607.3, 128.9, 542.2, 319.8, 419.8]
    found = two_view.fit_fundamental(*(np.reshape(p, (9, 2)) for p in (points0, points1)), 1.5)
    assert found.model is None and found.inliers.shape == (9,) and not found.inliers.any()


def error_of(found):
    return two_view.corner_error(found, H, VIEW)


def exact_matches(seed, count=200):
    """Exact matches in 300 px, and a generator."""
    rng = np.random.default_rng(seed)
    p = rng.uniform(0, 300, (count, 2))
    return p, two_view.transform(p, H), rng


def test_maps_are_inverted_and_composed():
    p, q, _ = exact_matches(0)
    assert np.allclose(two_view.transform(torch.from_numpy(p), torch.from_numpy(H)).numpy(), q)
    assert np.allclose(two_view.compose(two_view.inverse(H[None]), H[None])[0], np.eye(3))


# OpenCV's framework for RANSAC takes points as float32: 2e-5 px at 300, some hundred times that
# at the corners
@pytest.mark.parametrize("fit, limit", [(two_view.fit_ransac, 5e-3), (least_squares, 1e-4)])
def test_fits_exact_points(fit, limit):
    p, q, _ = exact_matches(0)
    assert error_of(fit(p, q)) < limit
    assert fit(p[:3], p[:3]) is None
    assert fit(np.ones((9, 2)), np.ones((9, 2))) is None


def test_ransac_leaves_wrong_matches_out_and_repeats_itself():
    p, q, rng = exact_matches(0)
    q = q + rng.normal(0, 0.5, p.shape)
    q[:140] = rng.uniform(0, 300, (140, 2))
    found = [two_view.fit_ransac(p, q, seed=seed) for seed in (0, 1, 0)]
    assert max(map(error_of, found)) < 3.0
    assert np.array_equal(found[0], found[2])


def test_ransac_ends_close_though_some_true_matches_lie_far_off(root):
    """Also by the lines for OpenCV in the docs, whose RANSAC alone stops after a few samples
    and keeps the inliers of the best.
    """
    section = (root / "docs/matching.md").read_text().split("### A homography by OpenCV")[1]
    lines = section.split("```python\n")[1].split("```")[0]
    errors = []
    for seed in range(20):
        p, q, rng = exact_matches(seed)
        # A quarter of large keypoints
        q = q + np.where(np.arange(200) < 150, 0.2, 2.0)[:, None] * rng.normal(size=p.shape)
        q[::10] = rng.uniform(0, 300, (20, 2))
        cv2.setRNGSeed(seed)
        plain = cv2.findHomography(p, q, cv2.RANSAC, 3.0)[0]
        result = SimpleNamespace(points0=p, points1=q, deviations=None)
        names = {"cv2": cv2, "two_view": two_view, "result": result}
        exec(lines, names)
        errors.append([*map(error_of, (two_view.fit_ransac(p, q), names["H"], plain))])
    ours, docs, alone = np.mean(errors, axis=0)
    assert ours < 0.15 and docs < 0.15 and ours < 0.5 * alone


@pytest.mark.parametrize(
    "exact, rough, stated, limit",
    [(0.1, 0.5, np.nan, 0.7), (0.02, 1.0, 1.0, 0.5), (0.02, 1.0, np.nan, 0.2)],
)
def test_exact_matches_decide_where_deviations_are_known(exact, rough, stated, limit):
    """Two fifths are aligned; the others are not, or say how far they scatter."""
    errors = []
    for seed in range(10):
        p, q, rng = exact_matches(seed, 120)
        aligned = np.arange(120) < 50
        q = q + np.where(aligned, exact, rough)[:, None] * rng.normal(size=p.shape)
        deviations = np.where(aligned, exact, stated)
        fits = two_view.fit_ransac(p, q, deviations=deviations), two_view.fit_ransac(p, q)
        errors.append([*map(error_of, fits)])
    weighed, alike = np.mean(errors, axis=0)
    assert weighed < 0.1 and weighed < limit * alike


def test_dlt_heeds_weights():
    p, q, _ = exact_matches(0, 40)
    q[:10] += 50
    weights = np.where(np.arange(40) < 10, 0.0, 1.0)
    assert error_of(fit_dlt(p, q, weights)) < 1e-4
    assert error_of(least_squares(p, q)) > 5


def test_corner_error_of_a_shift():
    shift = np.array([[1, 0, 3.0], [0, 1, 4.0], [0, 0, 1]])
    assert two_view.corner_error(shift, np.eye(3), (640, 480)) == pytest.approx(5.0)
    assert two_view.corner_error(None, np.eye(3), (640, 480)) == math.inf


def test_local_maps_are_a_homographys_though_most_matches_are_wrong():
    """Of raw nearest neighbours two thirds are wrong; those that agree still lie on one plane."""
    rng = np.random.default_rng(0)
    points0, points1 = rng.uniform(0, 300, (2, 180, 2))
    points1[:60] = two_view.transform(points0[:60], TURN)
    maps = two_view.fit_local_maps(points0, points1, np.zeros((180, 2, 2)))
    np.testing.assert_allclose(maps[:60], two_view.jacobians(TURN, points0[:60]), atol=1e-3)


def test_significance_is_the_bound_of_the_binomial_tail():
    # 57 of 57: 50 beyond the sample, each by chance 0.01, among C(57, 7) = 264385836 choices
    found = two_view.significance(57, 57, 0.01, 7)
    assert found == pytest.approx(100 - math.log10(264385836))
    assert two_view.significance(4, 4, 0.01, 4) == 0  # four matches always fit
    assert two_view.significance(500, 12, 0.01, 7) == 0


def test_a_model_of_few_matches_or_of_chance_is_not_supported():
    disk = math.pi * 3**2 / (1024 * 768)
    for count, inliers, supported in ((497, 9, False), (8, 8, True), (4, 4, False), (9, 4, False)):
        digits = two_view.significance(count, inliers, disk, 4)
        fit = two_view.Fit(np.eye(3), np.arange(count) < inliers, digits)
        assert fit.supported is supported
    model, some = fit
    assert model is fit.model and some is fit.inliers


# Relative poses

FOCAL = 900.0
CAMERA = np.array([[FOCAL, 0, 512], [0, FOCAL, 384], [0, 0, 1.0]])
ROTATION = cv2.Rodrigues(np.array([0.02, 0.2, 0.05]))[0]


def views_of_points(t, noise_px, wrong, count=400, rotation=ROTATION, depths=(4, 12)):
    """Match points at depths of 4 to 12 m in two views of 1,024 x 768 px that are t metres apart.

    wrong: this part of the matches is at random positions in image 1.
    """
    rng = np.random.default_rng(0)
    points0 = rng.uniform([0, 0], [1024, 768], (count, 2))
    rays = two_view.to_homogeneous(two_view.transform(points0, np.linalg.inv(CAMERA)))
    seen = (rays * rng.uniform(*depths, (count, 1))) @ rotation.T + t
    points1 = two_view.transform(seen[:, :2] / seen[:, 2:], CAMERA)
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
    pytest.importorskip("poselib")
    *points, is_wrong = views_of_points(np.zeros(3), noise_px, wrong, count, rotation)
    pose = estimate_relative_pose(*points, CAMERA, CAMERA)
    assert pose.R is not None and pose.t is None
    right = pose.inliers[~is_wrong]
    # A match is off by 1.4 times the noise along each axis. At 1 px, 77 % are within 1.7 px.
    assert right.mean() > 0.6 and not pose.inliers[is_wrong].any()
    # Five deviations of the mean of the right matches, and rounding
    rounding = 1e-5
    noise = np.degrees(1.4 * noise_px / FOCAL)
    assert angle_between(pose.R, rotation) < rounding + 5 * 2 * noise / math.sqrt(right.sum())


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
    """From two centimetres on, at depths of metres. Matches of one plane have parallax, too."""
    pytest.importorskip("poselib")
    t = baseline * np.array([0.9, 0.1, 0.4]) / np.linalg.norm([0.9, 0.1, 0.4])
    *points, is_wrong = views_of_points(t, noise_px, 0.2, depths=depths)
    pose = estimate_relative_pose(*points, CAMERA, CAMERA)
    assert np.degrees(np.arccos(abs(pose.t @ t) / baseline)) < 15
    assert angle_between(pose.R, ROTATION) < 1.5
    assert not pose.inliers[is_wrong].all()


def test_a_few_near_points_in_front_of_far_ones_show_parallax():
    pytest.importorskip("poselib")
    near = views_of_points(np.array([0.3, 0, 0]), 0.1, 0.0, 100)
    far = views_of_points(np.zeros(3), 0.1, 0.0, 600)
    points = (np.concatenate(pair) for pair in zip(near[:2], far[:2]))
    pose = estimate_relative_pose(*points, CAMERA, CAMERA)
    assert np.degrees(np.arccos(abs(pose.t[0]))) < 5


@pytest.mark.parametrize("count", [5, 6, 8])
def test_few_matches_that_no_rotation_explains_keep_their_direction(count):
    pytest.importorskip("poselib")
    *points, _ = views_of_points(np.array([1.0, 0.1, 0.2]), 0.0, 0.0, count)
    assert estimate_relative_pose(*points, CAMERA, CAMERA).t is not None
