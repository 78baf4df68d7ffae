"""Plane geometry: points in pixels (x right, y down, centre of the first pixel at (0, 0)), 3x3
homographies.

`H_a_to_b` maps points of frame a to frame b: p_b ~ H_a_to_b @ p_a.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, Dict, NamedTuple, Optional, Tuple

import cv2
import numpy as np

_TINY = np.finfo(np.float64).tiny
MIN_POINTS = 4  # a homography has eight degrees of freedom, two per point
MIN_ESSENTIAL = 5  # matches for an essential matrix
FAR = 1e9  # depth, in baselines, beyond which points do not decide between the four motions
MIN_FUNDAMENTAL = 8  # matches for a fundamental matrix
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
SAMPSON_PX = 3.0  # maximum distance to the epipolar line of matches that a pose is fitted to


def transform(points, H):
    """Map points (..., N, 2) through homographies (..., 3, 3), both arrays or both tensors: (...,
    N, 2).

    Points on the horizon line become inf or nan, without an error. Element by element: the sums of
    a matrix product depend on the processor.
    """
    x = points[..., :1]
    y = points[..., 1:]
    H = H[..., None, :, :]
    mapped = x * H[..., :2, 0] + y * H[..., :2, 1] + H[..., :2, 2]
    depth = x * H[..., 2:, 0] + y * H[..., 2:, 1] + H[..., 2:, 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        return mapped / depth


def compose(*homographies: np.ndarray) -> np.ndarray:
    """Chain homographies (3, 3), the last applied first.

    H_0to1 = compose(H_image_to_1, inverse(H_image_to_0)).
    """
    product = functools.partial(np.einsum, "ij,jk->ik")  # no BLAS, see `transform`
    return normalized(functools.reduce(product, homographies))


def inverse(H: np.ndarray) -> np.ndarray:
    """The inverse homography (3, 3), by the adjugate. Singular matrices raise no error."""
    a, b, c = H.T
    return normalized(np.stack([np.cross(b, c), np.cross(c, a), np.cross(a, b)]))


def through_four_points(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Homography through four correspondences, (4, 2) each, in float64, without LAPACK."""
    return compose(_of_unit_square(target), inverse(_of_unit_square(source)))


def _of_unit_square(quad: np.ndarray) -> np.ndarray:
    """Homography of (0, 0), (1, 0), (1, 1), (0, 1) to a quadrilateral (Heckbert 1989, 2.2.3)."""
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = quad.tolist()
    sum_x = x0 - x1 + x2 - x3
    sum_y = y0 - y1 + y2 - y3
    area = (x1 - x2) * (y3 - y2) - (x3 - x2) * (y1 - y2)
    g = (sum_x * (y3 - y2) - (x3 - x2) * sum_y) / area
    h = ((x1 - x2) * sum_y - sum_x * (y1 - y2)) / area
    return np.array(
        [
            [x1 - x0 + g * x1, x3 - x0 + h * x3, x0],
            [y1 - y0 + g * y1, y3 - y0 + h * y3, y0],
            [g, h, 1.0],
        ]
    )


def normalized(H: np.ndarray) -> np.ndarray:
    """Scale homographies (..., 3, 3) float64 to a lower right entry of 1, unless it is 0."""
    scale = H[..., 2:, 2:]
    return H / np.where(np.abs(scale) > _TINY, scale, 1.0)


def jacobians(H: np.ndarray, points: np.ndarray) -> np.ndarray:
    """(N, 2, 2) derivatives of a homography at points (N, 2)."""
    mapped = transform(points, H)
    depth = points[:, 0] * H[2, 0] + points[:, 1] * H[2, 1] + H[2, 2]
    return (H[None, :2, :2] - mapped[:, :, None] * H[None, None, 2, :2]) / depth[:, None, None]


def resizing(before: Tuple[float, float], after: Tuple[float, float]) -> np.ndarray:
    """(3, 3) map of pixel coordinates under `cv2.resize` from one (width, height) to another."""
    sx = after[0] / before[0]
    sy = after[1] / before[1]
    return np.array([[sx, 0, (sx - 1) / 2], [0, sy, (sy - 1) / 2], [0, 0, 1.0]])


def unit_of(size: Tuple[float, float], side: int) -> float:
    """Length in px, in an image of `size`, of a pixel of the image reduced to a longer `side`."""
    return max(1.0, max(size) / side)


def corners(size: Tuple[int, int]) -> np.ndarray:
    """Centres of the four corner pixels of an image of `size` (width, height): (4, 2) float64,
    clockwise.
    """
    w, h = size
    return np.array([[0, 0], [w - 1, 0], [w - 1, h - 1], [0, h - 1]], dtype=np.float64)


def corner_error(
    H_estimated: Optional[np.ndarray], H_true: np.ndarray, size: Tuple[int, int]
) -> float:
    """Mean distance in px of image 0's corners mapped by both (SuperGlue, section 5.1); inf without
    an estimate.
    """
    if H_estimated is None:
        return math.inf
    points = corners(size)
    error = float(
        np.linalg.norm(transform(points, H_estimated) - transform(points, H_true), axis=-1).mean()
    )
    return error if math.isfinite(error) else math.inf


def fit_ransac(
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float = 3.0,
    iterations: int = 3000,
    seed: int = 0,
    deviations: Optional[np.ndarray] = None,
) -> Optional[np.ndarray]:
    """Robust homography 0 -> 1: RANSAC, then `refine_homography` (Hartley and Zisserman, algorithm
    4.6).

    Uses OpenCV's USAC framework with uniform samples of four: models are scored by truncated
    squared error (MSAC; Torr and Zisserman 2000) instead of inlier counts, and bad ones are dropped
    early (SPRT; Matas and Chum 2005). docs/evaluation.md compares it with others.

    points0, points1: (N, 2) matched pixels, float32 to OpenCV. threshold_px: inlier distance in
    image 1. iterations: maximum number of samples. deviations: (N,) px of aligned matches, see
    `refine_homography`. Returns (3, 3) float64, or None for fewer than four matches, if OpenCV
    finds no model, or if it is one of a mirror image (`is_mirroring`).
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
    return None if is_mirroring(H, points0[_within(H, points0, points1, threshold_px)]) else H


def is_mirroring(H: np.ndarray, points: np.ndarray) -> bool:
    """Whether a homography (3, 3) reverses most points (N, 2), as no view of a surface does.

    Where it does, only details that are symmetric themselves were matched.
    """
    with np.errstate(all="ignore"):
        return (
            bool(np.mean(np.linalg.det(jacobians(H, points)) < 0) > 0.5) if len(points) else False
        )


def refine_homography(
    H: np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float,
    deviations: Optional[np.ndarray] = None,
) -> np.ndarray:
    """Minimize the Cauchy loss of the distances, in image 1, of the matches within `threshold_px`
    of H (3, 3).

    The loss is robust, since true matches scatter by a few tenths of a pixel, and large keypoints
    by several pixels.

    points0, points1: (N, 2). deviations: (N,) px along each axis from `refine.align`, which divide
    the distances; NaN or None: SCATTER_PX. The scene's deviation from a plane is added to them in
    quadrature: a first fit measures it, by the median distance of aligned matches.
    """
    from scipy.optimize import least_squares  # here, since the import takes 0.3 s

    inliers = _within(H, points0, points1, threshold_px)
    if inliers.sum() < MIN_POINTS:
        return H
    p0, p1 = (np.asarray(points, np.float64)[inliers] for points in (points0, points1))

    def fitted(start: np.ndarray, weights: np.ndarray) -> np.ndarray:
        both = np.repeat(weights, 2)

        def distances(entries: np.ndarray) -> np.ndarray:
            return (transform(p0, _with_last_entry(entries)) - p1).ravel() * both

        def derivatives(entries: np.ndarray) -> np.ndarray:
            return _derivatives_by_entries(_with_last_entry(entries), p0) * both[:, None]

        options: Dict[str, Any] = {
            "jac": derivatives,
            "x_scale": "jac",
            "loss": "cauchy",
            "f_scale": SCATTER_PX,
        }
        return _with_last_entry(
            least_squares(distances, normalized(start).ravel()[:8], ftol=1e-4, **options).x
        )

    if deviations is None:
        return fitted(H, np.ones(len(p0)))
    deviations = np.asarray(deviations, np.float64)[inliers]
    H = fitted(H, _weights(deviations))
    aligned = np.isfinite(deviations)
    if aligned.sum() < MIN_POINTS:
        return H
    scatter = MAD_TO_DEVIATION * float(np.median(np.abs(transform(p0, H) - p1)[aligned]))
    return fitted(
        H, _weights(deviations, float(np.clip(MODEL_SCATTER * scatter, *MODEL_LIMITS_PX)))
    )


def _weights(deviations: np.ndarray, added_px: float = MIN_DEVIATION_PX) -> np.ndarray:
    """(N,) weights of distances, by deviations (N,) px and `added_px` in quadrature; 1 for NaN."""
    return np.nan_to_num(
        SCATTER_PX / np.hypot(np.asarray(deviations, np.float64), added_px), nan=1.0
    )


def _with_last_entry(entries: np.ndarray) -> np.ndarray:
    """(3, 3) homography from its first eight entries; the last is 1."""
    return np.append(entries, 1.0).reshape(3, 3)


def _derivatives_by_entries(H: np.ndarray, points: np.ndarray) -> np.ndarray:
    """(2 N, 8) derivatives of the mapped x and y of points (N, 2) by the first eight entries of
    H.
    """
    mapped = transform(points, H)
    linear = (
        np.column_stack([points, np.ones(len(points))]) / (points @ H[2, :2] + H[2, 2])[:, None]
    )
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


class Fit(NamedTuple):
    """A robust fit of K matches. model: (3, 3) float64 or None; inliers: (K,) bool."""

    model: Optional[np.ndarray]
    inliers: np.ndarray


def homography_with_inliers(
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float = 3.0,
    deviations: Optional[np.ndarray] = None,
) -> Fit:
    """`fit_ransac` with the inliers: matches (K, 2) that it maps to within `threshold_px` in image
    1.

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
    more = (
        H is not None
        and _within(H, points0, mirrored, threshold_px).sum() > MIRRORED * fit.inliers.sum()
    )
    return none if more else fit


def fundamental_with_inliers(
    points0: np.ndarray, points1: np.ndarray, threshold_px: float = 3.0
) -> Fit:
    """Fundamental matrix F, x1^T F x0 = 0, of matched pixels (K, 2) by OpenCV's MAGSAC++;
    deterministic.

    None for fewer than eight matches, and for degenerate ones on which OpenCV fails.
    """
    F = None
    mask = None
    if len(points0) >= MIN_FUNDAMENTAL:
        # OpenCV raises "!model.empty()" if no sample gives a model
        with contextlib.suppress(cv2.error):
            F, mask = cv2.findFundamentalMat(
                points0, points1, cv2.USAC_MAGSAC, threshold_px, 0.999, 3000
            )
    if F is None or mask is None:
        return Fit(None, np.zeros(len(points0), bool))
    return Fit(F, mask.ravel().astype(bool))


class Pose(NamedTuple):
    """Camera 1 from camera 0: x1 = R x0 + s t, s unknown. R (3, 3), t (3,) of length 1, or None;
    inliers: (K,) bool.
    """

    R: Optional[np.ndarray]
    t: Optional[np.ndarray]
    inliers: np.ndarray


def relative_pose(
    points0: np.ndarray,
    points1: np.ndarray,
    K0: np.ndarray,
    K1: np.ndarray,
    threshold_px: float = 1.0,
    deviations: Optional[np.ndarray] = None,
) -> Pose:
    """Relative pose of two cameras with known intrinsics K0, K1 (3, 3), from matched pixels (K, 2).

    OpenCV's GC-RANSAC (Barath and Matas 2018) for the essential matrix, deterministic; then the one
    of four motions with the matches in front of both cameras; then `refine_pose`, since all matches
    are far more accurate than a sample of five. threshold_px: inlier distance, in pixels of the
    mean focal length. deviations: (K,) px of aligned matches, as in `refine_homography`. None for
    fewer than five matches. Raises ValueError for intrinsics that are not (3, 3).
    """
    K0 = np.asarray(K0, np.float64)
    K1 = np.asarray(K1, np.float64)
    if K0.shape != (3, 3) or K1.shape != (3, 3):
        raise ValueError(f"intrinsics {K0.shape} and {K1.shape}: must be (3, 3)")
    none = Pose(None, None, np.zeros(len(points0), bool))
    if len(points0) < MIN_ESSENTIAL:
        return none
    flat0, flat1 = (
        transform(np.asarray(p, np.float64), np.linalg.inv(K))
        for p, K in ((points0, K0), (points1, K1))
    )
    focal = float(np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]]))
    stacked, mask = cv2.findEssentialMat(
        flat0, flat1, np.eye(3), cv2.USAC_ACCURATE, 0.9999, threshold_px / focal
    )
    if stacked is None or stacked.shape != (3, 3):
        return none
    count, R, t, inside, *_ = cv2.recoverPose(
        stacked, flat0, flat1, np.eye(3), FAR, mask=mask.copy()
    )
    if not count:
        return none
    R, t = refine_pose(R, t.ravel(), flat0, flat1, focal, deviations)
    return Pose(R, t, inside.ravel() > 0)


def refine_pose(
    R: np.ndarray,
    t: np.ndarray,
    flat0: np.ndarray,
    flat1: np.ndarray,
    focal: float,
    deviations: Optional[np.ndarray] = None,
) -> Tuple[np.ndarray, np.ndarray]:
    """Minimize the Cauchy loss of the Sampson distances of the matches within `SAMPSON_PX`, from R
    (3, 3), t (3,).

    Optimizes the five degrees of freedom (Hartley and Zisserman, section 11.4.3). flat0, flat1: (K,
    2) on the plane at depth one. focal: px, converts distances to pixels. deviations: (K,) px, as
    in `refine_homography`.
    """
    from scipy.optimize import least_squares

    p0, p1 = (np.column_stack([flat, np.ones(len(flat))]) for flat in (flat0, flat1))
    near = np.abs(_sampson(R, t, p0, p1)) * focal < SAMPSON_PX
    if near.sum() < MIN_FUNDAMENTAL:
        return R, t
    p0 = p0[near]
    p1 = p1[near]
    weights = focal * _weights(deviations[near]) if deviations is not None else focal
    tangents = np.linalg.svd(t[None])[2][1:]  # two directions in which t moves on the sphere

    def moved(change: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        direction = t + change[3:] @ tangents
        return cv2.Rodrigues(change[:3])[0] @ R, direction / np.linalg.norm(direction)

    options: Dict[str, Any] = {
        "x_scale": "jac",
        "loss": "cauchy",
        "f_scale": SCATTER_PX,
        "ftol": 1e-5,
        "max_nfev": 30,
    }
    return moved(
        least_squares(
            lambda change: _sampson(*moved(change), p0, p1) * weights, np.zeros(5), **options
        ).x
    )


def _sampson(R: np.ndarray, t: np.ndarray, p0: np.ndarray, p1: np.ndarray) -> np.ndarray:
    """(K,) signed Sampson distances of homogeneous points (K, 3) on the planes at depth one; 0 on
    both epipoles.
    """
    x, y, z = t
    E = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ R
    lines1 = p0 @ E.T
    lines0 = p1 @ E
    steepness = np.sqrt((lines1[:, :2] ** 2).sum(1) + (lines0[:, :2] ** 2).sum(1))
    return (p1 * lines1).sum(1) / np.maximum(steepness, _TINY)


def _conditioner(points: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Similarity that moves the weighted mean to 0 and the mean distance to sqrt(2) (Hartley
    1997).
    """
    mean = weights @ points / weights.sum()
    spread = weights @ np.linalg.norm(points - mean, axis=1) / weights.sum()
    scale = np.sqrt(2.0) / max(float(spread), 1e-12)
    return np.array([[scale, 0, -scale * mean[0]], [0, scale, -scale * mean[1]], [0, 0, 1.0]])


def fit_dlt(
    points0: np.ndarray, points1: np.ndarray, weights: Optional[np.ndarray] = None
) -> Optional[np.ndarray]:
    """Weighted least-squares homography 0 -> 1 over all matches, without outlier rejection: the
    paper's "DLT" column.

    The direct linear transform with Hartley conditioning (Hartley and Zisserman, algorithm 4.2).
    Each match (N, 2) px scales its two equations by its weight (N,), 0 or more; None: equal
    weights. Returns (3, 3) float64, or None for fewer than four matches of positive weight or a
    degenerate set.
    """
    weights = np.ones(len(points0)) if weights is None else np.asarray(weights, np.float64)
    used = weights > 0
    if used.sum() < MIN_POINTS:
        return None
    p0 = np.asarray(points0, np.float64)[used]
    p1 = np.asarray(points1, np.float64)[used]
    w = weights[used]
    T0 = _conditioner(p0, w)
    T1 = _conditioner(p1, w)
    homogeneous = np.concatenate([transform(p0, T0), np.ones((len(p0), 1))], axis=1)
    x, y = transform(p1, T1).T
    zeros = np.zeros_like(homogeneous)
    horizontal = np.concatenate([homogeneous, zeros, -x[:, None] * homogeneous], axis=1)
    vertical = np.concatenate([zeros, homogeneous, -y[:, None] * homogeneous], axis=1)
    rows = np.concatenate([horizontal * w[:, None], vertical * w[:, None]])
    # eigenvector of the 9x9 normal matrix: the null vector, at a fraction of the cost of an SVD of
    # the rows
    values, vectors = np.linalg.eigh(rows.T @ rows)
    if values[1] <= 1e-12 * values[-1]:
        return None  # a second null direction: collinear or coincident points
    H = np.linalg.inv(T1) @ vectors[:, 0].reshape(3, 3) @ T0
    return normalized(H) if np.isfinite(H).all() else None
