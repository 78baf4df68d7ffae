"""Homography estimators of published tables. Metrics of different estimators cannot be compared.

Each takes points0, points1 (K, 2) pixels, K at least `geometry.MIN_POINTS`, weights (K,) from
`weights_of`, the inlier limit in px, the maximum of iterations, a seed and, for aligned matches,
deviations (K,) px, else None. It returns (3, 3) float64, or None without an estimate.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, Optional, Sequence, Tuple

import cv2
import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluate.matchers import BASELINES
from superglue_sift import geometry

DEFAULT = ("ransac", "dlt", "surest")
MIN_DOUBT = 1e-4  # probability of a wrong match, so that odds stay finite
DECIDING = 16  # number of matches with the largest odds, at most half of all

# How least squares uses the confidences of a matcher. All were chosen on validation pairs, each
# matcher's by its own AUC@10 (docs/evaluation.md#least-squares).
BASELINE_POWER = 6
SUREST = {"nn": 0.15, "mutual_nn": 0.3, "ratio_test": 0.4}  # fractions of the matches
SUREST_OF_NETWORK = 0.5


def ransac(points0, points1, weights, px, iterations, seed, deviations=None):
    """RANSAC, as in the paper: see `geometry.fit_ransac`."""
    return geometry.fit_ransac(points0, points1, px, iterations, seed, deviations)


def opencv(points0, points1, weights, px, iterations, seed, deviations=None):
    """cv2.findHomography with cv2.RANSAC: the "OpenCV" of published tables (LightGlue,
    glue-factory).
    """
    cv2.setRNGSeed(seed)
    H, _ = cv2.findHomography(
        points0, points1, cv2.RANSAC, px, maxIters=iterations, confidence=geometry.CONFIDENCE
    )
    return H


def least_squares(points0, points1, weights, px, iterations, seed, deviations=None):
    """Weighted least squares over all matches, without rejection: the paper's DLT."""
    return geometry.fit_dlt(points0, points1, weights)


def weights_of(estimator: str, matcher: str, scores: np.ndarray) -> np.ndarray:
    """(K,) weights of least squares for matches with confidences `scores` (K,).

    `dlt` scales the equations of a network's match by the odds p / (1 - p) rather than by p, since
    the error of a wrong match is hundreds of times larger. Odds are clipped to the DECIDING-th
    largest, so that the noise of many matches averages out. Odds are nothing that 1 - ratio means:
    baselines weigh by a power of it. `surest` gives the surest fraction equal weights.
    """
    if not len(scores):
        return scores
    if estimator == "surest":
        fraction = SUREST.get(matcher, SUREST_OF_NETWORK)
        count = min(max(geometry.MIN_POINTS, math.ceil(fraction * len(scores))), len(scores))
        return (scores >= np.sort(scores)[-count]).astype(np.float64)
    if matcher in BASELINES:
        return scores**BASELINE_POWER
    odds = scores / (1.0 - scores + MIN_DOUBT)
    rank = min(DECIDING, max(geometry.MIN_POINTS, len(odds) // 2), len(odds))
    return np.minimum(odds, np.sort(odds)[-rank])


def magsac(points0, points1, weights, px, iterations, seed, deviations=None):
    """OpenCV's MAGSAC++ (Barath et al. 2020), whose random generator restarts at every call."""
    H, _ = cv2.findHomography(points0, points1, cv2.USAC_MAGSAC, px, maxIters=iterations)
    return H


def poselib(points0, points1, weights, px, iterations, seed, deviations=None):
    """PoseLib's LO-RANSAC, glue-factory's default."""
    import poselib as library

    options = {"max_reproj_error": px, "max_iterations": iterations, "seed": seed}
    H, info = library.estimate_homography(points0, points1, options, {})
    return (
        np.asarray(H)
        if info["num_inliers"] >= geometry.MIN_POINTS and np.isfinite(H).all()
        else None
    )


ESTIMATORS: Dict[str, Callable[..., Optional[np.ndarray]]] = {
    "ransac": ransac,
    "dlt": least_squares,
    "surest": least_squares,
    "opencv": opencv,
    "magsac": magsac,
    "poselib": poselib,
}
WORDS = {
    "ransac": (
        "cv2.findHomography, UsacParams: uniform samples, MSAC score; then scipy's least_squares,"
        " Cauchy loss"
    ),
    "dlt": (
        "least squares over all matches, weighted by the odds of a network's confidence, "
        f"by the power {BASELINE_POWER} of 1 - ratio of a baseline's"
    ),
    "surest": (
        f"least squares over the surest {SUREST_OF_NETWORK:.0%} of a network's matches, "
        + ", ".join(f"{share:.0%} of {name}" for name, share in SUREST.items())
        + ", equal weights"
    ),
    "opencv": "cv2.findHomography, RANSAC",
    "magsac": "cv2.findHomography, USAC_MAGSAC",
    "poselib": "PoseLib LO-RANSAC",
}


def choose(names: Sequence[str]) -> Tuple[str, ...]:
    """Check the names. Raises RequestError for an unknown estimator."""
    for name in names:
        if name not in ESTIMATORS:
            raise RequestError(f"--estimators {name}: unknown; choose from {', '.join(ESTIMATORS)}")
    return tuple(dict.fromkeys(names))
