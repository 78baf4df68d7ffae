"""Map points of one image to another, and fit such maps robustly.

Points are in pixels, with x to the right and y down. The center of the first pixel is (0, 0).
H_a_to_b maps points of frame a to frame b: p_b ~ H_a_to_b @ p_a. Maps are computed element by
element, because the sums of matrix products and LAPACK's inverses depend on the processor.

The functions that fit take points in pixels of the files. Limits were chosen in images of about
REFERENCE_PX, so a larger file passes a factor by which its limits are multiplied
(`compute_reduction_factor`).
"""

from __future__ import annotations

import functools
import math
from typing import Optional, Tuple

import cv2
import numpy as np

Size = Tuple[int, int]  # (width, height) of an image in px

TINY = np.finfo(np.float64).tiny
REFERENCE_PX = 1024  # Longer side of images in which lengths in pixels were chosen
MIN_POINTS = 4  # A homography has eight degrees of freedom, two per point
CONFIDENCE = 0.995  # RANSAC stops early at this confidence, the default of findHomography
# Scatter of true matches: the best value from 0.25 to 2 px on validation pairs, for every matcher
SCATTER_PX = 0.5
# The deviation of the scene from a plane is added to that of refined matches, since real planes and
# lenses are not ideal. The first fit measures it: it is MODEL_SCATTER times the scatter of the
# distances. The first guess and the limits are multiples of the scatter of true matches.
MODEL_GUESS = 0.5
MODEL_SCATTER = 1.5
MODEL_LIMITS = (0.1, 1.0)
MAD_TO_DEVIATION = 1.4826  # Deviation over median distance, for a normal distribution
MIN_FUNDAMENTAL = 8  # Minimum number of matches for a fundamental matrix
FUNDAMENTAL_SAMPLE = 7  # Number of matches that determine a fundamental matrix
# A model is supported if at least this part of the matches are inliers, and if wrong matches alone
# would have this many inliers in at most one of 1,000 pairs.
SUPPORTED_PART = 0.5
SUPPORTED_DIGITS = 3.0


def transform(points, H):
    """Map points through homographies.

    Args:
        points: (..., N, 2) px, an array or a tensor.
        H: (..., 3, 3), of the same type.

    Returns:
        (..., N, 2). Points on the horizon line become inf or nan, without an error.

    Example:
        >>> transform(np.array([[1.0, 2.0]]), np.diag([2.0, 2.0, 1.0])).tolist()
        [[2.0, 4.0]]
    """
    x = points[..., :1]
    y = points[..., 1:]
    H = H[..., None, :, :]
    mapped = x * H[..., :2, 0] + y * H[..., :2, 1] + H[..., :2, 2]
    depth = x * H[..., 2:, 0] + y * H[..., 2:, 1] + H[..., 2:, 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        return mapped / depth


def compose(*homographies: np.ndarray) -> np.ndarray:
    """Chain homographies (..., 3, 3). The last one is applied first.

    H_0to1 = compose(H_image_to_1, inverse(H_image_to_0)).
    """
    product = functools.partial(np.einsum, "...ij,...jk->...ik")  # Without BLAS
    return normalize(functools.reduce(product, homographies))


def inverse(H: np.ndarray) -> np.ndarray:
    """Invert homographies (..., 3, 3) by the adjugate. Singular matrices raise no error."""
    # The cross products of the columns of H are the rows of its adjugate.
    a, b, c = np.moveaxis(H, -1, 0)
    return normalize(np.stack([np.cross(b, c), np.cross(c, a), np.cross(a, b)], axis=-2))


def normalize(H: np.ndarray) -> np.ndarray:
    """Scale homographies (..., 3, 3) float64 to a lower right entry of 1, unless it is 0."""
    # A homography has no scale of its own. If the entry is 0, the origin lies on the horizon.
    scale = H[..., 2:, 2:]
    return H / np.where(np.abs(scale) > TINY, scale, 1.0)


def through_four_points(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Compute the homography (3, 3) float64 through four correspondences, (4, 2) each."""
    return compose(_map_unit_square(target), inverse(_map_unit_square(source)))


def _map_unit_square(quad: np.ndarray) -> np.ndarray:
    """Compute the homography that maps the unit square to a quadrilateral (Heckbert 1989, 2.2.3).

    Args:
        quad: (4, 2), the images of (0, 0), (1, 0), (1, 1) and (0, 1).
    """
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


def compute_jacobians(H: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Compute the derivatives (N, 2, 2) of a homography H (3, 3) at points (N, 2)."""
    mapped = transform(points, H)
    depth = points[:, 0] * H[2, 0] + points[:, 1] * H[2, 1] + H[2, 2]
    # The derivative of the quotient is (first rows - mapped point * last row) / depth.
    return (H[None, :2, :2] - mapped[:, :, None] * H[None, None, 2, :2]) / depth[:, None, None]


def compute_mirrored_fraction(maps: np.ndarray) -> float:
    """Return which fraction, from 0 to 1, of the local maps (K, 2, 2) mirror the image.

    A real view of a surface never mirrors it. If most maps do, the matched details are symmetric,
    so the matches are wrong.
    """
    # The sign of the determinant is negative if a map mirrors.
    areas = maps[:, 0, 0] * maps[:, 1, 1] - maps[:, 0, 1] * maps[:, 1, 0]
    return np.count_nonzero(areas < 0) / max(len(maps), 1)


def map_to_resized(before: Tuple[float, float], after: Tuple[float, float]) -> np.ndarray:
    """Return the map (3, 3) from pixels of an image to pixels of its copy by `cv2.resize`.

    Args:
        before: (width, height) of the image in px.
        after: (width, height) of the resized image in px.
    """
    # Pixel centers have whole coordinates, so the corner of an image is at -0.5.
    sx = after[0] / before[0]
    sy = after[1] / before[1]
    return np.array([[sx, 0, (sx - 1) / 2], [0, sy, (sy - 1) / 2], [0, 0, 1.0]])


def compute_reduction_factor(size: Size, longer: int = REFERENCE_PX) -> float:
    """Compute how many times larger than the reduced image an image is, 1 or more.

    Args:
        size: (width, height) of the image in px.
        longer: longer side of the reduced image in px. If it is 0, or the image is smaller, the
            image is not reduced.
    """
    return max(1.0, max(size) / longer) if longer else 1.0


def compute_reduced_size(size: Size, factor: float) -> Size:
    """Return the size in whole pixels, at least 1, of an image of `size` reduced by `factor`."""
    return max(1, round(size[0] / factor)), max(1, round(size[1] / factor))


def get_corners(size: Size) -> np.ndarray:
    """Return the centers of the corner pixels of an image of `size` (width, height).

    Returns:
        (4, 2) float64, clockwise from the first pixel.
    """
    right = size[0] - 1
    bottom = size[1] - 1
    return np.array([[0, 0], [right, 0], [right, bottom], [0, bottom]], dtype=np.float64)


def compute_corner_error(
    H_estimated: Optional[np.ndarray], H_true: np.ndarray, size: Size
) -> float:
    """Compute the mean distance in px of image 0's corners mapped by both homographies.

    SuperGlue, section 5.1, measures homographies by this error.

    Args:
        H_estimated: (3, 3), or None, which gives inf.
        H_true: (3, 3).
        size: (width, height) of image 0 in px.
    """
    if H_estimated is None:
        return math.inf
    points = get_corners(size)
    errors = transform(points, H_estimated) - transform(points, H_true)
    error = float(np.linalg.norm(errors, axis=-1).mean())
    return error if math.isfinite(error) else math.inf


def is_supported(
    inliers: np.ndarray, limit_px: float, size: Size, sample: int, is_line: bool
) -> bool:
    """Return whether most matches agree with a model, and more than by chance.

    Where a pattern repeats, matches of different repetitions contradict each other. Each of many
    models then has some of the matches as inliers, which is no chance. So most matches must agree.

    Args:
        inliers: (K,) bool.
        limit_px: maximum distance of an inlier in image 1.
        size: (width, height) of image 1 in px.
        sample: number of matches that determine a model.
        is_line: whether the distance is from an epipolar line, or else from a mapped point.
    """
    # A wrong match lies anywhere in image 1 with equal probability. It is an inlier in a band along
    # its line, which is at most a diagonal long, or in a disk around its mapped point.
    area = 2 * limit_px * math.hypot(*size) if is_line else math.pi * limit_px**2
    chance = min(area / (size[0] * size[1]), 0.5)
    count = int(inliers.sum())
    if compute_significance(len(inliers), count, chance, sample) < SUPPORTED_DIGITS:
        return False
    return count >= SUPPORTED_PART * len(inliers)


def compute_significance(count: int, inliers: int, chance: float, sample: int) -> float:
    """Compute the significance s of a number of inliers.

    If all matches were wrong, at most one of 10^s pairs would have a model with this many inliers
    (a contrario; Moisan and Stival 2004). Chernoff's inequality bounds the tail of the binomial
    distribution.

    Args:
        count: number of matches.
        inliers: number of matches that agree with the model.
        chance: probability that a wrong match is an inlier.
        sample: number of matches that determine a model.

    Returns:
        The significance s, 0 or more.
    """
    # The matches of the sample always agree with the model.
    tested = count - sample
    ratio = (inliers - sample) / max(tested, 1)
    if ratio <= chance:
        return 0.0
    # Chernoff's bound on one model is the relative entropy of both probabilities.
    nats = ratio * math.log(ratio / chance)
    if ratio < 1:
        nats += (1 - ratio) * math.log((1 - ratio) / (1 - chance))
    # Each choice of a sample could have given a model. This is the log of their number.
    choices = math.lgamma(count + 1) - math.lgamma(sample + 1) - math.lgamma(tested + 1)
    return max(0.0, tested * nats - choices) / math.log(10)


def fit_homography(
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float = 3.0,
    deviations: Optional[np.ndarray] = None,
    factor: float = 1.0,
) -> Tuple[Optional[np.ndarray], np.ndarray]:
    """Fit a homography by `fit_ransac`, and find its inliers.

    Args:
        points0, points1: (K, 2) px, positions of the matches.
        threshold_px: maximum distance in image 1 of an inlier from where the model maps it.
        deviations: (K,) px of refined matches, see `refine_homography`.
        factor: multiplies all limits, also `threshold_px`.

    Returns:
        The homography (3, 3), or None as from `fit_ransac`, and the inliers (K,) bool.

    Example:
        >>> points0 = np.array([[0.0, 0], [90, 10], [80, 70], [5, 60], [40, 30], [20, 50]])
        >>> points1 = 2 * points0 + [10, 20]
        >>> points1[5] += 50  # a wrong match
        >>> H, inliers = fit_homography(points0, points1)
        >>> inliers.tolist()
        [True, True, True, True, True, False]
        >>> bool(np.allclose(H, [[2, 0, 10], [0, 2, 20], [0, 0, 1]], atol=1e-3))
        True
    """
    H = fit_ransac(points0, points1, threshold_px, deviations=deviations, factor=factor)
    if H is None:
        return None, np.zeros(len(points0), bool)
    return H, _find_inliers(H, points0, points1, threshold_px * factor)


def fit_ransac(
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float = 3.0,
    iterations: int = 3000,
    seed: int = 0,
    deviations: Optional[np.ndarray] = None,
    factor: float = 1.0,
) -> Optional[np.ndarray]:
    """Fit a robust homography 0 -> 1 by RANSAC, then by `refine_homography`.

    The method is that of Hartley and Zisserman, 4.6. This uses OpenCV's USAC framework with uniform
    samples of four. Models are scored by truncated squared error (MSAC; Torr and Zisserman 2000)
    instead of inlier counts, and bad models are dropped early (SPRT; Matas and Chum 2005).
    docs/evaluation.md compares it with other methods.

    Args:
        points0, points1: (N, 2) px, positions of the matches, which OpenCV reads as float32.
        threshold_px: maximum distance of an inlier in image 1.
        iterations: maximum number of samples.
        seed: seed of the samples.
        deviations: (N,) px of refined matches, see `refine_homography`.
        factor: multiplies all limits, also `threshold_px`.

    Returns:
        (3, 3) float64. It is None for fewer than four matches, if OpenCV finds no model, and for a
        mirror image.
    """
    if len(points0) < MIN_POINTS:
        return None
    params = cv2.UsacParams()
    params.sampler = cv2.SAMPLING_UNIFORM
    params.score = cv2.SCORE_METHOD_MSAC
    params.loMethod = cv2.LOCAL_OPTIM_NULL
    params.isParallel = False
    params.threshold = threshold_px * factor
    params.confidence = CONFIDENCE
    params.maxIterations = iterations
    params.randomGeneratorState = seed
    H = cv2.findHomography(points0, points1, params)[0]
    if H is None:
        return None
    # Fit the model of the best sample to all of its inliers.
    H = refine_homography(H, points0, points1, threshold_px, deviations, factor)
    inliers = points0[_find_inliers(H, points0, points1, threshold_px * factor)]
    return None if compute_mirrored_fraction(compute_jacobians(H, inliers)) > 0.5 else H


def refine_homography(
    H: np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float,
    deviations: Optional[np.ndarray] = None,
    factor: float = 1.0,
) -> np.ndarray:
    """Minimize the Cauchy loss of the distances, in image 1, of the matches near H (3, 3).

    The loss is robust, since true matches scatter by a few tenths of a pixel, and large keypoints
    by several pixels.

    Args:
        H: (3, 3), a homography near the solution.
        points0, points1: (N, 2) px, positions of the matches.
        threshold_px: only matches within this distance of H count.
        deviations: (N,) px along each axis from `refinement.refine`. Distances are divided by them.
            Where they are NaN, or without them, the deviation is SCATTER_PX. The scene's deviation
            from a plane is added to them in quadrature. A first fit measures it by the median
            distance of refined matches.
        factor: multiplies `threshold_px` and SCATTER_PX.

    Returns:
        (3, 3) float64.
    """
    inlier_mask = _find_inliers(H, points0, points1, threshold_px * factor)
    if inlier_mask.sum() < MIN_POINTS:
        return H
    p0, p1 = (np.asarray(points, np.float64)[inlier_mask] for points in (points0, points1))
    scatter_px = SCATTER_PX * factor
    if deviations is None:
        return _minimize(H, p0, p1, np.ones(len(p0)), scatter_px)
    deviations = np.asarray(deviations, np.float64)[inlier_mask]

    def weigh(model_px: float) -> np.ndarray:
        return np.nan_to_num(scatter_px / np.hypot(deviations, model_px), nan=1.0)

    # Fit first with a guess of the scene's deviation from a plane.
    H = _minimize(H, p0, p1, weigh(MODEL_GUESS * scatter_px), scatter_px)
    is_refined = np.isfinite(deviations)
    if is_refined.sum() < MIN_POINTS:
        return H
    # Fit again with the deviation that the first fit measures.
    scatter = MAD_TO_DEVIATION * float(np.median(np.abs(transform(p0, H) - p1)[is_refined]))
    limits = np.multiply(MODEL_LIMITS, scatter_px)
    model_px = float(np.clip(MODEL_SCATTER * scatter, *limits))
    return _minimize(H, p0, p1, weigh(model_px), scatter_px)


def _minimize(
    H: np.ndarray, p0: np.ndarray, p1: np.ndarray, weights: np.ndarray, scatter_px: float
) -> np.ndarray:
    """Find the homography near H of least Cauchy loss of distances times `weights` (N,)."""
    from scipy.optimize import least_squares  # Imported here, since this takes 0.3 s

    # (N,) -> (2 N,), one weight for x and for y
    weights = np.repeat(weights, 2)

    def complete(entries: np.ndarray) -> np.ndarray:
        return np.append(entries, 1.0).reshape(3, 3)

    def distances(entries: np.ndarray) -> np.ndarray:
        return (transform(p0, complete(entries)) - p1).ravel() * weights

    def derivatives(entries: np.ndarray) -> np.ndarray:
        return _differentiate_by_entries(complete(entries), p0) * weights[:, None]

    solution = least_squares(
        distances,
        normalize(H).ravel()[:8],
        derivatives,  # pyright: ignore  # scipy's stubs take no function here
        x_scale="jac",
        loss="cauchy",
        f_scale=scatter_px,
        ftol=1e-4,
    )
    return complete(solution.x)


def _differentiate_by_entries(H: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Compute the derivatives (2 N, 8) of mapped points (N, 2) by the first eight entries of H."""
    mapped = transform(points, H)
    depth = points @ H[2, :2] + H[2, 2]
    # The derivative is (x, y, 1) / depth for the first two rows. For the last row, this is
    # multiplied by the negative mapped point.
    linear = to_homogeneous(points) / depth[:, None]
    derivatives = np.zeros((len(points), 2, 8))
    derivatives[:, 0, :3] = derivatives[:, 1, 3:6] = linear
    derivatives[:, :, 6:] = -mapped[:, :, None] * linear[:, None, :2]
    # (N, 2, 8) -> (2 N, 8), in the order of the distances
    return derivatives.reshape(-1, 8)


def _find_inliers(
    H: np.ndarray, points0: np.ndarray, points1: np.ndarray, threshold_px: float
) -> np.ndarray:
    """Find the matches that H maps to within `threshold_px` in image 1; return (N,) bool."""
    with np.errstate(all="ignore"):
        return np.linalg.norm(transform(points0, H) - points1, axis=1) <= threshold_px


def fit_fundamental(
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float = 3.0,
    factors: Tuple[float, float] = (1.0, 1.0),
) -> Tuple[Optional[np.ndarray], np.ndarray]:
    """Fit a fundamental matrix F, x1^T F x0 = 0, by OpenCV's MAGSAC++.

    Equal matches give equal bytes.

    Args:
        points0, points1: (K, 2) px, positions of the matches.
        threshold_px: maximum distance of an inlier from its epipolar lines.
        factors: multiply the threshold, one for each image.

    Returns:
        F (3, 3), and the inliers (K,) bool. F is None for fewer than eight matches, and where
        OpenCV fails on degenerate matches.

    Example:
        >>> points0 = np.random.default_rng(0).uniform(0, 500, (50, 2))
        >>> depths = np.linspace(1, 5, 50)
        >>> points1 = points0 + np.column_stack([100 / depths, np.zeros(50)])  # a step to the left
        >>> F, inliers = fit_fundamental(points0, points1)
        >>> bool(compute_epipolar_distances(F, points0, points1).max() < 0.1), int(inliers.sum())
        (True, 50)
    """
    no_fit = None, np.zeros(len(points0), bool)
    if len(points0) < MIN_FUNDAMENTAL:
        return no_fit
    # OpenCV has one threshold for both images, so positions are divided instead.
    factor0, factor1 = factors
    try:
        F, mask = cv2.findFundamentalMat(
            points0 / factor0, points1 / factor1, cv2.USAC_MAGSAC, threshold_px, 0.999, 3000
        )
    except cv2.error:  # OpenCV raises "!model.empty()" if no sample gives a model
        return no_fit
    if F is None:
        return no_fit
    to_unit0, to_unit1 = (np.diag([1 / factor, 1 / factor, 1.0]) for factor in factors)
    return to_unit1 @ F @ to_unit0, mask.ravel() > 0


def compute_essential_matrix(R: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return the essential matrix [t]x R (3, 3) of a motion: R (3, 3), t (3,)."""
    x, y, z = t
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ R


def compute_epipolar_distances(
    F: np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    factors: Tuple[float, float] = (1.0, 1.0),
) -> np.ndarray:
    """Compute the distances of matched points from their epipolar lines.

    Args:
        F: (3, 3), x1^T F x0 = 0.
        points0, points1: (K, 2) px.
        factors: divide the distances, one for each image.

    Returns:
        (K,) px, the larger distance of both images.
    """
    homogeneous0, homogeneous1 = map(to_homogeneous, (points0, points1))
    # Epipolar lines (K, 3): of points0 in image 1, and of points1 in image 0
    lines1 = homogeneous0 @ F.T
    lines0 = homogeneous1 @ F
    # A distance is |x1^T F x0| over the length of the line's normal.
    products = np.abs((homogeneous1 * lines1).sum(axis=1))
    normals0 = np.hypot(lines0[:, 0], lines0[:, 1]) * factors[0]
    normals1 = np.hypot(lines1[:, 0], lines1[:, 1]) * factors[1]
    return products / np.maximum(np.minimum(normals0, normals1), 1e-12)


def to_homogeneous(points: np.ndarray) -> np.ndarray:
    """Return (K, 3) from points (K, 2), with a last entry of 1."""
    return np.column_stack([points, np.ones(len(points))])
