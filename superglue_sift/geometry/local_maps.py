"""Fit affine maps between the images to the matches around each match.

A surface that is smooth moves the points around a match by one affine map, whose Jacobian is
(2, 2). Refinement warps patches by it, and verification asks whether a match lies where the matches
around it predict.
"""

from __future__ import annotations

from typing import Tuple, Union

import numpy as np

from superglue_sift.geometry.two_view import compute_jacobians, fit_fundamental, fit_homography

Points = Tuple[np.ndarray, np.ndarray]  # Positions in both images, px

GEOMETRY_PX = 3.0  # Maximum distance of an inlier of the geometry
PLANAR = 0.6  # A homography's Jacobians are used if at least this part are inliers
MIN_INLIERS = 6  # With fewer inliers, maps come from scale and orientation
NEIGHBORS = 10  # Number of matches to which a map of refinement is fitted
NEAR_PX = 30.0  # A neighbor at this distance has half the weight
# Neighbors that scatter by this distance weigh as much as the prior of their map.
PRIOR_PX = 5.0


def fit_local_maps(points0: np.ndarray, points1: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    """Fit local affine maps 0 -> 1 at K matches; return (K, 2, 2).

    Inliers of a homography that fits most matches get its Jacobian. Other matches get the
    least-squares affine map of the nearest inliers of one homography or epipolar geometry. Without
    a geometry all get `fallback`.

    Args:
        points0, points1: (K, 2) px of the images that are sampled by the maps.
        fallback: (K, 2, 2), the maps without a geometry.
    """
    rounded = points0.astype(np.float32), points1.astype(np.float32)
    H, is_planar = fit_homography(*rounded, GEOMETRY_PX)
    inlier_mask = is_planar
    # Where a plane does not explain most matches, those that fit one camera motion count too.
    if is_planar.sum() < PLANAR * len(is_planar):
        inlier_mask = is_planar | fit_fundamental(*rounded, GEOMETRY_PX)[1]
    if inlier_mask.sum() < MIN_INLIERS:
        return fallback
    # On one plane the Jacobian of the homography is more exact than a fit to neighbors.
    maps = fit_affine_maps(points0, points1, inlier_mask)
    if H is not None and is_planar.sum() >= PLANAR * inlier_mask.sum():
        maps[is_planar] = compute_jacobians(H, points0[is_planar])
    return maps


def map_by_orientation(scales: Points, oris: Points) -> np.ndarray:
    """Return the maps 0 -> 1 (K, 2, 2) by the scales and orientations of matched keypoints.

    Args:
        scales: (K,) px of both images. Where one is 0, the map is only the rotation.
        oris: (K,) degrees of both images.
    """
    is_known = (scales[0] > 0) & (scales[1] > 0)
    ratio = np.ones(len(is_known))
    np.divide(scales[1], scales[0], out=ratio, where=is_known)
    # Multiply the rotation by the difference of both orientations with the ratio of both scales.
    rotation = np.radians((oris[1] - oris[0]).astype(np.float64))
    c = ratio * np.cos(rotation)
    s = ratio * np.sin(rotation)
    return np.stack([c, -s, s, c], -1).reshape(-1, 2, 2)


def fit_affine_maps(
    points0: np.ndarray, points1: np.ndarray, inlier_mask: np.ndarray, factor: float = 1.0
) -> np.ndarray:
    """Fit affine maps 0 -> 1 at K matches to their nearest inliers; return (K, 2, 2).

    The prior of each map is one map of all inliers.

    Args:
        points0, points1: (K, 2) px.
        inlier_mask: (K,) bool, the matches to which maps are fitted, two or more.
        factor: multiplies NEAR_PX and PRIOR_PX, which are in px of image 0.
    """
    from scipy.spatial import KDTree

    inliers0 = points0[inlier_mask]
    inliers1 = points1[inlier_mask]
    count = min(NEIGHBORS, len(inliers0))
    distances, index = KDTree(inliers0).query(points0, count)
    # Weights (K, n) of the neighbors, with sum 1
    weights = 1.0 / (NEAR_PX * factor + distances)
    weights = weights / weights.sum(1, keepdims=True)
    # (K, n, 2) positions of the neighbors relative to their center
    offsets0, offsets1 = (
        points[index] - (weights[..., None] * points[index]).sum(1, keepdims=True)
        for points in (inliers0, inliers1)
    )
    prior = np.linalg.lstsq(inliers0 - inliers0.mean(0), inliers1 - inliers1.mean(0), rcond=None)[0]
    return _solve_maps(offsets0, offsets1, weights, PRIOR_PX * factor, prior)


def fit_maps_around(
    guides: Points, neighbors: np.ndarray, points: Points, factor: float = 1.0
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit an affine map to the neighbors of each of k matches, and predict the matches by it.

    Args:
        guides: (m, 2) px each, positions in both images of the matches to which maps are fitted.
        neighbors: (k, n), the neighbors of each match, as indices of `guides`.
        points: (k, 2) px each, positions of the k matches in both images.
        factor: multiplies PRIOR_PX, which is in px of image 0.

    Returns:
        Three arrays:
        - (k, 2, 2), the maps,
        - (k,), the distance in px of image 1 of each match from where its map sends it,
        - (k,), the spread in px of its neighbors in image 1.
    """
    # (m, 2) -> (k, n, 2) neighbors -> (k, 2), their centers
    center0, center1 = (positions[neighbors].mean(1) for positions in guides)
    offsets0 = guides[0][neighbors] - center0[:, None]
    offsets1 = guides[1][neighbors] - center1[:, None]
    # The prior keeps a map small where the neighbors are near.
    maps = _solve_maps(offsets0, offsets1, np.ones(neighbors.shape), PRIOR_PX * factor)
    predicted = center1 + np.einsum("kij,kj->ki", maps, points[0] - center0)
    spread = np.sqrt((offsets1**2).sum(2).mean(1))
    return maps, np.linalg.norm(predicted - points[1], axis=1), spread


def _solve_maps(
    offsets0: np.ndarray,
    offsets1: np.ndarray,
    weights: np.ndarray,
    prior_px: float,
    prior: Union[float, np.ndarray] = 0.0,
) -> np.ndarray:
    """Solve for maps (k, 2, 2) by least squares with a prior on each.

    Args:
        offsets0, offsets1: (k, n, 2) px, neighbors relative to their center in both images.
        weights: (k, n), of the neighbors.
        prior_px: the square root of the weight of the prior.
        prior: the transposed map, (2, 2), which the maps have without neighbors.
    """
    normal = np.einsum("kn,kni,knj->kij", weights, offsets0, offsets0) + prior_px**2 * np.eye(2)
    right = np.einsum("kn,kni,knj->kij", weights, offsets0, offsets1) + prior_px**2 * prior
    return np.linalg.solve(normal, right).swapaxes(1, 2)
