"""Fit a homography to matches: RANSAC with refinement, or least squares over all of them."""

from __future__ import annotations

from typing import NamedTuple, Optional

import cv2
import numpy as np

from superglue_sift.geometry.plane import (
    compose,
    inverse,
    jacobians,
    mirrored_part,
    normalized,
    transform,
)

MIN_POINTS = 4  # a homography has eight degrees of freedom, two per point
CONFIDENCE = 0.995  # at which RANSAC stops early; default of findHomography
# Scatter of true matches: the best of 0.25 to 2 on validation pairs, for every matcher
SCATTER_PX = 0.5
# Added to the deviation of aligned matches: error of the model, as real planes and lenses are not
# ideal. Homographies then measure it: MODEL_SCATTER times the scatter of the distances, within
# MODEL_LIMITS_PX.
MIN_DEVIATION_PX = 0.25
MODEL_SCATTER = 1.5
MODEL_LIMITS_PX = (0.05, 0.5)
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
MIRRORED = 2.0  # times the inliers of a homography: if so many fit a mirror image, it is one


class Fit(NamedTuple):
    """A robust fit of K matches. model: (3, 3) float64 or None; inliers: (K,) bool."""

    model: Optional[np.ndarray]
    inliers: np.ndarray


def fit_homography(
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float = 3.0,
    deviations: Optional[np.ndarray] = None,
) -> Fit:
    """`fit_ransac` with the inliers: matches (K, 2) mapped to within `threshold_px` in image 1.

    None for a mirror image, of which OpenCV finds a few matches that fit by chance: more fit if
    image 1 is mirrored.
    """
    none = Fit(None, np.zeros(len(points0), bool))
    H = fit_ransac(points0, points1, threshold_px, deviations=deviations)
    if H is None:
        return none
    fit = Fit(H, _within(H, points0, points1, threshold_px))
    if 2 * fit.inliers.sum() > len(points0):
        return fit
    mirrored = points1 * np.array([-1, 1], points1.dtype)
    H = fit_ransac(points0, mirrored, threshold_px)
    count = 0 if H is None else _within(H, points0, mirrored, threshold_px).sum()
    return none if count > MIRRORED * fit.inliers.sum() else fit


def fit_ransac(
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float = 3.0,
    iterations: int = 3000,
    seed: int = 0,
    deviations: Optional[np.ndarray] = None,
) -> Optional[np.ndarray]:
    """Robust homography 0 -> 1: RANSAC, then `refine_homography` (Hartley and Zisserman, 4.6).

    Uses OpenCV's USAC framework with uniform samples of four: models are scored by truncated
    squared error (MSAC; Torr and Zisserman 2000) instead of inlier counts, and bad ones are dropped
    early (SPRT; Matas and Chum 2005). docs/evaluation.md compares it with others.

    points0, points1: (N, 2) matched pixels, float32 to OpenCV. threshold_px: inlier distance in
    image 1. iterations: maximum number of samples. deviations: (N,) px of aligned matches, see
    `refine_homography`. Returns (3, 3) float64, or None for fewer than four matches, if OpenCV
    finds no model, or if it is one of a mirror image.
    """
    if len(points0) < MIN_POINTS:
        return None
    params = cv2.UsacParams()
    params.sampler = cv2.SAMPLING_UNIFORM
    params.score = cv2.SCORE_METHOD_MSAC
    params.loMethod = cv2.LOCAL_OPTIM_NULL
    params.isParallel = False
    params.threshold = threshold_px
    params.confidence = CONFIDENCE
    params.maxIterations = iterations
    params.randomGeneratorState = seed
    H = cv2.findHomography(points0, points1, params)[0]
    if H is None:
        return None
    H = refine_homography(H, points0, points1, threshold_px, deviations)
    inliers = points0[_within(H, points0, points1, threshold_px)]
    return None if mirrored_part(jacobians(H, inliers)) > 0.5 else H


def refine_homography(
    H: np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float,
    deviations: Optional[np.ndarray] = None,
) -> np.ndarray:
    """Minimize the Cauchy loss of the distances, in image 1, of the matches near H (3, 3).

    The loss is robust, since true matches scatter by a few tenths of a pixel, and large keypoints
    by several pixels.

    points0, points1: (N, 2); those within `threshold_px` of H count. deviations: (N,) px along each
    axis from `refine.align`, which divide the distances; NaN or None: SCATTER_PX. The scene's
    deviation from a plane is added to them in quadrature: a first fit measures it, by the median
    distance of aligned matches.
    """
    inliers = _within(H, points0, points1, threshold_px)
    if inliers.sum() < MIN_POINTS:
        return H
    p0, p1 = (np.asarray(points, np.float64)[inliers] for points in (points0, points1))
    if deviations is None:
        return _minimize(H, p0, p1, np.ones(len(p0)))
    deviations = np.asarray(deviations, np.float64)[inliers]
    H = _minimize(H, p0, p1, weights_of(deviations))
    aligned = np.isfinite(deviations)
    if aligned.sum() < MIN_POINTS:
        return H
    scatter = MAD_TO_DEVIATION * float(np.median(np.abs(transform(p0, H) - p1)[aligned]))
    model_px = float(np.clip(MODEL_SCATTER * scatter, *MODEL_LIMITS_PX))
    return _minimize(H, p0, p1, weights_of(deviations, model_px))


def weights_of(deviations: np.ndarray, added_px: float = MIN_DEVIATION_PX) -> np.ndarray:
    """(N,) weights of distances, by deviations (N,) px and `added_px` in quadrature; 1 for NaN."""
    deviations = np.asarray(deviations, np.float64)
    return np.nan_to_num(SCATTER_PX / np.hypot(deviations, added_px), nan=1.0)


def _minimize(H: np.ndarray, p0: np.ndarray, p1: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The homography near H that minimizes the Cauchy loss of weighted distances (N,)."""
    from scipy.optimize import least_squares  # here, since the import takes 0.3 s

    both = np.repeat(weights, 2)

    def complete(entries: np.ndarray) -> np.ndarray:
        return np.append(entries, 1.0).reshape(3, 3)

    def distances(entries: np.ndarray) -> np.ndarray:
        return (transform(p0, complete(entries)) - p1).ravel() * both

    def derivatives(entries: np.ndarray) -> np.ndarray:
        return _derivatives_by_entries(complete(entries), p0) * both[:, None]

    found = least_squares(
        distances,
        normalized(H).ravel()[:8],
        derivatives,  # pyright: ignore  # scipy's stubs know only its names
        x_scale="jac",
        loss="cauchy",
        f_scale=SCATTER_PX,
        ftol=1e-4,
    )
    return complete(found.x)


def _derivatives_by_entries(H: np.ndarray, points: np.ndarray) -> np.ndarray:
    """(2 N, 8) derivatives of mapped points (N, 2) by the first eight entries of H."""
    mapped = transform(points, H)
    depth = points @ H[2, :2] + H[2, 2]
    linear = np.column_stack([points, np.ones(len(points))]) / depth[:, None]
    derivatives = np.zeros((len(points), 2, 8))
    derivatives[:, 0, :3] = derivatives[:, 1, 3:6] = linear
    derivatives[:, :, 6:] = -mapped[:, :, None] * linear[:, None, :2]
    return derivatives.reshape(-1, 8)


def _within(
    H: np.ndarray, points0: np.ndarray, points1: np.ndarray, threshold_px: float
) -> np.ndarray:
    """(N,) bool: matches that H maps to within `threshold_px` in image 1."""
    with np.errstate(all="ignore"):
        return np.linalg.norm(transform(points0, H) - points1, axis=1) <= threshold_px


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
    without outlier rejection. Each match (N, 2) px scales its two equations by its weight (N,), 0
    or more; None: equal weights. Returns (3, 3) float64, or None for fewer than four matches of
    positive weight or a degenerate set.
    """
    weights = np.ones(len(points0)) if weights is None else np.asarray(weights, np.float64)
    used = weights > 0
    if used.sum() < MIN_POINTS:
        return None
    p0, p1 = (np.asarray(points, np.float64)[used] for points in (points0, points1))
    w = weights[used]
    T0 = _conditioner(p0, w)
    T1 = _conditioner(p1, w)
    homogeneous = np.column_stack([transform(p0, T0), np.ones(len(p0))])
    x, y = transform(p1, T1).T
    zeros = np.zeros_like(homogeneous)
    horizontal = np.concatenate([homogeneous, zeros, -x[:, None] * homogeneous], axis=1)
    vertical = np.concatenate([zeros, homogeneous, -y[:, None] * homogeneous], axis=1)
    rows = np.concatenate([horizontal * w[:, None], vertical * w[:, None]])
    # The null vector of the rows, by the 9x9 normal matrix at a fraction of the cost of their SVD
    values, vectors = np.linalg.eigh(rows.T @ rows)
    if values[1] <= 1e-12 * values[-1]:
        return None  # a second null direction: collinear or coincident points
    H = compose(inverse(T1), vectors[:, 0].reshape(3, 3), T0)
    return H if np.isfinite(H).all() else None
