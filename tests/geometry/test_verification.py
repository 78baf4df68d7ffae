"""The evidence of a fundamental matrix: known values of both numbers, and of the probability."""

import math

import numpy as np
import pytest
from made_matches import concatenate, make_wrong_matches, slide_along_lines, view_surface

from superglue_sift.geometry import two_view, verification
from superglue_sift.geometry.verification import PRIOR_COUNT, PRIOR_SUPPORT, SMOOTHING

SAME_SIZE = (1.0, 1.0)


def measure(points, ratio_points=None, F=None, factors=SAME_SIZE):
    """The evidence of F, or of the matrix that fits `points`."""
    ratio_points = points if ratio_points is None else ratio_points
    F = two_view.fit_fundamental(*points, 1.5, factors)[0] if F is None else F
    scores = np.full(len(ratio_points[0]), 0.5)
    return verification.measure_evidence(F, points, ratio_points, scores, factors)


def test_matches_of_a_surface_are_one_place_and_wrong_matches_are_not():
    assert verification.compute_probability(measure(view_surface(60))) > 0.95
    assert 0 < verification.compute_probability(measure(make_wrong_matches(60))) < 0.1
    no_evidence = verification.compute_probability(np.zeros(2))
    assert no_evidence == pytest.approx(1 / (1 + math.exp(6)))


def test_known_inlier_ratio_and_support():
    """Of 80 matches half lie on the surface, with all of the ratio test's."""
    surface = view_surface(40)
    points = concatenate(surface, make_wrong_matches(40))
    F, _ = two_view.fit_fundamental(*surface, 1.5)
    log_ratio, support = measure(points, surface, F)
    assert log_ratio == pytest.approx(math.log((40 + SMOOTHING) / SMOOTHING), abs=0.3)
    expected = (40 * 1 + PRIOR_COUNT * PRIOR_SUPPORT) / (40 + PRIOR_COUNT)
    assert support == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("factors", [(4.0, 4.0), (1.0, 5.0), (3.0, 0.5)])
def test_evidence_does_not_depend_on_the_sizes_of_the_files(factors):
    """Files of other sizes have the same evidence, if limits are multiplied."""
    points = concatenate(view_surface(60), make_wrong_matches(40))
    noise = np.random.default_rng(2).normal(0, 0.4, points[1].shape)
    points = points[0], points[1] + noise
    F, _ = two_view.fit_fundamental(*view_surface(60), 1.5)
    large = tuple(xy * factor for xy, factor in zip(points, factors))
    to_small = [np.diag([1 / factor, 1 / factor, 1]) for factor in factors]
    F_large = to_small[1] @ F @ to_small[0]
    np.testing.assert_allclose(measure(large, F=F_large, factors=factors), measure(points, F=F))


def test_repeated_windows_have_little_evidence():
    """Half of the matches are off by one window."""
    surface = view_surface(60)
    points0, points1 = view_surface(60, seed=1)
    points = concatenate(surface, (points0, np.add(points1, [40, 25])))
    F, _ = two_view.fit_fundamental(*surface, 1.5)
    right = measure(surface, surface, F)
    repeated = measure(points, points, F)
    assert repeated[0] < 0.5 and right[0] > 2
    assert repeated[1] < PRIOR_SUPPORT < right[1]


def test_a_mirror_image_has_no_evidence():
    points0, _ = view_surface(80)
    assert not measure((points0, points0 * [-1, 1] + [639, 0])).any()


def test_matches_that_slide_along_their_lines_are_no_inliers():
    points = view_surface(60)
    F, _ = two_view.fit_fundamental(*points, 1.5)
    moved = slide_along_lines(points, np.random.default_rng(1).uniform(-0.3, 0.3, 60))
    assert measure(moved, F=F)[0] < 1 < 2 < measure(points, F=F)[0]


@pytest.mark.parametrize("factors", [SAME_SIZE, (3.0, 1.0)])
def test_a_refined_match_off_its_line_is_no_inlier(factors):
    points0, points1 = view_surface(100)
    is_off = np.zeros(100, bool)
    is_off[3:90:9] = True
    points1[is_off, 1] += 1.5
    is_inlier = verification.find_refined_inliers(factors[0] * points0, points1, factors)
    # One whose line runs up and down may still lie on it.
    assert is_inlier[~is_off].all() and (is_off & ~is_inlier).sum() >= 8
