"""Fits to matches that have no geometry: of a mirror image, and where OpenCV fails."""

import cv2
import numpy as np
from made_scenes import MILD

from superglue_sift.geometry import two_view

SIZE = (640, 480)


def points_in(left, top, right, bottom, count, seed=0):
    return np.random.default_rng(seed).uniform([left, top], [right, bottom], (count, 2))


def scatter(points, seed=1):
    return points + np.random.default_rng(seed).normal(0, 0.3, points.shape)


def test_a_mirror_image_has_no_homography(monkeypatch):
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
    # nor where OpenCV finds one
    mirror = np.array([[-1.0, 0, 639], [0, 1, 0], [0, 0, 1]])
    monkeypatch.setattr(cv2, "findHomography", lambda *_: (mirror, None))
    assert two_view.fit_ransac(points, mirrored) is None


def test_wrong_matches_at_which_opencv_fails_have_no_geometry():
    """Nine classical matches of two sides of the door of Herz-Jesus."""
    points0 = [154.1, 453.7, 565.3, 418.0, 562.3, 605.9, 553.7, 606.7, 817.8, 493.8, 288.1, 470.1]
    points0 += [557.6, 602.0, 327.2, 476.6, 780.8, 307.8]
    points1 = [68.2, 522.9, 67.0, 531.7, 131.2, 609.4, 126.7, 609.8, 333.2, 555.6, 115.2, 538.9]
    points1 += [129.2, 607.3, 128.9, 542.2, 319.8, 419.8]
    found = two_view.fit_fundamental(*(np.reshape(p, (9, 2)) for p in (points0, points1)), 1.5)
    assert found.model is None and found.inliers.shape == (9,) and not found.inliers.any()
