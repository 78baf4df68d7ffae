"""Homography estimators of published tables. Metrics of different estimators cannot be compared."""

from __future__ import annotations

import math
from typing import Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluate.matchers import BASELINES
from superglue_sift.geometry import two_view

DEFAULT = ("ransac", "dlt", "surest")
PX = 3.0  # inlier limit of the robust ones
ITERATIONS = 3000  # of them, at most
MIN_DOUBT = 1e-4  # probability of a wrong match, so that odds stay finite
DECIDING = 16  # number of matches with the largest odds, at most half of all
BASELINE_POWER = 6
SUREST = {"nn": 0.15, "mutual_nn": 0.3, "ratio_test": 0.4}  # fractions of the matches
SUREST_OF_NETWORK = 0.5


class Points(NamedTuple):
    """At least `two_view.MIN_POINTS` matches. points0, points1: (K, 2) px; weights: (K,) from
    `weights_of`; surest: (K,) bool from `surest_of`; deviations: (K,) px of aligned matches, else
    None.
    """

    points0: np.ndarray
    points1: np.ndarray
    weights: np.ndarray
    surest: np.ndarray
    seed: int
    deviations: Optional[np.ndarray] = None


def ransac(found: Points) -> Optional[np.ndarray]:
    """RANSAC, as in the paper: see `two_view.fit_ransac`."""
    points = found.points0, found.points1
    return two_view.fit_ransac(*points, PX, ITERATIONS, found.seed, found.deviations)


def least_squares(found: Points) -> Optional[np.ndarray]:
    """Weighted least squares over all matches, without rejection: the paper's DLT."""
    return fit_dlt(found.points0, found.points1, found.weights)


def surest(found: Points) -> Optional[np.ndarray]:
    """Least squares with equal weights over the matches of which the matcher is surest."""
    return fit_dlt(found.points0[found.surest], found.points1[found.surest])


def _conditioner(points: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Similarity that moves the mean to 0 and the mean distance to sqrt(2) (Hartley 1997)."""
    mean = weights @ points / weights.sum()
    spread = weights @ np.linalg.norm(points - mean, axis=1) / weights.sum()
    scale = np.sqrt(2.0) / max(float(spread), 1e-12)
    return np.array([[scale, 0, -scale * mean[0]], [0, scale, -scale * mean[1]], [0, 0, 1.0]])


def fit_dlt(
    points0: np.ndarray, points1: np.ndarray, weights: Optional[np.ndarray] = None
) -> Optional[np.ndarray]:
    """Weighted least-squares homography 0 -> 1 over all matches, the paper's "DLT" column.

    The direct linear transform with Hartley conditioning (Hartley and Zisserman, algorithm 4.2),
    without outlier rejection. points0, points1: (N, 2) float64 px. weights: (N,), 0 or more, which
    scale the two equations of a match; None: equal weights. Returns (3, 3) float64, or None for
    fewer than four matches of positive weight or a degenerate set.
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
    zeros = np.zeros_like(homogeneous)
    horizontal = np.concatenate([homogeneous, zeros, -x[:, None] * homogeneous], axis=1)
    vertical = np.concatenate([zeros, homogeneous, -y[:, None] * homogeneous], axis=1)
    rows = np.concatenate([horizontal * w[:, None], vertical * w[:, None]])
    # The null vector of the rows, by the 9x9 normal matrix at a fraction of the cost of their SVD
    values, vectors = np.linalg.eigh(rows.T @ rows)
    if values[1] <= 1e-12 * values[-1]:
        return None  # a second null direction: collinear or coincident points
    H = two_view.compose(two_view.inverse(T1), vectors[:, 0].reshape(3, 3), T0)
    return H if np.isfinite(H).all() else None


def opencv(found: Points) -> Optional[np.ndarray]:
    """cv2.findHomography with cv2.RANSAC: the "OpenCV" of published tables (LightGlue,
    glue-factory).
    """
    options = {"maxIters": ITERATIONS, "confidence": two_view.CONFIDENCE}
    return cv2.findHomography(found.points0, found.points1, cv2.RANSAC, PX, **options)[0]


def magsac(found: Points) -> Optional[np.ndarray]:
    """OpenCV's MAGSAC++ (Barath et al. 2020), whose random generator restarts at every call."""
    points = found.points0, found.points1
    return cv2.findHomography(*points, cv2.USAC_MAGSAC, PX, maxIters=ITERATIONS)[0]


def poselib(found: Points) -> Optional[np.ndarray]:
    """PoseLib's LO-RANSAC, glue-factory's default."""
    import poselib as library

    options = {"max_reproj_error": PX, "max_iterations": ITERATIONS, "seed": found.seed}
    H, info = library.estimate_homography(found.points0, found.points1, options, {})
    usable = info["num_inliers"] >= two_view.MIN_POINTS and np.isfinite(H).all()
    return np.asarray(H) if usable else None


# The function, which returns (3, 3) float64 or None, and its words for protocol.json.
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
        f"least squares with equal weights over the surest {SUREST_OF_NETWORK:.0%} of a network's"
        " matches, " + ", ".join(f"{share:.0%} of {name}" for name, share in SUREST.items()),
    ),
    "opencv": (opencv, "cv2.findHomography, RANSAC"),
    "magsac": (magsac, "cv2.findHomography, USAC_MAGSAC"),
    "poselib": (poselib, "PoseLib LO-RANSAC"),
}


def weights_of(matcher: str, scores: np.ndarray) -> np.ndarray:
    """(K,) weights of least squares for matches with confidences `scores` (K,), as chosen on
    validation pairs by each matcher's own AUC@10 (docs/evaluation.md#least-squares).

    They scale the equations of a network's match by the odds p / (1 - p) rather than by p, since
    the error of a wrong match is hundreds of times larger. Odds are clipped to the DECIDING-th
    largest, so that the noise of many matches averages out. Odds are nothing that 1 - ratio means:
    baselines weigh by a power of it.
    """
    if matcher in BASELINES:
        return scores**BASELINE_POWER
    odds = scores / (1.0 - scores + MIN_DOUBT)
    rank = min(DECIDING, max(two_view.MIN_POINTS, len(odds) // 2), len(odds))
    return np.minimum(odds, np.sort(odds)[-rank])


def surest_of(matcher: str, scores: np.ndarray) -> np.ndarray:
    """(K,) bool: the fraction of the matches that `surest` takes, chosen as the weights were."""
    fraction = SUREST.get(matcher, SUREST_OF_NETWORK)
    count = min(max(two_view.MIN_POINTS, math.ceil(fraction * len(scores))), len(scores))
    return scores >= np.sort(scores)[-count]


def choose(names: Sequence[str]) -> Tuple[str, ...]:
    """Check the names. Raises RequestError for an unknown estimator."""
    for name in names:
        if name not in ESTIMATORS:
            raise RequestError(f"--estimators {name}: unknown; choose from {', '.join(ESTIMATORS)}")
    return tuple(dict.fromkeys(names))
