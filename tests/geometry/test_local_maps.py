"""Affine maps around matches: by the geometry, by the neighbors, by scales and orientations."""

import numpy as np
import pytest
from made_matches import view_surface
from made_scenes import TURN

from superglue_sift.geometry import local_maps, two_view

AFFINE = np.array([[0.8, -0.6], [0.7, 1.1]])


def test_maps_are_those_of_the_homography_although_most_matches_are_wrong():
    """Two thirds of the matches are wrong. Those that agree still lie on one plane."""
    rng = np.random.default_rng(0)
    points0, points1 = rng.uniform(0, 300, (2, 180, 2))
    points1[:60] = two_view.transform(points0[:60], TURN)
    maps = local_maps.fit_local_maps(points0, points1, np.zeros((180, 2, 2)))
    np.testing.assert_allclose(maps[:60], two_view.compute_jacobians(TURN, points0[:60]), atol=1e-3)


def test_with_too_few_matches_the_fallback_is_returned():
    points = np.random.default_rng(0).uniform(0, 300, (5, 2))
    fallback = np.full((5, 2, 2), 7.0)
    assert local_maps.fit_local_maps(points, points, fallback) is fallback


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_maps_and_predictions_of_an_affine_surface_are_exact(factor):
    """They do not depend on the size of the files, if limits are multiplied."""
    points0 = np.random.default_rng(0).uniform(0, 300, (40, 2))
    points = factor * points0, factor * (points0 @ AFFINE.T + [300, 20])
    points[1][0] += [3 * factor, 4 * factor]  # a wrong match
    neighbors = np.arange(1, 40) * np.ones((40, 1), int)
    maps, errors, spreads = local_maps.fit_maps_around(points, neighbors, points, factor)
    np.testing.assert_allclose(maps, np.broadcast_to(AFFINE, (40, 2, 2)), rtol=1e-3)
    np.testing.assert_allclose(errors, [5 * factor, *[0] * 39], atol=0.03 * factor)
    offsets = points[1][1:] - points[1][1:].mean(0)
    np.testing.assert_allclose(spreads, np.sqrt((offsets**2).sum(1).mean()))
    is_right = np.arange(40) > 0
    maps = local_maps.fit_affine_maps(*points, is_right, factor)
    np.testing.assert_allclose(maps, np.broadcast_to(AFFINE, (40, 2, 2)), rtol=1e-3)


def test_a_map_has_the_ratio_of_scales_and_the_difference_of_orientations():
    scales = np.float32([4, 4, 0]), np.float32([8, 4, 9])
    oris = np.float32([10, 0, 0]), np.float32([100, 0, 180])
    maps = local_maps.map_by_orientation(scales, oris)
    expected = [[[0, -2], [2, 0]], np.eye(2), -np.eye(2)]  # without a scale a rotation
    np.testing.assert_allclose(maps, expected, atol=1e-6)


@pytest.mark.parametrize("factors", [(3.0, 3.0), (4.0, 1.0)])
def test_maps_of_a_curved_surface_do_not_depend_on_the_sizes_of_the_files(factors):
    points = view_surface(60)
    files = [factor * xy for factor, xy in zip(factors, points)]
    all_matches = np.ones(60, bool)
    expected = local_maps.fit_affine_maps(*points, all_matches) * (factors[1] / factors[0])
    maps = local_maps.fit_affine_maps(*files, all_matches, factors[0])
    np.testing.assert_allclose(maps, expected, rtol=1e-6)
    neighbors = np.arange(10) * np.ones((60, 1), int)
    maps, errors, spreads = local_maps.fit_maps_around(points, neighbors, points)
    expected = maps * (factors[1] / factors[0]), errors * factors[1], spreads * factors[1]
    around = local_maps.fit_maps_around(files, neighbors, files, factors[0])
    for values, expected_values in zip(around, expected):
        np.testing.assert_allclose(values, expected_values, rtol=1e-6)
