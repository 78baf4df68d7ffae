"""Positions of matches in two views: of a surface, wrong ones, and ones that slide along lines."""

import math

import numpy as np
from made_scenes import TURN

from superglue_sift.geometry import two_view
from superglue_sift.matches import Matches


def view_surface(count, seed=0):
    """Positions (count, 2) in two views of a wavy surface, from cameras that moved and turned.

    The views have 640x480 px.
    """
    rng = np.random.default_rng(seed)
    points = rng.uniform([-2, -1.5, 0], [2, 1.5, 0], (count, 3))
    points[:, 2] = 6 + np.sin(2 * points[:, 0]) + 0.5 * np.cos(points[:, 1])
    sine, cosine = math.sin(0.2), math.cos(0.2)
    R = np.array([[cosine, 0, -sine], [0, 1, 0], [sine, 0, cosine]])
    views = points, points @ R.T + [-1.0, 0.1, 0.3]
    return tuple(xyz[:, :2] / xyz[:, 2:] * 500 + [320, 240] for xyz in views)


def make_wrong_matches(count, seed=0):
    """Positions (count, 2) anywhere in two views of 640x480 px."""
    return tuple(np.random.default_rng(seed).uniform(0, [639, 479], (2, count, 2)))


def slide_along_lines(points, parts):
    """Move points of image 1 along their epipolar lines, by parts of the way to the epipole."""
    F, _ = two_view.fit_fundamental(*points, 1.5)
    epipole = np.linalg.svd(F.T)[2][2]
    return points[0], points[1] + parts[:, None] * (epipole[:2] / epipole[2] - points[1])


def concatenate(*pairs):
    """The positions of several pairs, one after the other."""
    return tuple(np.concatenate(points) for points in zip(*pairs))


def match_range(first, last, score):
    """Keypoints first to last, each matched with the one of the same number."""
    index = np.arange(first, last)
    return Matches(np.stack([index, index], 1), np.full(len(index), score, np.float32))


def join(*parts):
    """Several sets of matches, one after the other."""
    return Matches(
        np.concatenate([part.indices for part in parts]),
        np.concatenate([part.scores for part in parts]),
    )


def make_track_pair(factors, deviation_px):
    """Keypoints of two images that scatter, and their refined matches.

    Each image is `factor` times as large as the one for which limits were chosen.
    """
    rng = np.random.default_rng(0)
    points0 = rng.uniform(0, 300, (80, 2))
    noisy0, noisy1 = (
        xy + rng.normal(0, 0.5, xy.shape) for xy in (points0, two_view.transform(points0, TURN))
    )
    refined1 = two_view.transform(noisy0, TURN)
    deviations = np.full(80, deviation_px * factors[1])
    keypoints = factors[0] * noisy0, factors[1] * noisy1
    return keypoints, (0, 1, np.stack([np.arange(80)] * 2, 1), factors[1] * refined1, deviations)
