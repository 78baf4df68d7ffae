"""Local affine maps between two images, from the matches around each place."""

from __future__ import annotations

import numpy as np

from superglue_sift import geometry

NEIGHBOURS = 10  # matches that a map is fitted to
NEAR_PX = 30.0  # a neighbour this far away has half the weight of one at the place itself
PRIOR_PX = 5.0  # how firmly a map holds to the one of all matches: as one neighbour at this distance
GEOMETRY_PX = 3.0  # inlier distance of the geometry that maps come from
PLANAR = 0.6  # part of the agreeing matches that a homography explains where its derivative is the map
LEAST_AGREEING = 6  # matches without which maps come from scale and angle


def similarities(records0: np.ndarray, records1: np.ndarray) -> np.ndarray:
    """(K, 2, 2) maps 0 -> 1 by the keypoints' scales and angles alone; the identity where they have none."""
    known = (records0["scale"] > 0) & (records1["scale"] > 0)
    ratio = np.where(known, records1["scale"] / np.where(known, records0["scale"], 1), 1.0).astype(np.float64)
    turn = np.radians((records1["angle"] - records0["angle"]).astype(np.float64))
    c, s = ratio * np.cos(turn), ratio * np.sin(turn)
    return np.stack([np.stack([c, -s], -1), np.stack([s, c], -1)], -2)


def local_maps(points0: np.ndarray, points1: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    """(K, 2, 2) local affine maps 0 -> 1 at K matches.

    Of matches that a homography explains its derivative, where it explains most; else the least-squares affine map of
    the nearest matches that one homography or one epipolar geometry explains; `fallback` (K, 2, 2) without such.
    """
    maps = fallback.copy()
    given = points0.astype(np.float32), points1.astype(np.float32)
    plane = geometry.homography_with_inliers(*given, GEOMETRY_PX)
    agreeing = plane.inliers
    if agreeing.mean() < PLANAR:
        agreeing = agreeing | geometry.fundamental_with_inliers(*given, GEOMETRY_PX).inliers
    if agreeing.sum() < LEAST_AGREEING:
        return maps
    near = nearest_affine(points0, points1, agreeing)
    maps = near
    if plane.model is not None and plane.inliers.sum() >= PLANAR * agreeing.sum():
        maps[plane.inliers] = geometry.jacobians(plane.model, points0[plane.inliers])
    return maps


def nearest_affine(points0: np.ndarray, points1: np.ndarray, agreeing: np.ndarray) -> np.ndarray:
    """(K, 2, 2): at each match the affine map of the nearest `agreeing` ones, held to the map of all of these."""
    from scipy.spatial import KDTree

    own, theirs = points0[agreeing], points1[agreeing]
    count = min(NEIGHBOURS, len(own))
    distance, index = KDTree(own).query(points0, count)
    weight = 1.0 / (NEAR_PX + distance)
    weight = weight / weight.sum(1, keepdims=True)
    p, q = own[index], theirs[index]
    p, q = (x - (weight[..., None] * x).sum(1, keepdims=True) for x in (p, q))
    centred = own - own.mean(0)
    whole = np.linalg.lstsq(centred, theirs - theirs.mean(0), rcond=None)[0]
    normal = np.einsum("kn,kni,knj->kij", weight, p, p) + PRIOR_PX**2 * np.eye(2)
    right = np.einsum("kn,kni,knj->kij", weight, p, q) + PRIOR_PX**2 * whole
    return np.linalg.solve(normal, right).swapaxes(1, 2)
