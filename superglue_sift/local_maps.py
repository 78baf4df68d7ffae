"""Local affine maps between two images at each match, from the matches around it."""

from __future__ import annotations

import numpy as np

from superglue_sift import geometry

NEIGHBOURS = 10  # matches to fit a map to
NEAR_PX = 30.0  # distance at which a neighbour has half the weight
PRIOR_PX = 5.0  # weight of the global map: that of one neighbour at this distance
GEOMETRY_PX = 3.0  # inlier distance of the geometry
PLANAR = 0.6  # minimum fraction of inliers of a homography whose derivatives are used
MIN_AGREEING = 6  # inliers; with fewer, maps come from scale and angle


def similarities(records0: np.ndarray, records1: np.ndarray) -> np.ndarray:
    """(K, 2, 2) maps 0 -> 1 by the keypoints' scales and angles, the identity without these."""
    scales = np.stack([records0["scale"], records1["scale"]])
    scales[:, (scales <= 0).any(0)] = 1.0
    ratio = (scales[1] / scales[0]).astype(np.float64)
    rotation = np.radians((records1["angle"] - records0["angle"]).astype(np.float64))
    c = ratio * np.cos(rotation)
    s = ratio * np.sin(rotation)
    return np.stack([np.stack([c, -s], -1), np.stack([s, c], -1)], -2)


def local_maps(points0: np.ndarray, points1: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    """(K, 2, 2) local affine maps 0 -> 1 at K matches.

    For inliers of a homography that fits most matches, its derivative. For others, the
    least-squares affine map of the nearest inliers of one homography or epipolar geometry; without
    these, `fallback` (K, 2, 2).
    """
    given = points0.astype(np.float32), points1.astype(np.float32)
    H, planar = geometry.fit_homography(*given, GEOMETRY_PX)
    agreeing = planar
    if planar.sum() < PLANAR * len(planar):
        agreeing = planar | geometry.fit_fundamental(*given, GEOMETRY_PX).inliers
    if agreeing.sum() < MIN_AGREEING:
        return fallback
    maps = nearest_affine(points0, points1, agreeing)
    if H is not None and planar.sum() >= PLANAR * agreeing.sum():
        maps[planar] = geometry.jacobians(H, points0[planar])
    return maps


def nearest_affine(points0: np.ndarray, points1: np.ndarray, agreeing: np.ndarray) -> np.ndarray:
    """(K, 2, 2) affine maps of the nearest matches among `agreeing` (K,) bool, at least one.

    Each is regularized by the map of all of these.
    """
    from scipy.spatial import KDTree

    own = points0[agreeing]
    theirs = points1[agreeing]
    count = min(NEIGHBOURS, len(own))
    distance, index = KDTree(own).query(points0, count)
    weight = 1.0 / (NEAR_PX + distance)
    weight = weight / weight.sum(1, keepdims=True)
    p, q = (
        points[index] - (weight[..., None] * points[index]).sum(1, keepdims=True)
        for points in (own, theirs)
    )
    whole = np.linalg.lstsq(own - own.mean(0), theirs - theirs.mean(0), rcond=None)[0]
    normal = np.einsum("kn,kni,knj->kij", weight, p, p) + PRIOR_PX**2 * np.eye(2)
    right = np.einsum("kn,kni,knj->kij", weight, p, q) + PRIOR_PX**2 * whole
    return np.linalg.solve(normal, right).swapaxes(1, 2)
