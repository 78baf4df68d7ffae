"""What a result says of its matches: the geometry that they fit."""

from dataclasses import replace

import numpy as np
import pytest
from made_scenes import MILD

from superglue_sift.geometry import two_view
from superglue_sift.match_result import MatchResult
from superglue_sift.matches import Matches

SIZE = (1024, 768)


def made_result(enlarged, aligned=True):
    """150 matches that scatter by 0.7 px in images of SIZE, and 50 wrong ones; then enlarged."""
    rng = np.random.default_rng(0)
    points0 = rng.uniform(0, SIZE, (200, 2))
    points1 = two_view.transform(points0, MILD) + rng.normal(0, 0.7, (200, 2))
    points1[150:] = rng.uniform(0, SIZE, (50, 2))
    to_file = two_view.resizing((1, 1), (enlarged, enlarged))
    sides = [two_view.transform(p, to_file).astype(np.float32) for p in (points0, points1)]
    size = (int(enlarged * SIZE[0]), int(enlarged * SIZE[1]))
    matches = np.stack([np.arange(200)] * 2, axis=1)
    result = MatchResult(*sides, Matches(matches, np.ones(200, np.float32)), size, size)
    deviations = np.full(200, 0.7 * enlarged, np.float32)
    return replace(result, deviations=deviations) if aligned else result


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("enlarged", [2.5, 8.0])
def test_geometry_does_not_depend_on_the_resolution_of_a_file(aligned, enlarged):
    plain = made_result(1.0, aligned)
    large = made_result(enlarged, aligned)
    to_file = two_view.resizing((1, 1), (enlarged, enlarged))
    for name in ("homography", "fundamental"):
        expected = getattr(plain, name)()
        found = getattr(large, name)()
        np.testing.assert_array_equal(found.inliers, expected.inliers)
        assert expected.inliers[:150].mean() > 0.95
    H = two_view.compose(two_view.inverse(to_file), large.homography().model, to_file)
    assert two_view.corner_error(H, plain.homography().model, SIZE) < 0.01
    F = large.fundamental().model
    apart = two_view.epipolar_distances(F, large.points0, large.points1)
    assert np.median(apart[large.fundamental().inliers]) < 2.0 * enlarged
    K = np.diag([900.0, 900.0, 1.0])
    K[:2, 2] = (512, 384)
    poses = plain.relative_pose(K, K), large.relative_pose(to_file @ K, to_file @ K)
    np.testing.assert_array_equal(poses[0].inliers, poses[1].inliers)
    np.testing.assert_allclose(poses[0].R, poses[1].R, atol=1e-4)


def test_a_threshold_that_is_named_is_in_pixels_of_the_file():
    large = made_result(8.0)
    for threshold in (8.0, 24.0):
        H, inliers = large.homography(threshold)
        off = two_view.transform(large.points0.astype(float), H) - large.points1
        np.testing.assert_array_equal(inliers, np.linalg.norm(off, axis=1) <= threshold)
    np.testing.assert_array_equal(inliers, large.homography().inliers)
