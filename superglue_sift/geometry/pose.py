"""Estimate the relative pose of two cameras from matches.

Positions may be in any frame, with intrinsics and limits in the same one. The default of the limit
was chosen in images reduced to `two_view.REFERENCE_PX`.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import numpy as np

from superglue_sift.errors import import_extra
from superglue_sift.geometry.two_view import (
    MAD_TO_DEVIATION,
    SUPPORTED_DIGITS,
    SUPPORTED_PART,
    inverse,
    significance,
    to_homogeneous,
    transform,
)

MIN_ESSENTIAL = 5  # Minimum number of matches for an essential matrix
# Maximum distance of an inlier. From 0.3 to 0.8 px, poses are equally exact, whether positions are
# refined or not. From 1 px on, they are less exact.
POSE_PX = 0.6
# A match lies on its epipolar line up to this many standard deviations, of at least MIN_NOISE_PX.
NOISE_DEVIATIONS = 3.0
MIN_NOISE_PX = 0.02
ROTATION_ROUNDS = 30  # A rotation is fitted so many times, with weights from the last fit


class Pose(NamedTuple):
    """Pose of camera 1 relative to camera 0: x1 = R x0 + s t. The scale s is not known.

    If t is None and R is not, the matches show no parallax: a camera that only rotates explains
    them, so the direction in which it moved cannot be known, and no depth either.

    Attributes:
        R: (3, 3) rotation, or None.
        t: (3,) of length 1, or None.
        inliers: (K,) bool.
    """

    R: Optional[np.ndarray]
    t: Optional[np.ndarray]
    inliers: np.ndarray


def estimate_relative_pose(
    points0: np.ndarray,
    points1: np.ndarray,
    K0: np.ndarray,
    K1: np.ndarray,
    threshold_px: float = POSE_PX,
) -> Pose:
    """Estimate the relative pose of two cameras from matched points.

    The method is PoseLib's LO-RANSAC (Larsson, 2020), which is deterministic and ends with a fit to
    all inliers. For identical images, and for a camera that only rotates, the direction t of the
    translation cannot be known, since any t fits. So t is None if two things hold: a rotation
    explains most inliers, and the other matches agree with t no more often than by chance
    (`significance`).

    Args:
        points0, points1: (K, 2) px.
        K0, K1: (3, 3) px, intrinsics of the cameras.
        threshold_px: maximum epipolar distance of an inlier, at the mean focal length.

    Returns:
        The pose. R and t are None for fewer than five matches or inliers. Without parallax, t alone
        is None, and the inliers are the matches that R explains.

    Raises:
        RequestError: If PoseLib is not installed.
    """
    poselib = import_extra("poselib", "pose")
    K0, K1 = (np.asarray(K, np.float64) for K in (K0, K1))
    no_pose = Pose(None, None, np.zeros(len(points0), bool))
    if len(points0) < MIN_ESSENTIAL:
        return no_pose
    # PoseLib models square pixels. So the points of both cameras are moved to one camera that has
    # square pixels and the mean focal length.
    focal = float(np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]]))
    camera = {"model": "SIMPLE_PINHOLE", "width": 1, "height": 1, "params": [focal, 0, 0]}
    pixels0, pixels1 = (
        transform(np.asarray(points, np.float64), inverse(K)) * focal
        for points, K in ((points0, K0), (points1, K1))
    )
    options = {"max_epipolar_error": threshold_px}
    estimate, statistics = poselib.estimate_relative_pose(pixels0, pixels1, camera, camera, options)
    if statistics["num_inliers"] < MIN_ESSENTIAL:
        return no_pose
    t = estimate.t / np.linalg.norm(estimate.t)
    pose = Pose(np.array(estimate.R), t, np.array(statistics["inliers"], bool))
    rotation = _explain_by_rotation(pose, pixels0, pixels1, focal, threshold_px)
    return pose if rotation is None else rotation


def _explain_by_rotation(
    pose: Pose, pixels0: np.ndarray, pixels1: np.ndarray, focal: float, threshold_px: float
) -> Optional[Pose]:
    """Return a pose without t if the matches show no parallax, else None.

    Args:
        pose: the pose that PoseLib estimated.
        pixels0, pixels1: (K, 2) px from the principal points of two cameras with one focal length.
        focal: the focal length in px.
        threshold_px: maximum distance of an inlier.
    """
    assert pose.R is not None and pose.t is not None
    rays0, rays1 = (to_homogeneous(pixels / focal) for pixels in (pixels0, pixels1))
    # Distances in px of image 1 from the epipolar lines, whose matrix is E = [t]x R
    lines = np.cross(pose.t, rays0 @ pose.R.T)
    from_line = np.abs((rays1 * lines).sum(axis=1)) / np.hypot(lines[:, 0], lines[:, 1]) * focal
    # Distances in px of image 1 from the rotated points. Behind the camera they are inf.
    R = _fit_rotation(rays0[pose.inliers], rays1[pose.inliers], threshold_px / focal)
    rotated = rays0 @ R.T
    with np.errstate(divide="ignore", invalid="ignore"):
        shift = np.linalg.norm(rotated[:, :2] / rotated[:, 2:] - rays1[:, :2], axis=1) * focal
    shift = np.where(rotated[:, 2] > 0, shift, np.inf)
    # The scatter of the inliers. Five degrees of freedom of E are fitted to it.
    count = int(pose.inliers.sum())
    scatter = MAD_TO_DEVIATION * float(np.median(from_line[pose.inliers]))
    scatter *= math.sqrt(count / max(count - MIN_ESSENTIAL, 1))
    noise = NOISE_DEVIATIONS * max(scatter, MIN_NOISE_PX)
    # PoseLib's distance is in both images, and so shorter by the square root of 2.
    inlier_mask = shift <= max(noise, 2 * math.sqrt(2) * threshold_px)
    if inlier_mask[pose.inliers].mean() <= SUPPORTED_PART:
        return None
    # Matches that moved without parallax moved in any direction. By chance, few of them moved along
    # their epipolar lines.
    has_moved = shift > noise
    if has_moved.any():
        chances = 2 / math.pi * np.arcsin(noise / shift[has_moved])
        agreeing = int((from_line[has_moved] <= noise).sum())
        chance = float(chances.mean())
        digits = significance(int(has_moved.sum()), agreeing, chance, MIN_ESSENTIAL)
        if digits >= SUPPORTED_DIGITS:
            return None
    return Pose(R, None, inlier_mask)


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
