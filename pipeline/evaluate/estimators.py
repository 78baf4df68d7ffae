"""Estimators of a homography or a relative pose from matches, and the errors of their estimates.

Metrics of different estimators cannot be compared. The pose error is the larger of two angles in
degrees. One is the angle between the true and the estimated rotation. The other is the angle
between the directions of translation, whose sign cannot be observed from an essential matrix. A
pair without an estimate has an infinite error. Source: the SuperGlue paper, arXiv 1911.11763,
sections 5.1 to 5.3.
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
PX = 3.0  # px, the inlier limit of the robust homographies
ITERATIONS = 3000  # Largest number of iterations of the robust homographies
MIN_DOUBT = 1e-4  # Smallest probability that a match is wrong, so that odds stay finite
# This number of matches, those with the largest odds, get equal weights. It is half of all matches
# if that is fewer.
DECIDING = 16
BASELINE_POWER = 6  # The power of the confidence by which a baseline's match is weighted
# The fraction of the most confident matches that the estimator `confident` takes, by matcher
CONFIDENT_FRACTIONS = {"nn": 0.15, "mutual_nn": 0.3, "ratio_test": 0.4}
CONFIDENT_FRACTION_OF_NETWORK = 0.5
# A match of two cameras is correct below this squared symmetric epipolar distance, in normalized
# coordinates.
EPIPOLAR_LIMIT = 5e-4
RANSAC_PX = 1.0  # px, the inlier limit of an essential matrix, divided by the mean focal length
CONFIDENCE = 0.99999  # The probability at which RANSAC stops searching for an essential matrix
FAR = 1e9  # Depth in baselines beyond which points do not decide between the four motions

Motion = Tuple[np.ndarray, np.ndarray]  # R (3, 3), t (3,)


class MatchedPoints(NamedTuple):
    """The positions and confidences of K matches, as an estimator gets them.

    Attributes:
        points0, points1: the positions in both images, (K, 2) float64 px.
        matcher: name of the matcher.
        scores: the confidences, (K,) float64.
        seed: seed of random samples, which depends on the pair alone.
        deviations: the standard deviation of each refined position, (K,) px. It is None for matches
            as they were detected.
    """

    points0: np.ndarray
    points1: np.ndarray
    matcher: str
    scores: np.ndarray
    seed: int = 0
    deviations: Optional[np.ndarray] = None


def fit_ransac(points: MatchedPoints) -> Optional[np.ndarray]:
    """Fit by cv2.UsacParams, with MSAC scores, then by robust least squares: `fit_ransac`."""
    return two_view.fit_ransac(
        points.points0, points.points1, PX, ITERATIONS, points.seed, points.deviations
    )


def fit_least_squares(points: MatchedPoints) -> Optional[np.ndarray]:
    """Fit all matches by least squares, weighted by their confidence: the paper's DLT."""
    weights = weight_matches(points.matcher, points.scores)
    return fit_dlt(points.points0, points.points1, weights)


def fit_confident(points: MatchedPoints) -> Optional[np.ndarray]:
    """Fit the most confident matches by least squares, with equal weights."""
    is_confident = select_most_confident(points.matcher, points.scores)
    return fit_dlt(points.points0, points.points1, is_confident.astype(np.float64))


def _make_conditioner(points: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the similarity (3, 3) that conditions points, as Hartley 1997 does.

    The mean of the points (N, 2) moves to 0, and their mean distance from it becomes sqrt(2). Both
    means are weighted by `weights` (N,).
    """
    mean = weights @ points / weights.sum()
    spread = weights @ np.linalg.norm(points - mean, axis=1) / weights.sum()
    scale = np.sqrt(2.0) / max(float(spread), 1e-12)
    return np.array([[scale, 0, -scale * mean[0]], [0, scale, -scale * mean[1]], [0, 0, 1.0]])


def fit_dlt(points0: np.ndarray, points1: np.ndarray, weights: np.ndarray) -> Optional[np.ndarray]:
    """Fit the weighted least-squares homography 0 -> 1 to all matches, the paper's "DLT" column.

    The method is the direct linear transform with Hartley's conditioning (Hartley and Zisserman,
    algorithm 4.2), without outlier rejection.

    Args:
        points0, points1: the matched points, (N, 2) float64 px.
        weights: (N,), 0 or more. They scale the two equations of a match.

    Returns:
        (3, 3) float64. None if fewer than four matches have a positive weight, or if the matches
        are degenerate.
    """
    has_weight = weights > 0
    if has_weight.sum() < two_view.MIN_POINTS:
        return None
    p0 = points0[has_weight]
    p1 = points1[has_weight]
    w = weights[has_weight]
    # Condition the points, so that their equations have entries of similar size.
    T0 = _make_conditioner(p0, w)
    T1 = _make_conditioner(p1, w)
    homogeneous = two_view.to_homogeneous(two_view.transform(p0, T0))
    x, y = two_view.transform(p1, T1).T
    # (2N, 9): two equations for each match
    zeros = np.zeros_like(homogeneous)
    horizontal = np.hstack([homogeneous, zeros, -x[:, None] * homogeneous])
    vertical = np.hstack([zeros, homogeneous, -y[:, None] * homogeneous])
    rows = np.concatenate([horizontal, vertical]) * np.tile(w, 2)[:, None]
    # Find the null vector of the rows. The 9x9 normal matrix gives it much faster than an SVD.
    values, vectors = np.linalg.eigh(rows.T @ rows)
    # Collinear or coincident points have a second null direction.
    if values[1] <= 1e-12 * values[-1]:
        return None
    # Map back to pixels.
    H = two_view.compose(two_view.inverse(T1), vectors[:, 0].reshape(3, 3), T0)
    return H if np.isfinite(H).all() else None


def fit_opencv(points: MatchedPoints, method: int = cv2.RANSAC) -> Optional[np.ndarray]:
    """Fit by RANSAC of cv2.findHomography, the "OpenCV" of the tables of LightGlue."""
    options = {"maxIters": ITERATIONS, "confidence": two_view.CONFIDENCE}
    return cv2.findHomography(points.points0, points.points1, method, PX, **options)[0]


def fit_magsac(points: MatchedPoints) -> Optional[np.ndarray]:
    """Fit by OpenCV's MAGSAC++ (Barath et al. 2020). Its generator restarts at every call."""
    return fit_opencv(points, cv2.USAC_MAGSAC)


def fit_poselib(points: MatchedPoints) -> Optional[np.ndarray]:
    """Fit by PoseLib's LO-RANSAC, the default of glue-factory."""
    import poselib  # Not every installation has it.

    options = {"max_reproj_error": PX, "max_iterations": ITERATIONS, "seed": points.seed}
    H, info = poselib.estimate_homography(points.points0, points.points1, options, {})
    is_usable = info["num_inliers"] >= two_view.MIN_POINTS and np.isfinite(H).all()
    return np.asarray(H) if is_usable else None


# The estimators of a homography by their names in --estimators. Each function returns (3, 3)
# float64 or None. Its docstring is written to protocol.json.
ESTIMATORS: Dict[str, Callable[[MatchedPoints], Optional[np.ndarray]]] = {
    "ransac": fit_ransac,
    "dlt": fit_least_squares,
    "confident": fit_confident,
    "opencv": fit_opencv,
    "magsac": fit_magsac,
    "poselib": fit_poselib,
}


def weight_matches(matcher: str, scores: np.ndarray) -> np.ndarray:
    """Return the weight of each match for least squares, (K,).

    The rule was chosen on validation pairs, by the AUC@10 of each matcher
    (docs/evaluation.md#least-squares). A network's match has its odds p / (1 - p) as its weight,
    rather than p, since the error of a wrong match is hundreds of times larger. Odds are clipped to
    the DECIDING-th largest, so that the noise of many matches averages out. The confidence of a
    baseline's match, 1 - ratio, is no probability. The weight of such a match is a power of its
    confidence.

    Args:
        matcher: name of the matcher.
        scores: confidence of each match, (K,).
    """
    if matcher in BASELINES:
        return scores**BASELINE_POWER
    # A match that is right with p = 0.99 counts as eleven matches with p = 0.9.
    odds = scores / (1.0 - scores + MIN_DOUBT)
    rank = min(DECIDING, max(two_view.MIN_POINTS, len(odds) // 2))
    return np.minimum(odds, np.sort(odds)[-rank])


def select_most_confident(matcher: str, scores: np.ndarray) -> np.ndarray:
    """Return which matches the estimator `confident` takes, (K,) bool.

    The fraction of each matcher was chosen on validation pairs, by its AUC@10. `scores` has the
    confidence of each match, (K,).
    """
    fraction = CONFIDENT_FRACTIONS.get(matcher, CONFIDENT_FRACTION_OF_NETWORK)
    count = max(two_view.MIN_POINTS, math.ceil(fraction * len(scores)))
    return scores >= np.sort(scores)[-count]


def normalize_points(points: np.ndarray, K: np.ndarray) -> np.ndarray:
    """Map points (N, 2) px of a camera K (3, 3) to coordinates (N, 2) on the plane at depth one."""
    return two_view.transform(points, two_view.inverse(K))


def compute_epipolar_errors(
    points0: np.ndarray, points1: np.ndarray, cameras: CameraPair
) -> np.ndarray:
    """Return the squared symmetric epipolar distance of each match, (K,) float64.

    The distance is in normalized coordinates. It is infinite where an epipolar line is undefined.

    Args:
        points0, points1: the matched points, (K, 2) float64 px.
        cameras: the true cameras.
    """
    t = cameras.T_0to1[:3, 3]
    direction = t / max(np.linalg.norm(t), 1e-12)
    E = two_view.compute_essential_matrix(cameras.T_0to1[:3, :3], direction)
    p0 = two_view.to_homogeneous(normalize_points(points0, cameras.K0))
    p1 = two_view.to_homogeneous(normalize_points(points1, cameras.K1))
    # (K, 3): the epipolar line of each point in the other image
    lines1 = p0 @ E.T
    lines0 = p1 @ E
    product = np.sum(p1 * lines1, axis=1)
    with np.errstate(all="ignore"):
        error = product**2 * sum(1 / (lines[:, :2] ** 2).sum(1) for lines in (lines1, lines0))
    return np.where(np.isfinite(error), error, np.inf)


def estimate_pose(points: MatchedPoints, cameras: CameraPair) -> Optional[Motion]:
    """Estimate the pose by RANSAC of cv2.findEssentialMat at 1 px, with known intrinsics."""
    if len(points.points0) < MIN_ESSENTIAL:
        return None
    K0 = cameras.K0
    K1 = cameras.K1
    normalized = normalize_points(points.points0, K0), normalize_points(points.points1, K1)
    # Convert one pixel to normalized coordinates.
    threshold = RANSAC_PX / float(np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]]))
    stacked, mask = cv2.findEssentialMat(*normalized, np.eye(3), cv2.RANSAC, CONFIDENCE, threshold)
    if stacked is None:
        return None
    # OpenCV may return several matrices, stacked (3 * count, 3). Keep the one with most inliers.
    motions = (
        cv2.recoverPose(E, *normalized, np.eye(3), FAR, mask=mask.copy())
        for E in np.split(stacked, len(stacked) // 3)
    )
    inlier_count, R, t, *_ = max(motions, key=lambda motion: motion[0])
    return (R, t.ravel()) if inlier_count else None


def estimate_pose_poselib(points: MatchedPoints, cameras: CameraPair) -> Optional[Motion]:
    """Estimate the pose by PoseLib's LO-RANSAC, as `MatchResult.estimate_relative_pose` does."""
    R, t, _ = estimate_relative_pose(points.points0, points.points1, cameras.K0, cameras.K1)
    if R is None:
        return None
    # No parallax: zeros mean an unknown direction.
    return R, np.zeros(3) if t is None else t


# The estimators of a relative pose. Their docstrings are written to protocol.json.
POSE_ESTIMATORS: Dict[str, Callable[[MatchedPoints, CameraPair], Optional[Motion]]] = {
    "pose": estimate_pose,
    "poselib": estimate_pose_poselib,
}


def compute_pose_error(estimated: Optional[Motion], truth: CameraPair) -> float:
    """Return the larger of the errors of rotation and of translation direction, in degrees.

    The error is infinite if there is no estimate. An estimated direction of zeros means that it is
    not known. Its error is 90 degrees, or 0 if both cameras are at one position.
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
