"""Estimators of a homography or a relative pose from matches, and the errors of their estimates.

Metrics of different estimators cannot be compared. The pose error is the larger of two angles in
degrees: between true and estimated rotation, and between the directions of translation (whose sign
is not observable from an essential matrix). A pair without an estimate has an infinite error.
Source: the SuperGlue paper, arXiv 1911.11763, sections 5.1 to 5.3.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluate.matchers import BASELINES
from pipeline.evaluate.pairs import Pose
from superglue_sift.geometry import two_view
from superglue_sift.geometry.two_view import MIN_ESSENTIAL, POSE_PX, relative_pose

DEFAULT = ("ransac", "dlt", "surest")
PX = 3.0  # inlier limit of the robust homographies
ITERATIONS = 3000  # largest number of iterations of the robust homographies
MIN_DOUBT = 1e-4  # smallest probability that a match is wrong, so that odds stay finite
DECIDING = 16  # number of matches with the largest odds that weigh alike, at most half of all
BASELINE_POWER = 6  # power of the confidence by which a baseline's match is weighted
# The fraction of a matcher's most confident matches that the estimator `surest` takes
SUREST = {"nn": 0.15, "mutual_nn": 0.3, "ratio_test": 0.4}
SUREST_OF_NETWORK = 0.5
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
        weights: (K,), from `weights_of`.
        confident: (K,) bool, from `most_confident`.
        seed: seed of random samples, which depends on the pair alone.
        deviations: (K,) px, how uncertain refined matches are. None for matches as detected.
    """

    points0: np.ndarray
    points1: np.ndarray
    weights: np.ndarray
    confident: np.ndarray
    seed: int
    deviations: Optional[np.ndarray] = None


def ransac(found: Points) -> Optional[np.ndarray]:
    """Estimate by RANSAC, as in the paper: see `two_view.fit_ransac`."""
    points = found.points0, found.points1
    return two_view.fit_ransac(*points, PX, ITERATIONS, found.seed, found.deviations)


def least_squares(found: Points) -> Optional[np.ndarray]:
    """Fit all matches by weighted least squares, without rejection: the paper's DLT."""
    return fit_dlt(found.points0, found.points1, found.weights)


def surest(found: Points) -> Optional[np.ndarray]:
    """Fit the most confident matches by least squares with equal weights."""
    return fit_dlt(found.points0[found.confident], found.points1[found.confident])


def _conditioner(points: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the similarity (3, 3) that moves the mean to 0 and the mean distance to sqrt(2).

    Source: Hartley 1997.
    """
    mean = weights @ points / weights.sum()
    spread = weights @ np.linalg.norm(points - mean, axis=1) / weights.sum()
    scale = np.sqrt(2.0) / max(float(spread), 1e-12)
    return np.array([[scale, 0, -scale * mean[0]], [0, scale, -scale * mean[1]], [0, 0, 1.0]])


def fit_dlt(
    points0: np.ndarray, points1: np.ndarray, weights: Optional[np.ndarray] = None
) -> Optional[np.ndarray]:
    """Fit the weighted least-squares homography 0 -> 1 to all matches, the paper's "DLT" column.

    It is the direct linear transform with Hartley conditioning (Hartley and Zisserman, algorithm
    4.2), without outlier rejection.

    Args:
        points0, points1: (N, 2) float64 px.
        weights: (N,), 0 or more. They scale the two equations of a match. If None, they are equal.

    Returns:
        (3, 3) float64, or None if fewer than four matches have a positive weight or the matches
        are degenerate.
    """
    weights = np.ones(len(points0)) if weights is None else weights
    used = weights > 0
    if used.sum() < two_view.MIN_POINTS:
        return None
    p0 = points0[used]
    p1 = points1[used]
    w = weights[used]
    T0 = _conditioner(p0, w)
    T1 = _conditioner(p1, w)
    homogeneous = two_view.to_homogeneous(two_view.transform(p0, T0))
    x, y = two_view.transform(p1, T1).T
    # (2N, 9): two equations for each match
    zeros = np.zeros_like(homogeneous)
    horizontal = np.concatenate([homogeneous, zeros, -x[:, None] * homogeneous], axis=1)
    vertical = np.concatenate([zeros, homogeneous, -y[:, None] * homogeneous], axis=1)
    rows = np.concatenate([horizontal * w[:, None], vertical * w[:, None]])
    # The null vector of the rows. The 9x9 normal matrix gives it much faster than an SVD.
    values, vectors = np.linalg.eigh(rows.T @ rows)
    if values[1] <= 1e-12 * values[-1]:
        return None  # a second null direction: collinear or coincident points
    H = two_view.compose(two_view.inverse(T1), vectors[:, 0].reshape(3, 3), T0)
    return H if np.isfinite(H).all() else None


def opencv(found: Points) -> Optional[np.ndarray]:
    """Fit by cv2.findHomography with cv2.RANSAC, the "OpenCV" of the tables of LightGlue."""
    options = {"maxIters": ITERATIONS, "confidence": two_view.CONFIDENCE}
    return cv2.findHomography(found.points0, found.points1, cv2.RANSAC, PX, **options)[0]


def magsac(found: Points) -> Optional[np.ndarray]:
    """Fit by OpenCV's MAGSAC++ (Barath et al. 2020). Its generator restarts at every call."""
    points = found.points0, found.points1
    return cv2.findHomography(*points, cv2.USAC_MAGSAC, PX, maxIters=ITERATIONS)[0]


def poselib(found: Points) -> Optional[np.ndarray]:
    """Fit by PoseLib's LO-RANSAC, the default of glue-factory."""
    import poselib as library

    options = {"max_reproj_error": PX, "max_iterations": ITERATIONS, "seed": found.seed}
    H, info = library.estimate_homography(found.points0, found.points1, options, {})
    usable = info["num_inliers"] >= two_view.MIN_POINTS and np.isfinite(H).all()
    return np.asarray(H) if usable else None


# Each function returns (3, 3) float64 or None. The text beside it is for protocol.json.
ESTIMATORS: Dict[str, Tuple[Callable[[Points], Optional[np.ndarray]], str]] = {
    "ransac": (
        ransac,
        "cv2.findHomography, UsacParams: uniform samples, MSAC score; then scipy's least_squares,"
        " Cauchy loss",
    ),
    "dlt": (
        least_squares,
        "least squares over all matches, weighted by the odds of a network's confidence, "
        f"by the power {BASELINE_POWER} of 1 - ratio of a baseline's",
    ),
    "surest": (
        surest,
        "least squares with equal weights over the most confident matches:"
        f" {SUREST_OF_NETWORK:.0%} of a network's, "
        + ", ".join(f"{share:.0%} of {name}" for name, share in SUREST.items()),
    ),
    "opencv": (opencv, "cv2.findHomography, RANSAC"),
    "magsac": (magsac, "cv2.findHomography, USAC_MAGSAC"),
    "poselib": (poselib, "PoseLib LO-RANSAC"),
}


def weights_of(matcher: str, scores: np.ndarray) -> np.ndarray:
    """Return the weights of least squares for matches with confidences `scores` (K,), (K,).

    The weights were chosen on validation pairs by each matcher's own AUC@10
    (docs/evaluation.md#least-squares). They scale the equations of a network's match by the odds p
    / (1 - p) rather than by p, since the error of a wrong match is hundreds of times larger. Odds
    are clipped to the DECIDING-th largest, so that the noise of many matches averages out. The
    confidence 1 - ratio of a baseline is no probability, so its matches are weighted by a power of
    it.
    """
    if matcher in BASELINES:
        return scores**BASELINE_POWER
    odds = scores / (1.0 - scores + MIN_DOUBT)
    rank = min(DECIDING, max(two_view.MIN_POINTS, len(odds) // 2), len(odds))
    return np.minimum(odds, np.sort(odds)[-rank])


def most_confident(matcher: str, scores: np.ndarray) -> np.ndarray:
    """Return which matches `surest` takes, (K,) bool. The fraction was chosen as the weights
    were."""
    fraction = SUREST.get(matcher, SUREST_OF_NETWORK)
    count = min(max(two_view.MIN_POINTS, math.ceil(fraction * len(scores))), len(scores))
    return scores >= np.sort(scores)[-count]


def choose(names: Sequence[str]) -> Tuple[str, ...]:
    """Check the names and drop repeated ones. Raises RequestError for an unknown estimator."""
    for name in names:
        if name not in ESTIMATORS:
            raise RequestError(f"--estimators {name}: unknown; choose from {', '.join(ESTIMATORS)}")
    return tuple(dict.fromkeys(names))


def normalize(points: np.ndarray, K: np.ndarray) -> np.ndarray:
    """Map (N, 2) pixels to (N, 2) coordinates on the plane at depth one."""
    return two_view.transform(points, two_view.inverse(K))


def epipolar_errors(points0: np.ndarray, points1: np.ndarray, T_0to1: np.ndarray) -> np.ndarray:
    """Return the squared symmetric epipolar distance of normalized points (K, 2), (K,) float64.

    It is infinite where a line is undefined.
    """
    x, y, z = T_0to1[:3, 3] / max(np.linalg.norm(T_0to1[:3, 3]), 1e-12)
    # E is the essential matrix, [t]x R with t of length one
    E = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ T_0to1[:3, :3]
    p0 = two_view.to_homogeneous(points0)
    p1 = two_view.to_homogeneous(points1)
    # (K, 3): the epipolar line of each point in the other image
    lines1 = p0 @ E.T
    lines0 = p1 @ E
    product = np.sum(p1 * lines1, axis=1)
    with np.errstate(all="ignore"):
        error = product**2 * sum(1 / (lines[:, :2] ** 2).sum(1) for lines in (lines1, lines0))
    return np.where(np.isfinite(error), error, np.inf)


def essential(found: Points, cameras: Pose) -> Optional[Motion]:
    """Estimate the pose by RANSAC over essential matrices, with the intrinsics of `cameras`."""
    if len(found.points0) < MIN_ESSENTIAL:
        return None
    K0 = cameras.K0
    K1 = cameras.K1
    flat = normalize(found.points0, K0), normalize(found.points1, K1)
    threshold = RANSAC_PX / float(np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]]))
    stacked, mask = cv2.findEssentialMat(*flat, np.eye(3), cv2.RANSAC, CONFIDENCE, threshold)
    best = None
    most = 0
    # OpenCV may return several matrices, stacked (3 * count, 3): keep the one with the most inliers
    for E in np.split(stacked, len(stacked) // 3) if stacked is not None else []:
        inliers, R, t, *_ = cv2.recoverPose(E, *flat, np.eye(3), FAR, mask=mask.copy())
        if inliers > most:
            best = R, t.ravel()
            most = inliers
    return best


def poselib_pose(found: Points, cameras: Pose) -> Optional[Motion]:
    """Estimate the pose as `MatchResult.relative_pose` does."""
    pose = relative_pose(found.points0, found.points1, cameras.K0, cameras.K1)
    return None if pose.R is None or pose.t is None else (pose.R, pose.t)


POSE_ESTIMATORS: Dict[str, Tuple[Callable[[Points, Pose], Optional[Motion]], str]] = {
    "pose": (
        essential,
        f"cv2.findEssentialMat, RANSAC at {RANSAC_PX:g} px over the focal length, probability"
        f" {CONFIDENCE}",
    ),
    "refined": (poselib_pose, f"PoseLib's LO-RANSAC at {POSE_PX:g} px"),
}


def pose_error(estimated: Optional[Motion], truth: Pose) -> float:
    """Return the larger of the errors of rotation and of translation direction, in degrees.

    It is infinite if there is no estimate.
    """
    if estimated is None:
        return float("inf")
    R, t = estimated
    true_t = truth.T_0to1[:3, 3]
    rotation = (np.trace(R.T @ truth.T_0to1[:3, :3]) - 1) / 2
    lengths = np.linalg.norm(t) * np.linalg.norm(true_t)
    direction = abs(t @ true_t) / lengths if lengths > 0 else 1.0
    return float(np.degrees(np.arccos(np.clip(np.array([rotation, direction]), -1, 1)).max()))


def epipolar_correct(points0: np.ndarray, points1: np.ndarray, pose: Pose) -> np.ndarray:
    """Return which matches have an epipolar error below the limit, (K,) bool.

    points0 and points1 are (K, 2) px.
    """
    flat = normalize(points0, pose.K0), normalize(points1, pose.K1)
    return epipolar_errors(*flat, pose.T_0to1) < EPIPOLAR_LIMIT
