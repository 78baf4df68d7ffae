"""Compute and fit maps between the points of two images.

These are homographies, fundamental matrices, and local affine maps around matches.

Points are in pixels, with x to the right and y down. The centre of the first pixel is (0, 0). The
functions that fit take points in any frame, and limits in the same frame. The defaults of limits
were chosen in images reduced to REFERENCE_PX (`map_to_reduced`).
H_a_to_b maps points of frame a to frame b: p_b ~ H_a_to_b @ p_a. Maps are computed element by
element, because the sums of matrix products and LAPACK's inverses depend on the processor.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Iterator, Optional, Tuple

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
# distances, within MODEL_LIMITS_PX.
MODEL_PX = 0.25  # First guess
MODEL_SCATTER = 1.5
MODEL_LIMITS_PX = (0.05, 0.5)
MAD_TO_DEVIATION = 1.4826  # Deviation over median distance, for a normal distribution
# Image 1 is a mirror image if more than this many times the inliers fit after it is mirrored.
MIRRORED = 2.0
MIN_FUNDAMENTAL = 8  # Minimum number of matches for a fundamental matrix
FUNDAMENTAL_SAMPLE = 7  # Number of matches that determine a fundamental matrix
# A model is supported if at least this part of the matches are inliers, and if wrong matches alone
# have so many inliers in at most one of 1,000 pairs.
SUPPORTED_PART = 0.5
SUPPORTED_DIGITS = 3.0
# Local maps
MAP_NEIGHBOURS = 10  # A map is fitted to so many matches
NEAR_PX = 30.0  # A neighbour at this distance has half the weight
PRIOR_PX = 5.0  # Neighbours that scatter by this weigh as much as the map of all
GEOMETRY_PX = 3.0  # Maximum distance of an inlier of the geometry
PLANAR = 0.6  # A homography's derivatives are used if at least this part are inliers
MIN_AGREEING = 6  # With fewer inliers, maps come from scale and angle


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


def jacobians(H: np.ndarray, points: np.ndarray) -> np.ndarray:
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
    """Return the map (3, 3) from pixels of an image to pixels of what `cv2.resize` makes of it.

    Args:
        before: (width, height) of the image in px.
        after: (width, height) of the resized image in px.
    """
    # Pixel centres have whole coordinates, so the corner of an image is at -0.5.
    sx = after[0] / before[0]
    sy = after[1] / before[1]
    return np.array([[sx, 0, (sx - 1) / 2], [0, sy, (sy - 1) / 2], [0, 0, 1.0]])


def map_to_reduced(size: Size, longer: int = REFERENCE_PX) -> np.ndarray:
    """Return the map (3, 3) from pixels of an image to pixels of the reduced image.

    Its first entry is the factor from lengths in the image to lengths in the reduced image.

    Args:
        size: (width, height) of the image in px.
        longer: longer side of the reduced image in px. A smaller image is not reduced.
    """
    factor = reduction_factor(size, longer)
    return map_to_resized((factor, factor), (1, 1))


def reduction_factor(size: Size, longer: int = REFERENCE_PX) -> float:
    """Compute how many times larger than the reduced image an image is, 1 or more.

    Args:
        size: (width, height) of the image in px.
        longer: longer side of the reduced image in px. If it is 0, or the image is smaller, the
            image is not reduced.
    """
    return max(1.0, max(size) / longer) if longer else 1.0


def reduced_size(size: Size, factor: float) -> Size:
    """Return the size in whole pixels, at least 1, of an image of `size` reduced by `factor`."""
    return max(1, round(size[0] / factor)), max(1, round(size[1] / factor))


def corners(size: Size) -> np.ndarray:
    """Return the centres of the corner pixels of an image of `size` (width, height).

    Returns:
        (4, 2) float64, clockwise from the first pixel.
    """
    right = size[0] - 1
    bottom = size[1] - 1
    return np.array([[0, 0], [right, 0], [right, bottom], [0, bottom]], dtype=np.float64)


def corner_error(H_estimated: Optional[np.ndarray], H_true: np.ndarray, size: Size) -> float:
    """Compute the mean distance in px of image 0's corners mapped by both homographies.

    SuperGlue, section 5.1, measures homographies by this error.

    Args:
        H_estimated: (3, 3), or None, which gives inf.
        H_true: (3, 3).
        size: (width, height) of image 0 in px.
    """
    if H_estimated is None:
        return math.inf
    points = corners(size)
    errors = transform(points, H_estimated) - transform(points, H_true)
    error = float(np.linalg.norm(errors, axis=-1).mean())
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True, eq=False)
class Fit:
    """A robust fit to K matches. `model, inliers = fit` takes it apart.

    Attributes:
        model: (3, 3) float64, or None.
        inliers: (K,) bool.
        significance: decimal digits, see the function `significance`.
    """

    model: Optional[np.ndarray]
    inliers: np.ndarray
    significance: float = 0.0

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.inliers))

    @property
    def supported(self) -> bool:
        """Say whether most matches agree with the model, and more than by chance.

        Where a pattern repeats, matches of different repetitions contradict each other. Each of
        many models then has some of the matches as inliers, which is no chance. So most matches
        must agree.
        """
        if self.model is None or self.significance < SUPPORTED_DIGITS:
            return False
        return float(self.inliers.mean()) >= SUPPORTED_PART


def significance(count: int, inliers: int, chance: float, sample: int) -> float:
    """Compute the digits s of the probability 10^-s that wrong matches have so many inliers.

    If all matches are wrong, some choice of `sample` matches has so many inliers in one of 10^s
    pairs (a contrario; Moisan and Stival 2004). Chernoff's inequality bounds the tail of the
    binomial distribution.

    Args:
        count: number of matches.
        inliers: number of matches that agree with the model.
        chance: probability that a wrong match is an inlier.
        sample: number of matches that determine a model.

    Returns:
        The number s, which is at least 0.
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
) -> Fit:
    """Fit a homography by `fit_ransac`, and find its inliers.

    Args:
        points0, points1: (K, 2) px, positions of the matches.
        threshold_px: maximum distance in image 1 of an inlier from where the model maps it.
        deviations: (K,) px of refined matches, see `refine_homography`.

    Returns:
        The fit. Its model is None for fewer than four matches, and if image 1 is a mirror image.
        OpenCV then finds a few matches that fit by chance, but more fit after image 1 is mirrored.

    Example:
        >>> points0 = np.array([[0.0, 0], [90, 10], [80, 70], [5, 60], [40, 30], [20, 50]])
        >>> points1 = 2 * points0 + [10, 20]
        >>> points1[5] += 50  # a wrong match
        >>> fit = fit_homography(points0, points1)
        >>> fit.inliers.tolist()
        [True, True, True, True, True, False]
        >>> bool(np.allclose(fit.model, [[2, 0, 10], [0, 2, 20], [0, 0, 1]], atol=1e-3))
        True
    """
    no_fit = Fit(None, np.zeros(len(points0), bool))
    H = fit_ransac(points0, points1, threshold_px, deviations=deviations)
    if H is None:
        return no_fit
    fit = Fit(H, _find_inliers(H, points0, points1, threshold_px))
    # Where most matches fit, no mirror image can fit twice as many.
    if 2 * fit.inliers.sum() > len(points0):
        return fit
    mirrored = points1 * np.array([-1, 1], points1.dtype)
    H = fit_ransac(points0, mirrored, threshold_px)
    count = 0 if H is None else _find_inliers(H, points0, mirrored, threshold_px).sum()
    return no_fit if count > MIRRORED * fit.inliers.sum() else fit


def fit_ransac(
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float = 3.0,
    iterations: int = 3000,
    seed: int = 0,
    deviations: Optional[np.ndarray] = None,
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
    params.threshold = threshold_px
    params.confidence = CONFIDENCE
    params.maxIterations = iterations
    params.randomGeneratorState = seed
    H = cv2.findHomography(points0, points1, params)[0]
    if H is None:
        return None
    # Fit the model of the best sample to all of its inliers.
    H = refine_homography(H, points0, points1, threshold_px, deviations)
    inliers = points0[_find_inliers(H, points0, points1, threshold_px)]
    return None if compute_mirrored_fraction(jacobians(H, inliers)) > 0.5 else H


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

    Args:
        H: (3, 3), a homography near the solution.
        points0, points1: (N, 2) px, positions of the matches.
        threshold_px: only matches within this distance of H count.
        deviations: (N,) px along each axis from `refinement.refine`. Distances are divided by them.
            Where they are NaN, or without them, the deviation is SCATTER_PX. The scene's deviation
            from a plane is added to them in quadrature. A first fit measures it by the median
            distance of refined matches.

    Returns:
        (3, 3) float64.
    """
    inlier_mask = _find_inliers(H, points0, points1, threshold_px)
    if inlier_mask.sum() < MIN_POINTS:
        return H
    p0, p1 = (np.asarray(points, np.float64)[inlier_mask] for points in (points0, points1))
    if deviations is None:
        return _minimize(H, p0, p1, np.ones(len(p0)))
    deviations = np.asarray(deviations, np.float64)[inlier_mask]
    # Fit first with a guess of the scene's deviation from a plane.
    H = _minimize(H, p0, p1, _weigh_distances(deviations))
    is_refined = np.isfinite(deviations)
    if is_refined.sum() < MIN_POINTS:
        return H
    # Fit again with the deviation that the first fit measures.
    scatter = MAD_TO_DEVIATION * float(np.median(np.abs(transform(p0, H) - p1)[is_refined]))
    model_px = float(np.clip(MODEL_SCATTER * scatter, *MODEL_LIMITS_PX))
    return _minimize(H, p0, p1, _weigh_distances(deviations, model_px))


def _weigh_distances(deviations: np.ndarray, model_px: float = MODEL_PX) -> np.ndarray:
    """Compute the weights (N,) of distances from the deviations (N,) px of matches.

    A match whose deviation is NaN has the weight 1.

    Args:
        model_px: deviation of the scene from a plane, which is added in quadrature.
    """
    return np.nan_to_num(SCATTER_PX / np.hypot(deviations, model_px), nan=1.0)


def _minimize(H: np.ndarray, p0: np.ndarray, p1: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Find the homography near H that minimizes the Cauchy loss of distances with weights (N,)."""
    from scipy.optimize import least_squares  # Imported here, since this takes 0.3 s

    # (N,) -> (2 N,), one weight for x and for y
    weights = np.repeat(weights, 2)

    def complete(entries: np.ndarray) -> np.ndarray:
        return np.append(entries, 1.0).reshape(3, 3)

    def distances(entries: np.ndarray) -> np.ndarray:
        return (transform(p0, complete(entries)) - p1).ravel() * weights

    def derivatives(entries: np.ndarray) -> np.ndarray:
        return _derivatives_by_entries(complete(entries), p0) * weights[:, None]

    solution = least_squares(
        distances,
        normalize(H).ravel()[:8],
        derivatives,  # pyright: ignore  # scipy's stubs take no function here
        x_scale="jac",
        loss="cauchy",
        f_scale=SCATTER_PX,
        ftol=1e-4,
    )
    return complete(solution.x)


def _derivatives_by_entries(H: np.ndarray, points: np.ndarray) -> np.ndarray:
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


def fit_fundamental(points0: np.ndarray, points1: np.ndarray, threshold_px: float = 3.0) -> Fit:
    """Fit a fundamental matrix F, x1^T F x0 = 0, by OpenCV's MAGSAC++.

    Equal matches give equal bytes.

    Args:
        points0, points1: (K, 2) px, positions of the matches.
        threshold_px: maximum distance of an inlier from its epipolar lines.

    Returns:
        The fit. Its model is None for fewer than eight matches, and where OpenCV fails on
        degenerate matches.

    Example:
        >>> points0 = np.random.default_rng(0).uniform(0, 500, (50, 2))
        >>> depths = np.linspace(1, 5, 50)
        >>> points1 = points0 + np.column_stack([100 / depths, np.zeros(50)])  # a step to the left
        >>> fit = fit_fundamental(points0, points1)
        >>> bool(epipolar_distances(fit.model, points0, points1).max() < 0.1)
        True
    """
    no_fit = Fit(None, np.zeros(len(points0), bool))
    if len(points0) < MIN_FUNDAMENTAL:
        return no_fit
    try:
        F, mask = cv2.findFundamentalMat(
            points0, points1, cv2.USAC_MAGSAC, threshold_px, 0.999, 3000
        )
    except cv2.error:  # OpenCV raises "!model.empty()" if no sample gives a model
        return no_fit
    return no_fit if F is None else Fit(F, mask.ravel() > 0)


def epipolar_distances(F: np.ndarray, points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """Compute the distances of matched points from their epipolar lines.

    Args:
        F: (3, 3), x1^T F x0 = 0.
        points0, points1: (K, 2) px.

    Returns:
        (K,) px, the larger distance of both images.
    """
    homogeneous0, homogeneous1 = map(to_homogeneous, (points0, points1))
    # Epipolar lines (K, 3): of points0 in image 1, and of points1 in image 0
    lines1 = homogeneous0 @ F.T
    lines0 = homogeneous1 @ F
    # A distance is |x1^T F x0| over the length of the line's normal.
    products = np.abs((homogeneous1 * lines1).sum(axis=1))
    shorter_normal = np.minimum(*(np.hypot(lines[:, 0], lines[:, 1]) for lines in (lines0, lines1)))
    return products / np.maximum(shorter_normal, 1e-12)


def to_homogeneous(points: np.ndarray) -> np.ndarray:
    """Return (K, 3) from points (K, 2), with a last entry of 1."""
    return np.column_stack([points, np.ones(len(points))])


def fit_local_maps(points0: np.ndarray, points1: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    """Fit local affine maps 0 -> 1 at K matches; return (K, 2, 2).

    Inliers of a homography that fits most matches get its derivative. Other matches get the
    least-squares affine map of the nearest inliers of one homography or epipolar geometry. Without
    a geometry all get `fallback`.

    Args:
        points0, points1: (K, 2) px of the images that are sampled by the maps.
        fallback: (K, 2, 2), the maps without a geometry.
    """
    rounded = points0.astype(np.float32), points1.astype(np.float32)
    H, is_planar = fit_homography(*rounded, GEOMETRY_PX)
    inlier_mask = is_planar
    # Where a plane does not explain most matches, those that fit one camera motion count too.
    if is_planar.sum() < PLANAR * len(is_planar):
        inlier_mask = is_planar | fit_fundamental(*rounded, GEOMETRY_PX).inliers
    if inlier_mask.sum() < MIN_AGREEING:
        return fallback
    # On one plane the derivative of the homography is more exact than a fit to neighbours.
    maps = fit_affine_maps(points0, points1, inlier_mask)
    if H is not None and is_planar.sum() >= PLANAR * inlier_mask.sum():
        maps[is_planar] = jacobians(H, points0[is_planar])
    return maps


def fit_affine_maps(
    points0: np.ndarray, points1: np.ndarray, inlier_mask: np.ndarray
) -> np.ndarray:
    """Fit affine maps 0 -> 1 at K matches to their nearest inliers; return (K, 2, 2).

    Each map is regularized by one map of all inliers.

    Args:
        points0, points1: (K, 2) px.
        inlier_mask: (K,) bool, the matches to which maps are fitted, two or more.
    """
    from scipy.spatial import KDTree

    inliers0 = points0[inlier_mask]
    inliers1 = points1[inlier_mask]
    count = min(MAP_NEIGHBOURS, len(inliers0))
    distances, index = KDTree(inliers0).query(points0, count)
    # Weights (K, n) of the neighbours, with sum 1
    weights = 1.0 / (NEAR_PX + distances)
    weights = weights / weights.sum(1, keepdims=True)
    # (K, n, 2) positions of the neighbours relative to their centre
    p, q = (
        points[index] - (weights[..., None] * points[index]).sum(1, keepdims=True)
        for points in (inliers0, inliers1)
    )
    # Solve the normal equations of each map, which is pulled towards the map of all inliers.
    global_map = np.linalg.lstsq(
        inliers0 - inliers0.mean(0), inliers1 - inliers1.mean(0), rcond=None
    )[0]
    normal = np.einsum("kn,kni,knj->kij", weights, p, p) + PRIOR_PX**2 * np.eye(2)
    right = np.einsum("kn,kni,knj->kij", weights, p, q) + PRIOR_PX**2 * global_map
    return np.linalg.solve(normal, right).swapaxes(1, 2)
