"""Verify a fundamental matrix: the probability that two photographs show one place.

Images of different scenes can pass the epipolar test by chance or through repeated structure. Two
numbers tell whether it is one place, and a logistic regression weighs them
(`compute_probability`):

- The inlier ratio: how many more inliers this geometry has than the best other one. Where windows
  repeat, the remaining matches fit another geometry nearly as well. An inlier counts if it is
  also where its neighbors predict it, in both images. So wrong matches that merely lie near their
  epipolar lines do not count.
- Support: the part of the ratio test's matches around its inliers that are inliers, too. It does
  not depend on the network, which scores a repeated window as highly as the true one. The ratio
  test finds few matches between equal windows, and chance matches disagree with their neighbors.

The matches of a photograph and its mirror image fit one fundamental matrix, too. But the maps
around them reverse orientation, and such a pair is never one place.

Positions are in pixels of the files. Limits are in pixels of the images that SIFT saw, so `factors`
multiply them, one for each image: px of the file per px of that image.

`python -m benchmarks.dev.verification` learns the weights from made places (docs/scenes.md).
"""

from __future__ import annotations

import math
from typing import Optional, Tuple

import numpy as np

from superglue_sift.geometry.local_maps import Points, fit_maps_around
from superglue_sift.geometry.two_view import (
    compute_epipolar_distances,
    compute_mirrored_fraction,
    fit_fundamental,
)

Factors = Tuple[float, float]

# Distances from epipolar lines, in both images
INLIER_PX = 1.5  # Limit for an inlier of a fit
BAND_PX = 2.0  # Limit for a match that is kept
REFINED_PX = 0.8  # Limit for keypoints that were refined by the pixels of all pairs

NEIGHBORS = 10  # Number of nearest matches in an image that are the neighbors of a match
# A match may lie this far from where its neighbors predict it, for each px that they spread, and
# MAX_ERROR_PX more.
MAX_ERROR = 0.1
MAX_ERROR_PX = 3.0
SMOOTHING = 5  # Additive smoothing of both inlier counts
# Few matches of the ratio test say little. Their support is smoothed as by PRIOR_COUNT more
# matches, which have PRIOR_SUPPORT.
PRIOR_COUNT = 20
PRIOR_SUPPORT = 0.75
WEIGHTS = np.array([2.5, 4.5])  # Weights of the log inlier ratio and of support
BIAS = -6.0


def compute_probability(evidence: np.ndarray) -> float:
    """Compute the probability, above 0, that a pair with this evidence (2,) shows one place."""
    return 1.0 / (1.0 + math.exp(-float(evidence @ WEIGHTS) - BIAS))


def measure_evidence(
    F: Optional[np.ndarray],
    points: Points,
    ratio_points: Points,
    ratio_scores: np.ndarray,
    factors: Factors,
) -> np.ndarray:
    """Measure the log inlier ratio and the support of a geometry; return (2,).

    Args:
        F: (3, 3), the fundamental matrix, or None.
        points: (K, 2) px each, positions of all matches at distinct positions.
        ratio_points: (k, 2) px each, those of the ratio test.
        ratio_scores: (k,), scores of the ratio test's matches.
        factors: multiply the limits, one for each image.

    Returns:
        Zeros if there is no geometry, or if it is the geometry of a mirror image.
    """
    nothing = np.zeros(len(WEIGHTS))
    if F is None:
        return nothing
    distances = compute_epipolar_distances(F, *points, factors)
    maps, is_predicted = predict_by_neighbors(_select_points(points, distances <= BAND_PX), factors)
    # Local maps that reverse orientation show a mirror image.
    if compute_mirrored_fraction(maps) > 0.5:
        return nothing
    # Fit another geometry to the matches that disagree with this one.
    others = _select_points(points, distances > 2 * BAND_PX)
    other_inliers = 0
    other_F = fit_fundamental(*others, INLIER_PX, factors)[0]
    if other_F is not None:
        is_near = compute_epipolar_distances(other_F, *others, factors) <= BAND_PX
        other_inliers = predict_by_neighbors(_select_points(others, is_near), factors)[1].sum()
    log_ratio = math.log((is_predicted.sum() + SMOOTHING) / (other_inliers + SMOOTHING))
    return np.array([log_ratio, _measure_support(F, ratio_points, ratio_scores, factors)])


def predict_by_neighbors(points: Points, factors: Factors) -> Tuple[np.ndarray, np.ndarray]:
    """Fit affine maps 0 -> 1 to the neighbors of each match, and predict the match by them.

    Args:
        points: (k, 2) px each, positions of the matches in both images.
        factors: multiply the limits, one for each image.

    Returns:
        The maps (k, 2, 2), and whether each match is where its neighbors predict it in both images,
        (k,) bool. Both are empty for too few matches.
    """
    if len(points[0]) <= NEIGHBORS:
        return np.zeros((0, 2, 2)), np.zeros(0, bool)
    factor0, factor1 = factors
    forward = points
    backward = points[1], points[0]
    maps, error1, spread1 = fit_maps_around(forward, _find_neighbors(points[0]), forward, factor0)
    _, error0, spread0 = fit_maps_around(backward, _find_neighbors(points[1]), backward, factor1)
    is_predicted = are_small_errors(error0, spread0, factor0)
    return maps, is_predicted & are_small_errors(error1, spread1, factor1)


def are_small_errors(errors: np.ndarray, spreads: np.ndarray, factor: float) -> np.ndarray:
    """Return whether matches lie where their neighbors predict them, (k,) bool.

    Args:
        errors: (k,) px, distances from the predicted positions.
        spreads: (k,) px, the spread of the neighbors in the same image.
        factor: multiplies MAX_ERROR_PX.
    """
    return errors <= MAX_ERROR * spreads + MAX_ERROR_PX * factor


def _measure_support(F: np.ndarray, points: Points, scores: np.ndarray, factors: Factors) -> float:
    """Measure support: the part of the matches around the inliers that are inliers, too.

    Neighbors are searched in each image, and the lower part of both images is taken.

    Args:
        F: (3, 3), the fundamental matrix.
        points: (k, 2) px each, the ratio test's matches.
        scores: (k,), their weights.
        factors: multiply the limits, one for each image.
    """
    is_inlier = compute_epipolar_distances(F, *points, factors) <= BAND_PX
    count = int(is_inlier.sum())
    if not count or len(scores) <= NEIGHBORS:
        return PRIOR_SUPPORT
    neighbors = (_find_neighbors(xy)[is_inlier] for xy in points)
    inlier_scores = scores * is_inlier
    part = min(inlier_scores[index].sum() / scores[index].sum() for index in neighbors)
    return float((count * part + PRIOR_COUNT * PRIOR_SUPPORT) / (count + PRIOR_COUNT))


def _find_neighbors(points: np.ndarray) -> np.ndarray:
    """Find the other points nearest to each of k points (k, 2); return (k, NEIGHBORS) indices."""
    from scipy.spatial import KDTree

    return np.asarray(KDTree(points).query(points, NEIGHBORS + 1)[1])[:, 1:]


def _select_points(points: Points, mask: np.ndarray) -> Points:
    """Return the positions of the matches that `mask` (K,) selects, in both images."""
    return points[0][mask], points[1][mask]


def find_refined_inliers(points0: np.ndarray, points1: np.ndarray, factors: Factors) -> np.ndarray:
    """Find the matches of refined keypoints that lie near their epipolar lines.

    Args:
        points0, points1: (K, 2) px, the keypoints of the matches.
        factors: multiply REFINED_PX, one for each image.

    Returns:
        (K,) bool. All entries are true if there is no geometry.
    """
    F = fit_fundamental(points0, points1, REFINED_PX, factors)[0]
    if F is None:
        return np.ones(len(points0), bool)
    return compute_epipolar_distances(F, points0, points1, factors) <= REFINED_PX
