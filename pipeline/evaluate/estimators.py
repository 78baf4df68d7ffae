"""Estimators of a homography or a relative pose from matches, and the errors of their estimates.

Metrics of different estimators cannot be compared. The pose error is the larger of two angles in
degrees: between true and estimated rotation, and between the directions of translation (whose sign
is not observable from an essential matrix). A pair without an estimate has an infinite error.
Source: the SuperGlue paper, arXiv 1911.11763, sections 5.1 to 5.3.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import cv2
import numpy as np

from pipeline.evaluate.matchers import BASELINES
from pipeline.evaluate.pairs import CameraPair
from superglue_sift.geometry import two_view
from superglue_sift.geometry.pose import MIN_ESSENTIAL, estimate_relative_pose

DEFAULT = ("ransac", "dlt", "confident")
PX = 3.0  # inlier limit of the robust homographies
ITERATIONS = 3000  # largest number of iterations of the robust homographies
MIN_DOUBT = 1e-4  # smallest probability that a match is wrong, so that odds stay finite
# The matches with the largest odds get equal weights: so many, or half of all if that is fewer.
DECIDING = 16
BASELINE_POWER = 6  # power of the confidence by which a baseline's match is weighted
# The fraction of a matcher's most confident matches that the estimator `confident` takes
CONFIDENT = {"nn": 0.15, "mutual_nn": 0.3, "ratio_test": 0.4}
CONFIDENT_OF_NETWORK = 0.5
# A match of two cameras is correct below this squared symmetric epipolar distance, in normalized
# coordinates.
EPIPOLAR_LIMIT = 5e-4
RANSAC_PX = 1.0  # inlier limit of an essential matrix in pixels, divided by the mean focal length
CONFIDENCE = 0.99999  # probability with which RANSAC stops searching for an essential matrix
FAR = 1e9  # depth, in baselines, beyond which points do not decide between the four motions

Motion = Tuple[np.ndarray, np.ndarray]  # R (3, 3), t (3,)


class Points(NamedTuple):
    """The positions of K matches, as an estimator gets them.

    Attributes:
        points0, points1: (K, 2) px.
        matcher: name of the matcher.
        scores: (K,), its confidences.
        seed: seed of random samples, which depends on the pair alone.
        deviations: (K,) px, how uncertain refined matches are, or None for matches as detected.
    """

    points0: np.ndarray
    points1: np.ndarray
    matcher: str
    scores: np.ndarray
    seed: int = 0
    deviations: Optional[np.ndarray] = None


def ransac(found: Points) -> Optional[np.ndarray]:
    """Fit by cv2.UsacParams, with MSAC scores, then by robust least squares: `fit_ransac`."""
    points = found.points0, found.points1
    return two_view.fit_ransac(*points, PX, ITERATIONS, found.seed, found.deviations)


def least_squares(found: Points) -> Optional[np.ndarray]:
    """Fit all matches by least squares, weighted by their confidence: the paper's DLT."""
    return fit_dlt(found.points0, found.points1, weights_of(found.matcher, found.scores))


def confident(found: Points) -> Optional[np.ndarray]:
    """Fit the most confident matches by least squares, with equal weights."""
    chosen = most_confident(found.matcher, found.scores)
    return fit_dlt(found.points0, found.points1, chosen.astype(np.float64))


def _conditioner(points: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the similarity (3, 3) that moves the mean to 0 and the mean distance to sqrt(2).

    Both means weigh the points (N, 2) by `weights` (N,). Source: Hartley 1997.
    """
    mean = weights @ points / weights.sum()
    spread = weights @ np.linalg.norm(points - mean, axis=1) / weights.sum()
    scale = np.sqrt(2.0) / max(float(spread), 1e-12)
    return np.array([[scale, 0, -scale * mean[0]], [0, scale, -scale * mean[1]], [0, 0, 1.0]])


def fit_dlt(points0: np.ndarray, points1: np.ndarray, weights: np.ndarray) -> Optional[np.ndarray]:
    """Fit the weighted least-squares homography 0 -> 1 to all matches, the paper's "DLT" column.

    It is the direct linear transform with Hartley conditioning (Hartley and Zisserman, algorithm
    4.2), without outlier rejection.

    Args:
        points0, points1: (N, 2) float64 px.
        weights: (N,), 0 or more. They scale the two equations of a match.

    Returns:
        (3, 3) float64, or None if fewer than four matches have a positive weight or the matches
        are degenerate.
    """
    used = weights > 0
    if used.sum() < two_view.MIN_POINTS:
        return None
    p0 = points0[used]
    p1 = points1[used]
    w = weights[used]
    # Condition the points, so that their equations have entries of similar size.
    T0 = _conditioner(p0, w)
    T1 = _conditioner(p1, w)
    homogeneous = two_view.to_homogeneous(two_view.transform(p0, T0))
    x, y = two_view.transform(p1, T1).T
    # (2N, 9): two equations for each match
    zeros = np.zeros_like(homogeneous)
    horizontal = np.hstack([homogeneous, zeros, -x[:, None] * homogeneous])
    vertical = np.hstack([zeros, homogeneous, -y[:, None] * homogeneous])
    rows = np.concatenate([horizontal, vertical]) * np.tile(w, 2)[:, None]
    # Find the null vector of the rows. The 9x9 normal matrix gives it much faster than an SVD.
    values, vectors = np.linalg.eigh(rows.T @ rows)
    if values[1] <= 1e-12 * values[-1]:
        return None  # a second null direction: collinear or coincident points
    # Map back to pixels.
    H = two_view.compose(two_view.inverse(T1), vectors[:, 0].reshape(3, 3), T0)
    return H if np.isfinite(H).all() else None


def opencv(found: Points, method: int = cv2.RANSAC) -> Optional[np.ndarray]:
    """Fit by RANSAC of cv2.findHomography, the "OpenCV" of the tables of LightGlue."""
    options = {"maxIters": ITERATIONS, "confidence": two_view.CONFIDENCE}
    return cv2.findHomography(found.points0, found.points1, method, PX, **options)[0]


def magsac(found: Points) -> Optional[np.ndarray]:
    """Fit by OpenCV's MAGSAC++ (Barath et al. 2020). Its generator restarts at every call."""
    return opencv(found, cv2.USAC_MAGSAC)


def poselib(found: Points) -> Optional[np.ndarray]:
    """Fit by PoseLib's LO-RANSAC, the default of glue-factory."""
    import poselib as library  # imported here, since not every installation has it

    options = {"max_reproj_error": PX, "max_iterations": ITERATIONS, "seed": found.seed}
    H, info = library.estimate_homography(found.points0, found.points1, options, {})
    usable = info["num_inliers"] >= two_view.MIN_POINTS and np.isfinite(H).all()
    return np.asarray(H) if usable else None


# Each function returns (3, 3) float64 or None. Its docstring is written to protocol.json.
ESTIMATORS: Dict[str, Callable[[Points], Optional[np.ndarray]]] = {
    "ransac": ransac,
    "dlt": least_squares,
    "confident": confident,
    "opencv": opencv,
    "magsac": magsac,
    "poselib": poselib,
}


def weights_of(matcher: str, scores: np.ndarray) -> np.ndarray:
    """Return the weights (K,) of least squares for matches with the confidences `scores` (K,).

    The weights were chosen on validation pairs by each matcher's own AUC@10
    (docs/evaluation.md#least-squares). They scale the equations of a network's match by the odds p
    / (1 - p) rather than by p, since the error of a wrong match is hundreds of times larger. Odds
    are clipped to the DECIDING-th largest, so that the noise of many matches averages out. The
    confidence 1 - ratio of a baseline is no probability, so its matches are weighted by a power of
    it.
    """
    if matcher in BASELINES:
        return scores**BASELINE_POWER
    # A match that is right with p = 0.99 counts as eleven with p = 0.9.
    odds = scores / (1.0 - scores + MIN_DOUBT)
    rank = min(DECIDING, max(two_view.MIN_POINTS, len(odds) // 2))
    return np.minimum(odds, np.sort(odds)[-rank])


def most_confident(matcher: str, scores: np.ndarray) -> np.ndarray:
    """Return which matches `confident` takes, (K,) bool.

    The fraction was chosen as `weights_of` says.
    """
    fraction = CONFIDENT.get(matcher, CONFIDENT_OF_NETWORK)
    count = max(two_view.MIN_POINTS, math.ceil(fraction * len(scores)))
    return scores >= np.sort(scores)[-count]


def normalize(points: np.ndarray, K: np.ndarray) -> np.ndarray:
    """Map (N, 2) pixels of a camera K (3, 3) to (N, 2) coordinates on the plane at depth one."""
    return two_view.transform(points, two_view.inverse(K))


def epipolar_errors(points0: np.ndarray, points1: np.ndarray, cameras: CameraPair) -> np.ndarray:
    """Return the squared symmetric epipolar distance of each match, (K,) float64.

    The matched points are (K, 2) px. The distance is in normalized coordinates, and infinite where
    a line is undefined.
    """
    t = cameras.T_0to1[:3, 3]
    x, y, z = t / max(np.linalg.norm(t), 1e-12)
    # The essential matrix is [t]x R, where t has length one.
    E = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ cameras.T_0to1[:3, :3]
    p0 = two_view.to_homogeneous(normalize(points0, cameras.K0))
    p1 = two_view.to_homogeneous(normalize(points1, cameras.K1))
    # (K, 3): the epipolar line of each point in the other image
    lines1 = p0 @ E.T
    lines0 = p1 @ E
    product = np.sum(p1 * lines1, axis=1)
    with np.errstate(all="ignore"):
        error = product**2 * sum(1 / (lines[:, :2] ** 2).sum(1) for lines in (lines1, lines0))
    return np.where(np.isfinite(error), error, np.inf)


def essential(found: Points, cameras: CameraPair) -> Optional[Motion]:
    """Estimate the pose by RANSAC of cv2.findEssentialMat at 1 px, with known intrinsics."""
    if len(found.points0) < MIN_ESSENTIAL:
        return None
    K0 = cameras.K0
    K1 = cameras.K1
    flat = normalize(found.points0, K0), normalize(found.points1, K1)
    # Convert one pixel to normalized coordinates.
    threshold = RANSAC_PX / float(np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]]))
    stacked, mask = cv2.findEssentialMat(*flat, np.eye(3), cv2.RANSAC, CONFIDENCE, threshold)
    if stacked is None:
        return None
    # OpenCV may return several matrices, stacked (3 * count, 3). Keep the one with most inliers.
    inliers, R, t, *_ = max(
        (
            cv2.recoverPose(E, *flat, np.eye(3), FAR, mask=mask.copy())
            for E in np.split(stacked, len(stacked) // 3)
        ),
        key=lambda found: found[0],
    )
    return (R, t.ravel()) if inliers else None


def poselib_pose(found: Points, cameras: CameraPair) -> Optional[Motion]:
    """Estimate the pose by PoseLib's LO-RANSAC, as `MatchResult.relative_pose` does."""
    pose = estimate_relative_pose(found.points0, found.points1, cameras.K0, cameras.K1)
    if pose.R is None:
        return None
    return pose.R, np.zeros(3) if pose.t is None else pose.t  # without parallax


POSE_ESTIMATORS: Dict[str, Callable[[Points, CameraPair], Optional[Motion]]] = {
    "pose": essential,
    "poselib": poselib_pose,
}


def pose_error(estimated: Optional[Motion], truth: CameraPair) -> float:
    """Return the larger of the errors of rotation and of translation direction, in degrees.

    It is infinite if there is no estimate. A direction of zeros is not known, and is 90 degrees
    off, unless both cameras are at one place.
    """
    if estimated is None:
        return float("inf")
    R, t = estimated
    true_t = truth.T_0to1[:3, 3]
    # Compute the cosines of both angles. The sign of t cannot be observed.
    rotation = (np.trace(R.T @ truth.T_0to1[:3, :3]) - 1) / 2
    lengths = np.linalg.norm(t) * np.linalg.norm(true_t)
    direction = abs(t @ true_t) / lengths if lengths > 0 else float(not true_t.any())
    return float(np.degrees(np.arccos(np.clip(np.array([rotation, direction]), -1, 1)).max()))
