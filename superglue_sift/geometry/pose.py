"""The relative pose of two cameras, fitted to matches by PoseLib (pip install
'superglue-sift[pose]').
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import numpy as np

from superglue_sift.errors import import_extra
from superglue_sift.geometry.two_view import inverse, transform

MIN_ESSENTIAL = 5  # matches for an essential matrix
# Distance of an inlier, in pixels of images of about 1,000 px. From 0.3 to 0.8 poses are equally
# exact, aligned or not; from 1 px on they are less exact.
POSE_PX = 0.6


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
) -> Pose:
    """Relative pose of two cameras with known intrinsics K0, K1 (3, 3), from matched pixels (K, 2).

    PoseLib's LO-RANSAC (Larsson, 2020), deterministic, which ends with a fit to all inliers.
    threshold_px: inlier distance, in pixels of the mean focal length. None for fewer than five
    matches or inliers. Raises ValueError for intrinsics that are not (3, 3), RequestError without
    PoseLib.
    """
    poselib = import_extra("poselib", "pose")
    K0, K1 = (np.asarray(K, np.float64) for K in (K0, K1))
    if K0.shape != (3, 3) or K1.shape != (3, 3):
        raise ValueError(f"intrinsics {K0.shape} and {K1.shape}: must be (3, 3)")
    none = Pose(None, None, np.zeros(len(points0), bool))
    if len(points0) < MIN_ESSENTIAL:
        return none
    # Both cameras as one of the mean focal length and square pixels, which is what PoseLib models
    focal = float(np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]]))
    camera = {"model": "SIMPLE_PINHOLE", "width": 1, "height": 1, "params": [focal, 0, 0]}
    seen = (
        transform(np.asarray(points, np.float64), inverse(K)) * focal
        for points, K in ((points0, K0), (points1, K1))
    )
    options = {"max_epipolar_error": threshold_px}
    found, about = poselib.estimate_relative_pose(*seen, camera, camera, options)
    if about["num_inliers"] < MIN_ESSENTIAL:
        return none
    t = found.t / np.linalg.norm(found.t)
    return Pose(np.array(found.R), t, np.array(about["inliers"], bool))
