"""Estimate the relative pose of two cameras from matches."""

from __future__ import annotations

import math
from typing import Optional, Tuple

import numpy as np

from superglue_sift.errors import import_extra
from superglue_sift.geometry.two_view import (
    MAD_TO_DEVIATION,
    SUPPORTED_DIGITS,
    SUPPORTED_PART,
    compute_significance,
    inverse,
    to_homogeneous,
    transform,
)

MIN_ESSENTIAL = 5  # Minimum number of matches for an essential matrix
ROTATION_SAMPLE = 2  # Number of matches that determine a rotation
# Maximum distance of an inlier. From 0.3 to 0.8 px, poses are equally exact, whether positions are
# refined or not. From 1 px on, they are less exact.
POSE_PX = 0.6
# A match lies on its epipolar line up to this many standard deviations, of at least MIN_NOISE_PX.
NOISE_DEVIATIONS = 3.0
MIN_NOISE_PX = 0.02
ROTATION_ROUNDS = 30  # Number of fits of a rotation, each with weights from the one before

Pose = Tuple[Optional[np.ndarray], Optional[np.ndarray], np.ndarray]  # R, t, inliers


def estimate_relative_pose(
    points0: np.ndarray,
    points1: np.ndarray,
    K0: np.ndarray,
    K1: np.ndarray,
    threshold_px: float = POSE_PX,
    factors: Tuple[float, float] = (1.0, 1.0),
) -> Pose:
    """Estimate the pose of camera 1 relative to camera 0, x1 = R x0 + s t with an unknown s.

    The method is PoseLib's LO-RANSAC (Larsson, 2020), which is deterministic and ends with a fit to
    all inliers. For identical images, and for a camera that only rotates, the direction t of the
    translation cannot be known, since any t fits. So t is None if two things hold: a rotation
    explains most inliers, and the other matches agree with t no more often than by chance
    (`compute_significance`).

    Args:
        points0, points1: (K, 2) px.
        K0, K1: (3, 3) px, intrinsics of the cameras.
        threshold_px: maximum epipolar distance of an inlier, at the mean focal length.
        factors: multiply the threshold, one for each image.

    Returns:
        R (3, 3), t (3,) of length 1, and the inliers (K,) bool. R and t are None for fewer than
        five matches or inliers. Without parallax, t alone is None, and the inliers are the matches
        that R explains.

    Raises:
        RequestError: If PoseLib is not installed.
    """
    poselib = import_extra("poselib", "pose")
    K0, K1 = (np.asarray(K, np.float64) for K in (K0, K1))
    no_pose = None, None, np.zeros(len(points0), bool)
    if len(points0) < MIN_ESSENTIAL:
        return no_pose
    # PoseLib models square pixels. So the points of both cameras are moved to one camera that has
    # square pixels and the mean focal length.
    focals = [K[i, i] / factor for K, factor in zip((K0, K1), factors) for i in (0, 1)]
    focal = float(np.mean(focals))
    camera = {"model": "SIMPLE_PINHOLE", "width": 1, "height": 1, "params": [focal, 0, 0]}
    pixels0, pixels1 = (
        transform(np.asarray(points, np.float64), inverse(K)) * focal
        for points, K in ((points0, K0), (points1, K1))
    )
    options = {"max_epipolar_error": threshold_px}
    estimate, statistics = poselib.estimate_relative_pose(pixels0, pixels1, camera, camera, options)
    if statistics["num_inliers"] < MIN_ESSENTIAL:
        return no_pose
    pose = (
        estimate.R,
        estimate.t / np.linalg.norm(estimate.t),
        np.array(statistics["inliers"], bool),
    )
    return _explain_by_rotation(*pose, pixels0, pixels1, focal, threshold_px) or pose


def _explain_by_rotation(
    R: np.ndarray,
    t: np.ndarray,
    inliers: np.ndarray,
    pixels0: np.ndarray,
    pixels1: np.ndarray,
    focal: float,
    threshold_px: float,
) -> Optional[Pose]:
    """Return a pose without t if the matches show no parallax, else None.

    Args:
        R, t, inliers: the pose that PoseLib estimated.
        pixels0, pixels1: (K, 2) px from the principal points of two cameras with one focal length.
        focal: the focal length in px.
        threshold_px: maximum distance of an inlier.
    """
    rays0, rays1 = (to_homogeneous(pixels / focal) for pixels in (pixels0, pixels1))
    # Distances in px of image 1 from the epipolar lines, whose matrix is E = [t]x R
    lines = np.cross(t, rays0 @ R.T)
    from_line = np.abs((rays1 * lines).sum(axis=1)) / np.hypot(lines[:, 0], lines[:, 1]) * focal
    # Distances in px of image 1 from the rotated points. Behind the camera they are inf.
    R = _fit_rotation(rays0[inliers], rays1[inliers], threshold_px / focal)
    rotated = rays0 @ R.T
    with np.errstate(divide="ignore", invalid="ignore"):
        shift = np.linalg.norm(rotated[:, :2] / rotated[:, 2:] - rays1[:, :2], axis=1) * focal
    shift = np.where(rotated[:, 2] > 0, shift, np.inf)
    # The scatter of the inliers. Five degrees of freedom of E are fitted to it.
    count = int(inliers.sum())
    scatter = MAD_TO_DEVIATION * float(np.median(from_line[inliers]))
    scatter *= math.sqrt(count / max(count - MIN_ESSENTIAL, 1))
    noise = NOISE_DEVIATIONS * max(scatter, MIN_NOISE_PX)
    # PoseLib's distance is in both images, and so shorter by the square root of 2.
    is_rotated = shift <= max(noise, 2 * math.sqrt(2) * threshold_px)
    if is_rotated[inliers].mean() <= SUPPORTED_PART:
        return None
    # Matches that moved without parallax moved in any direction. By chance, few of them moved along
    # their epipolar lines.
    has_moved = shift > noise
    if has_moved.any():
        chances = 2 / math.pi * np.arcsin(noise / shift[has_moved])
        agreeing = int((from_line[has_moved] <= noise).sum())
        chance = float(chances.mean())
        digits = compute_significance(int(has_moved.sum()), agreeing, chance, MIN_ESSENTIAL)
        if digits >= SUPPORTED_DIGITS:
            return None
    return R, None, is_rotated


def _fit_rotation(rays0: np.ndarray, rays1: np.ndarray, scale: float) -> np.ndarray:
    """Fit the rotation 0 -> 1 (3, 3) by the Cauchy loss of the angles between rays.

    Args:
        rays0, rays1: (n, 3), directions in both cameras.
        scale: the angle in radians at which a ray has half the weight.
    """
    unit0, unit1 = (rays / np.linalg.norm(rays, axis=1, keepdims=True) for rays in (rays0, rays1))
    weights = np.ones(len(unit0))
    R = np.eye(3)
    for _ in range(ROTATION_ROUNDS):
        # Weighted least squares (Kabsch 1976)
        U, _, Vt = np.linalg.svd(unit1.T @ (unit0 * weights[:, None]))
        R = U @ np.diag([1.0, 1.0, np.linalg.det(U @ Vt)]) @ Vt
        angles = np.linalg.norm(unit1 - unit0 @ R.T, axis=1)
        weights = 1.0 / (1.0 + (angles / scale) ** 2)
    return R
