"""Homographies and fundamental matrices: exact points, wrong matches, mirror images, chance."""

import math
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from made_matches import view_surface

from pipeline.evaluate.estimators import fit_dlt
from superglue_sift.geometry import two_view

SIZE = (320, 240)
H = np.array([[1.2, 0.1, 5.0], [-0.05, 0.9, -3.0], [1e-4, 2e-4, 1.0]])


def least_squares(points0, points1):
    return fit_dlt(points0, points1, np.ones(len(points0)))


def compute_error(estimated_H):
    return two_view.compute_corner_error(estimated_H, H, SIZE)


def make_exact_matches(seed, count=200):
    """Exact matches in 300 px, and a generator."""
    rng = np.random.default_rng(seed)
    points0 = rng.uniform(0, 300, (count, 2))
    return points0, two_view.transform(points0, H), rng


def test_maps_are_inverted_and_composed():
    points0, points1, _ = make_exact_matches(0)
    mapped = two_view.transform(torch.from_numpy(points0), torch.from_numpy(H)).numpy()
    assert np.allclose(mapped, points1)
    assert np.allclose(two_view.compose(two_view.inverse(H[None]), H[None])[0], np.eye(3))


def test_a_resized_image_has_its_corner_at_minus_one_half():
    to_resized = two_view.map_to_resized((100, 50), (300, 100))
    points = np.array([[-0.5, -0.5], [99.5, 49.5], [0, 0]])
    expected = [[-0.5, -0.5], [299.5, 99.5], [1, 0.5]]
    np.testing.assert_allclose(two_view.transform(points, to_resized), expected)


def test_the_corner_error_of_a_shift_is_its_length():
    shift = np.array([[1, 0, 3.0], [0, 1, 4.0], [0, 0, 1]])
    assert two_view.compute_corner_error(shift, np.eye(3), (640, 480)) == pytest.approx(5.0)
    assert two_view.compute_corner_error(None, np.eye(3), (640, 480)) == math.inf


# OpenCV's framework for RANSAC takes points as float32: 2e-5 px at 300, some hundred times that
# at the corners
@pytest.mark.parametrize("fit, limit", [(two_view.fit_ransac, 5e-3), (least_squares, 1e-4)])
def test_a_fit_to_exact_points_is_exact(fit, limit):
    points0, points1, _ = make_exact_matches(0)
    assert compute_error(fit(points0, points1)) < limit
    assert fit(points0[:3], points0[:3]) is None
    assert fit(np.ones((9, 2)), np.ones((9, 2))) is None


def test_ransac_leaves_wrong_matches_out_and_repeats_itself():
    points0, points1, rng = make_exact_matches(0)
    points1 = points1 + rng.normal(0, 0.5, points0.shape)
    points1[:140] = rng.uniform(0, 300, (140, 2))
    fits = [two_view.fit_ransac(points0, points1, seed=seed) for seed in (0, 1, 0)]
    assert max(map(compute_error, fits)) < 3.0
    assert np.array_equal(fits[0], fits[2])


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_homography_does_not_depend_on_the_size_of_the_files(factor):
    """In files of another size, limits are multiplied, also that of refined deviations."""
    points0, points1, rng = make_exact_matches(0)
    deviations = rng.uniform(0.05, 1, 200)
    points1 = points1 + rng.normal(0, 1, points1.shape) * deviations[:, None]
    points1[:60] = rng.uniform(0, 300, (60, 2))
    expected_H, expected = two_view.fit_homography(points0, points1, deviations=deviations)
    file_H, inliers = two_view.fit_homography(
        factor * points0, factor * points1, deviations=factor * deviations, factor=factor
    )
    np.testing.assert_array_equal(inliers, expected)
    to_file = np.diag([factor, factor, 1])
    small_H = two_view.compose(two_view.inverse(to_file), file_H, to_file)
    assert two_view.compute_corner_error(small_H, expected_H, SIZE) < 0.01


def test_ransac_ends_close_though_some_true_matches_lie_far_off(root):
    """Also by the lines for OpenCV in the docs, whose RANSAC alone stops after a few samples
    and keeps the inliers of the best.
    """
    section = (root / "docs/matching.md").read_text().split("### A homography by OpenCV")[1]
    lines = section.split("```python\n")[1].split("```")[0]
    errors = []
    for seed in range(20):
        points0, points1, rng = make_exact_matches(seed)
        # A quarter of large keypoints
        scatter = np.where(np.arange(200) < 150, 0.2, 2.0)[:, None]
        points1 = points1 + scatter * rng.normal(size=points0.shape)
        points1[::10] = rng.uniform(0, 300, (20, 2))
        cv2.setRNGSeed(seed)
        plain_H = cv2.findHomography(points0, points1, cv2.RANSAC, 3.0)[0]
        result = SimpleNamespace(points0=points0, points1=points1, deviations=None)
        names = {"cv2": cv2, "two_view": two_view, "result": result}
        exec(lines, names)
        ours = two_view.fit_ransac(points0, points1)
        errors.append([*map(compute_error, (ours, names["H"], plain_H))])
    ours, documented, plain = np.mean(errors, axis=0)
    # Of 150 matches that scatter by 0.2 px, the error at a corner is about 0.2 * 6 / sqrt(150).
    assert ours < 0.15 and documented < 0.15 and ours < 0.5 * plain


@pytest.mark.parametrize(
    "exact, rough, stated, limit",
    [(0.1, 0.5, np.nan, 0.7), (0.02, 1.0, 1.0, 0.5), (0.02, 1.0, np.nan, 0.2)],
)
def test_exact_matches_decide_where_deviations_are_known(exact, rough, stated, limit):
    """Two fifths are refined. The others are not, or their deviations say how far they scatter."""
    errors = []
    for seed in range(10):
        points0, points1, rng = make_exact_matches(seed, 120)
        is_refined = np.arange(120) < 50
        scatter = np.where(is_refined, exact, rough)
        points1 = points1 + scatter[:, None] * rng.normal(size=points0.shape)
        deviations = np.where(is_refined, exact, stated)
        weighted_H = two_view.fit_ransac(points0, points1, deviations=deviations)
        equal_H = two_view.fit_ransac(points0, points1)
        errors.append([compute_error(weighted_H), compute_error(equal_H)])
    weighted, equal = np.mean(errors, axis=0)
    assert weighted < 0.1 and weighted < limit * equal


def test_dlt_ignores_matches_of_weight_zero():
    points0, points1, _ = make_exact_matches(0, 40)
    points1[:10] += 50
    weights = np.where(np.arange(40) < 10, 0.0, 1.0)
    assert compute_error(fit_dlt(points0, points1, weights)) < 1e-4
    assert compute_error(least_squares(points0, points1)) > 5


def test_a_mirror_image_has_no_homography():
    points0 = np.random.default_rng(0).uniform(5, (634, 474), (80, 2))
    noise = np.random.default_rng(1).normal(0, 0.3, points0.shape)
    assert two_view.fit_ransac(points0, points0 * [-1, 1] + [639, 0] + noise) is None


@pytest.mark.parametrize("factors", [(1.0, 1.0), (4.0, 4.0), (5.0, 0.5)])
def test_a_fundamental_matrix_of_files_of_any_size(factors):
    """Distances from its lines are those of the images for which limits were chosen."""
    rng = np.random.default_rng(0)
    points0, points1 = view_surface(200)
    points1 = points1 + rng.normal(0, 0.3, points1.shape)
    is_wrong = np.arange(200) < 60
    points1[is_wrong] = rng.uniform(0, (639, 479), (60, 2))
    files = points0 * factors[0], points1 * factors[1]
    F, inliers = two_view.fit_fundamental(*files, 1.5, factors)
    distances = two_view.compute_epipolar_distances(F, *files, factors)
    assert inliers[~is_wrong].mean() > 0.97 and inliers[is_wrong].mean() < 0.1
    assert np.median(distances[~is_wrong]) < 0.4
    # Lines and distances of the same matrix in the small images
    to_files = [np.diag([factor, factor, 1]) for factor in factors]
    small_F = to_files[1] @ F @ to_files[0]
    np.testing.assert_allclose(
        two_view.compute_epipolar_distances(small_F, points0, points1), distances
    )


def test_degenerate_matches_at_which_opencv_fails_have_no_geometry():
    """Nine classical matches of two sides of the door of Herz-Jesus."""
    points0 = [154.1, 453.7, 565.3, 418.0, 562.3, 605.9, 553.7, 606.7, 817.8, 493.8, 288.1, 470.1]
    points0 += [557.6, 602.0, 327.2, 476.6, 780.8, 307.8]
    points1 = [68.2, 522.9, 67.0, 531.7, 131.2, 609.4, 126.7, 609.8, 333.2, 555.6, 115.2, 538.9]
    points1 += [129.2, 607.3, 128.9, 542.2, 319.8, 419.8]
    points = (np.reshape(values, (9, 2)) for values in (points0, points1))
    F, inliers = two_view.fit_fundamental(*points, 1.5)
    assert F is None and inliers.shape == (9,) and not inliers.any()


def test_significance_is_the_bound_of_the_binomial_tail():
    # 57 of 57: 50 beyond the sample, each by chance 0.01, among C(57, 7) = 264385836 choices
    digits = two_view.compute_significance(57, 57, 0.01, 7)
    assert digits == pytest.approx(100 - math.log10(264385836))
    assert two_view.compute_significance(4, 4, 0.01, 4) == 0  # four matches always fit
    assert two_view.compute_significance(500, 12, 0.01, 7) == 0


@pytest.mark.parametrize(
    "count, inlier_count, supported", [(497, 9, False), (8, 8, True), (4, 4, False), (9, 4, False)]
)
def test_a_model_of_few_matches_or_of_chance_is_not_supported(count, inlier_count, supported):
    inliers = np.arange(count) < inlier_count
    assert two_view.is_supported(inliers, 3.0, (1024, 768), 4, is_line=False) is supported


@pytest.mark.parametrize(
    "limit_px, is_line, supported",
    [(2.0, False, True), (10.0, False, False), (0.25, True, True), (10.0, True, False)],
)
def test_half_of_the_matches_are_support_only_in_a_small_part_of_the_image(
    limit_px, is_line, supported
):
    """A disk of 10 px has 31 % of an image of 100x100 px, and a band along a line 28 %.

    A disk of 2 px has 0.1 %, and a band of 0.25 px 0.7 %.
    """
    inliers = np.arange(20) < 10
    assert two_view.is_supported(inliers, limit_px, (100, 100), 4, is_line) is supported
