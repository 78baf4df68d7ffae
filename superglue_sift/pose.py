"""The relative pose of two cameras, fitted to matches."""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

import cv2
import numpy as np

from superglue_sift.geometry import (
    MIN_FUNDAMENTAL,
    SCATTER_PX,
    TINY,
    inverse,
    to_homogeneous,
    transform,
    weights_of,
)

MIN_ESSENTIAL = 5  # matches for an essential matrix
# Distance of an inlier, in pixels of images of about 1,000 px. From 0.25 to 0.7 poses are equally
# exact, aligned or not; at 1 px, wrong ones of one plane win more often.
POSE_PX = 0.6
ITERATIONS = 10000  # at most: five right ones of matches of which a fifth is right are rare
FAR = 1e9  # depth, in baselines, beyond which points do not decide between the four motions
SAMPSON_PX = 3.0  # maximum distance to the epipolar line of matches that a pose is fitted to


class Pose(NamedTuple):
    """Camera 1 from camera 0: x1 = R x0 + s t, s unknown.

    R (3, 3), t (3,) of length 1, or None; inliers: (K,) bool.
    """

    R: Optional[np.ndarray]
    t: Optional[np.ndarray]
    inliers: np.ndarray


def relative_pose(
    points0: np.ndarray,
    points1: np.ndarray,
    K0: np.ndarray,
    K1: np.ndarray,
    threshold_px: float = POSE_PX,
    deviations: Optional[np.ndarray] = None,
) -> Pose:
    """Relative pose of two cameras with known intrinsics K0, K1 (3, 3), from matched pixels (K, 2).

    OpenCV's GC-RANSAC (Barath and Matas 2018) for the essential matrix, deterministic; then the one
    of four motions with the matches in front of both cameras; then `refine_pose`, since all matches
    are far more accurate than a sample of five. threshold_px: inlier distance, in pixels of the
    mean focal length. deviations: (K,) px of aligned matches, as in `refine_homography`. None for
    fewer than five matches. Raises ValueError for intrinsics that are not (3, 3).
    """
    K0, K1 = (np.asarray(K, np.float64) for K in (K0, K1))
    if K0.shape != (3, 3) or K1.shape != (3, 3):
        raise ValueError(f"intrinsics {K0.shape} and {K1.shape}: must be (3, 3)")
    none = Pose(None, None, np.zeros(len(points0), bool))
    if len(points0) < MIN_ESSENTIAL:
        return none
    flat0, flat1 = (
        transform(np.asarray(p, np.float64), inverse(K)) for p, K in ((points0, K0), (points1, K1))
    )
    focal = float(np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]]))
    E, mask = cv2.findEssentialMat(
        flat0, flat1, np.eye(3), cv2.USAC_ACCURATE, 0.9999, threshold_px / focal, ITERATIONS
    )
    if E is None or E.shape != (3, 3):
        return none
    count, R, t, inside, *_ = cv2.recoverPose(E, flat0, flat1, np.eye(3), FAR, mask=mask.copy())
    if not count:
        return none
    return Pose(*refine_pose(R, t.ravel(), flat0, flat1, focal, deviations), inside.ravel() > 0)


def refine_pose(
    R: np.ndarray,
    t: np.ndarray,
    flat0: np.ndarray,
    flat1: np.ndarray,
    focal: float,
    deviations: Optional[np.ndarray] = None,
) -> Tuple[np.ndarray, np.ndarray]:
    """Minimize the Cauchy loss of the Sampson distances of the matches near R (3, 3), t (3,).

    Optimizes the five degrees of freedom (Hartley and Zisserman, section 11.4.3). flat0, flat1: (K,
    2) on the plane at depth one; those within `SAMPSON_PX` count. focal: px, converts distances to
    pixels. deviations: (K,) px, as in `refine_homography`.
    """
    from scipy.optimize import least_squares

    p0, p1 = (to_homogeneous(flat) for flat in (flat0, flat1))
    near = np.abs(_sampson(R, t, p0, p1)) * focal < SAMPSON_PX
    if near.sum() < MIN_FUNDAMENTAL:
        return R, t
    p0 = p0[near]
    p1 = p1[near]
    weights = focal if deviations is None else focal * weights_of(deviations[near])
    tangents = np.linalg.svd(t[None])[2][1:]  # two directions in which t moves on the sphere

    def move(change: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        direction = t + change[3:] @ tangents
        return cv2.Rodrigues(change[:3])[0] @ R, direction / np.linalg.norm(direction)

    found = least_squares(
        lambda change: _sampson(*move(change), p0, p1) * weights,
        np.zeros(5),
        x_scale="jac",
        loss="cauchy",
        f_scale=SCATTER_PX,
        ftol=1e-5,
        max_nfev=30,
    )
    return move(found.x)


def _sampson(R: np.ndarray, t: np.ndarray, p0: np.ndarray, p1: np.ndarray) -> np.ndarray:
    """(K,) signed Sampson distances of homogeneous points (K, 3); 0 on both epipoles."""
    x, y, z = t
    E = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ R
    lines1 = p0 @ E.T
    lines0 = p1 @ E
    steepness = np.sqrt((lines1[:, :2] ** 2).sum(1) + (lines0[:, :2] ** 2).sum(1))
    return (p1 * lines1).sum(1) / np.maximum(steepness, TINY)
