"""Compute and fit maps between the points of two images.

These are homographies, fundamental matrices, relative poses, and local affine maps around matches.

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
from typing import Any, Iterator, NamedTuple, Optional, Tuple

import cv2
import numpy as np

from superglue_sift.errors import import_extra, warn_deprecated

Size = Tuple[int, int]  # (width, height) of an image in px

TINY = np.finfo(np.float64).tiny
REFERENCE_PX = 1024  # longer side of an image at which lengths in pixels were chosen
MIN_POINTS = 4  # a homography has eight degrees of freedom, two per point
CONFIDENCE = 0.995  # RANSAC stops early at this confidence, the default of findHomography
# Scatter of true matches: the best value from 0.25 to 2 px on validation pairs, for every matcher
SCATTER_PX = 0.5
# The error of the model is added to the deviation of refined matches, since real planes and lenses
# are not ideal. Homographies then measure it: it is MODEL_SCATTER times the scatter of the
# distances, within MODEL_LIMITS_PX.
MIN_DEVIATION_PX = 0.25
MODEL_SCATTER = 1.5
MODEL_LIMITS_PX = (0.05, 0.5)
MAD_TO_DEVIATION = 1.4826  # deviation over median distance, for a normal distribution
# Image 1 is a mirror image if more than this many times the inliers fit after it is mirrored.
MIRRORED = 2.0
MIN_FUNDAMENTAL = 8  # minimum number of matches for a fundamental matrix
FUNDAMENTAL_SAMPLE = 7  # number of matches that determine a fundamental matrix
# A model is supported if at least this part of the matches are inliers, and if wrong matches alone
# have so many inliers in at most one of 1,000 pairs.
SUPPORTED_PART = 0.5
SUPPORTED_DIGITS = 3.0
# Local maps
NEIGHBOURS = 10  # a map is fitted to so many matches
NEAR_PX = 30.0  # a neighbour at this distance has half the weight
PRIOR_PX = 5.0  # neighbours that scatter by this weigh as much as the map of all
GEOMETRY_PX = 3.0  # maximum distance of an inlier of the geometry
PLANAR = 0.6  # a homography's derivatives are used if at least this part are inliers
MIN_AGREEING = 6  # with fewer inliers, maps come from scale and angle
# Relative poses
MIN_ESSENTIAL = 5  # minimum number of matches for an essential matrix
# Distance of an inlier, in pixels of images of about 1,000 px. From 0.3 to 0.8 poses are equally
# exact, refined or not; from 1 px on they are less exact.
POSE_PX = 0.6
# A match lies on its epipolar line up to this many standard deviations, of at least MIN_NOISE_PX.
NOISE_DEVIATIONS = 3.0
MIN_NOISE_PX = 0.02
ROTATION_ROUNDS = 30  # a rotation is fitted so many times, with weights from the last fit


def transform(points, H):
    """Map points (..., N, 2) through homographies (..., 3, 3), arrays or tensors, to (..., N, 2).

    Points on the horizon line become inf or nan, without an error.

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
    product = functools.partial(np.einsum, "...ij,...jk->...ik")  # without BLAS
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
    return compose(_of_unit_square(target), inverse(_of_unit_square(source)))


def _of_unit_square(quad: np.ndarray) -> np.ndarray:
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


def mirrored_part(maps: np.ndarray) -> float:
    """Return the part of the local maps (K, 2, 2) that reverse orientation.

    No view of a surface does this. Where most maps do, only details that are symmetric themselves
    were matched.
    """
    # The sign of the determinant is negative if a map mirrors.
    areas = maps[:, 0, 0] * maps[:, 1, 1] - maps[:, 0, 1] * maps[:, 1, 0]
    return np.count_nonzero(areas < 0) / max(len(maps), 1)


def map_to_resized(before: Tuple[float, float], after: Tuple[float, float]) -> np.ndarray:
    """Return the map (3, 3) of pixel coordinates when `cv2.resize` changes the (width, height).

    Args:
        before, after: (width, height) of both images in px.
    """
    # Pixel centres have whole coordinates, so corners of the image are at -0.5.
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
    """Return the centres of the corner pixels of an image (width, height).

    They are (4, 2) float64, clockwise.
    """
    w, h = size
    return np.array([[0, 0], [w - 1, 0], [w - 1, h - 1], [0, h - 1]], dtype=np.float64)


def corner_error(H_estimated: Optional[np.ndarray], H_true: np.ndarray, size: Size) -> float:
    """Compute the mean distance in px of image 0's corners mapped by both homographies.

    SuperGlue, section 5.1, measures homographies by this error. It is inf without an estimate.
    """
    if H_estimated is None:
        return math.inf
    points = corners(size)
    apart = transform(points, H_estimated) - transform(points, H_true)
    error = float(np.linalg.norm(apart, axis=-1).mean())
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

    def __getitem__(self, index: int) -> Any:
        """Return the model (0) or the inliers (1). Indexing a fit is deprecated."""
        warn_deprecated("a Fit is not a tuple any more", ".model and .inliers")
        return (self.model, self.inliers)[index]

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
    """Compute by how many decimal digits `inliers` of `count` matches are too many for chance.

    If all matches are wrong, some choice of `sample` matches has so many inliers in one of 10^s
    pairs (a contrario; Moisan and Stival 2004). Chernoff's inequality bounds the tail of the
    binomial distribution. The result s is at least 0.

    Args:
        chance: probability that a wrong match is an inlier.
        sample: number of matches that determine a model.
    """
    rest = count - sample
    part = (inliers - sample) / max(rest, 1)
    if part <= chance:
        return 0.0
    # Chernoff's bound on one model is the relative entropy of both probabilities.
    nats = part * math.log(part / chance)
    if part < 1:
        nats += (1 - part) * math.log((1 - part) / (1 - chance))
    # Each choice of a sample could have given a model. This is the log of their number.
    choices = math.lgamma(count + 1) - math.lgamma(sample + 1) - math.lgamma(rest + 1)
    return max(0.0, rest * nats - choices) / math.log(10)


def fit_homography(
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float = 3.0,
    deviations: Optional[np.ndarray] = None,
) -> Fit:
    """Fit a homography by `fit_ransac`, and find its inliers.

    Args:
        points0, points1: (K, 2) matched pixels.
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
    none = Fit(None, np.zeros(len(points0), bool))
    H = fit_ransac(points0, points1, threshold_px, deviations=deviations)
    if H is None:
        return none
    fit = Fit(H, _within(H, points0, points1, threshold_px))
    # Where most matches fit, no mirror image can fit twice as many.
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
    """Fit a robust homography 0 -> 1 by RANSAC, then by `refine_homography`.

    The method is that of Hartley and Zisserman, 4.6. This uses OpenCV's USAC framework with uniform
    samples of four. Models are scored by truncated squared error (MSAC; Torr and Zisserman 2000)
    instead of inlier counts, and bad models are dropped early (SPRT; Matas and Chum 2005).
    docs/evaluation.md compares it with other methods.

    Args:
        points0, points1: (N, 2) matched pixels, which OpenCV reads as float32.
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

    Args:
        points0, points1: (N, 2), of which the matches within `threshold_px` of H count.
        deviations: (N,) px along each axis from `refinement.refine`. Distances are divided by them.
            Where they are NaN, or without them, the deviation is SCATTER_PX. The scene's deviation
            from a plane is added to them in quadrature. A first fit measures it by the median
            distance of refined matches.
    """
    inliers = _within(H, points0, points1, threshold_px)
    if inliers.sum() < MIN_POINTS:
        return H
    p0, p1 = (np.asarray(points, np.float64)[inliers] for points in (points0, points1))
    if deviations is None:
        return _minimize(H, p0, p1, np.ones(len(p0)))
    deviations = np.asarray(deviations, np.float64)[inliers]
    # Fit first with a guess of the scene's deviation from a plane.
    H = _minimize(H, p0, p1, weights_of(deviations))
    refined = np.isfinite(deviations)
    if refined.sum() < MIN_POINTS:
        return H
    # Fit again with the deviation that the first fit measures.
    scatter = MAD_TO_DEVIATION * float(np.median(np.abs(transform(p0, H) - p1)[refined]))
    model_px = float(np.clip(MODEL_SCATTER * scatter, *MODEL_LIMITS_PX))
    return _minimize(H, p0, p1, weights_of(deviations, model_px))


def weights_of(deviations: np.ndarray, added_px: float = MIN_DEVIATION_PX) -> np.ndarray:
    """Compute the weights (N,) of distances from the deviations (N,) px of matches.

    A match whose deviation is NaN has the weight 1.

    Args:
        added_px: a further deviation, which is added in quadrature.
    """
    return np.nan_to_num(SCATTER_PX / np.hypot(deviations, added_px), nan=1.0)


def _minimize(H: np.ndarray, p0: np.ndarray, p1: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Find the homography near H that minimizes the Cauchy loss of distances with weights (N,)."""
    from scipy.optimize import least_squares  # imported here, since this takes 0.3 s

    # (N,) -> (2 N,), one weight for x and for y
    both = np.repeat(weights, 2)

    def complete(entries: np.ndarray) -> np.ndarray:
        return np.append(entries, 1.0).reshape(3, 3)

    def distances(entries: np.ndarray) -> np.ndarray:
        return (transform(p0, complete(entries)) - p1).ravel() * both

    def derivatives(entries: np.ndarray) -> np.ndarray:
        return _derivatives_by_entries(complete(entries), p0) * both[:, None]

    solution = least_squares(
        distances,
        normalize(H).ravel()[:8],
        derivatives,  # pyright: ignore  # scipy's stubs know only names
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


def _within(
    H: np.ndarray, points0: np.ndarray, points1: np.ndarray, threshold_px: float
) -> np.ndarray:
    """Find the matches that H maps to within `threshold_px` in image 1; return (N,) bool."""
    with np.errstate(all="ignore"):
        return np.linalg.norm(transform(points0, H) - points1, axis=1) <= threshold_px


def fit_fundamental(points0: np.ndarray, points1: np.ndarray, threshold_px: float = 3.0) -> Fit:
    """Fit a fundamental matrix F, x1^T F x0 = 0, by OpenCV's MAGSAC++.

    Equal matches give equal bytes.

    Args:
        points0, points1: (K, 2) matched pixels.
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
    none = Fit(None, np.zeros(len(points0), bool))
    if len(points0) < MIN_FUNDAMENTAL:
        return none
    try:
        F, mask = cv2.findFundamentalMat(
            points0, points1, cv2.USAC_MAGSAC, threshold_px, 0.999, 3000
        )
    except cv2.error:  # OpenCV raises "!model.empty()" if no sample gives a model
        return none
    return none if F is None else Fit(F, mask.ravel() > 0)


def epipolar_distances(F: np.ndarray, points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """Compute the distances of matched points (K, 2) from their epipolar lines.

    Returns:
        (K,) px, the larger distance of both images.
    """
    homogeneous0, homogeneous1 = map(to_homogeneous, (points0, points1))
    # (K, 3) lines in image 1, and in image 0
    lines1 = homogeneous0 @ F.T
    lines0 = homogeneous1 @ F
    # A distance is |x1^T F x0| over the length of the line's normal.
    product = np.abs((homogeneous1 * lines1).sum(axis=1))
    shorter = np.minimum(*(np.hypot(lines[:, 0], lines[:, 1]) for lines in (lines0, lines1)))
    return product / np.maximum(shorter, 1e-12)


def to_homogeneous(points: np.ndarray) -> np.ndarray:
    """Return (K, 3) from points (K, 2), with a last entry of 1."""
    return np.column_stack([points, np.ones(len(points))])


class Pose(NamedTuple):
    """Pose of camera 1 relative to camera 0: x1 = R x0 + s t. The scale s is not known.

    If t is None and R is not, the matches show no parallax: a camera that only rotates explains
    them, so the direction in which it moved cannot be known, and no depth either.

    Attributes:
        R: (3, 3) rotation, or None.
        t: (3,) of length 1, or None.
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
    threshold_px: float = POSE_PX,
) -> Pose:
    """Estimate the relative pose of two cameras from matched pixels.

    The method is PoseLib's LO-RANSAC (Larsson, 2020), which is deterministic and ends with a fit to
    all inliers. Any direction t fits the matches of identical images, or of a camera that only
    rotates. So t is None if a rotation explains most inliers, and if the other matches agree with t
    no better than by chance (`significance`).

    Args:
        points0, points1: (K, 2) px.
        K0, K1: (3, 3) known intrinsics in px.
        threshold_px: maximum distance of an inlier, in pixels of the mean focal length.

    Returns:
        The pose. R and t are None for fewer than five matches or inliers. Without parallax, t alone
        is None, and the inliers are the matches that R explains.

    Raises:
        RequestError: PoseLib is not installed.
    """
    poselib = import_extra("poselib", "pose")
    K0, K1 = (np.asarray(K, np.float64) for K in (K0, K1))
    none = Pose(None, None, np.zeros(len(points0), bool))
    if len(points0) < MIN_ESSENTIAL:
        return none
    # PoseLib models square pixels. So the points of both cameras are moved to one camera that has
    # square pixels and the mean focal length.
    focal = float(np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]]))
    camera = {"model": "SIMPLE_PINHOLE", "width": 1, "height": 1, "params": [focal, 0, 0]}
    pixels0, pixels1 = (
        transform(np.asarray(points, np.float64), inverse(K)) * focal
        for points, K in ((points0, K0), (points1, K1))
    )
    options = {"max_epipolar_error": threshold_px}
    estimate, statistics = poselib.estimate_relative_pose(pixels0, pixels1, camera, camera, options)
    if statistics["num_inliers"] < MIN_ESSENTIAL:
        return none
    t = estimate.t / np.linalg.norm(estimate.t)
    pose = Pose(np.array(estimate.R), t, np.array(statistics["inliers"], bool))
    rotation = _explain_by_rotation(pose, pixels0, pixels1, focal, threshold_px)
    return pose if rotation is None else rotation


def _explain_by_rotation(
    pose: Pose, pixels0: np.ndarray, pixels1: np.ndarray, focal: float, threshold_px: float
) -> Optional[Pose]:
    """Return a pose without t if the matches show no parallax, else None.

    Args:
        pose: the pose that PoseLib found. pixels0, pixels1: (K, 2) px from the principal points of
            two cameras with the same focal length. threshold_px: as for `relative_pose`.
    """
    assert pose.R is not None and pose.t is not None
    rays0, rays1 = (to_homogeneous(pixels / focal) for pixels in (pixels0, pixels1))
    # Distances in image 1 from the epipolar lines, whose matrix is E = [t]x R
    lines = np.cross(pose.t, rays0 @ pose.R.T)
    from_line = np.abs((rays1 * lines).sum(axis=1)) / np.hypot(lines[:, 0], lines[:, 1]) * focal
    # Distances in image 1 from where the rotation sends a point. Behind the camera it is inf.
    R = _fit_rotation(rays0[pose.inliers], rays1[pose.inliers], threshold_px / focal)
    sent = rays0 @ R.T
    with np.errstate(divide="ignore", invalid="ignore"):
        shift = np.linalg.norm(sent[:, :2] / sent[:, 2:] - rays1[:, :2], axis=1) * focal
    shift = np.where(sent[:, 2] > 0, shift, np.inf)
    # The scatter of the inliers. Five degrees of freedom of E are fitted to it.
    count = int(pose.inliers.sum())
    scatter = MAD_TO_DEVIATION * float(np.median(from_line[pose.inliers]))
    scatter *= math.sqrt(count / max(count - MIN_ESSENTIAL, 1))
    noise = NOISE_DEVIATIONS * max(scatter, MIN_NOISE_PX)
    # PoseLib's distance is in both images, and so shorter by the square root of 2.
    explained = shift <= max(noise, 2 * math.sqrt(2) * threshold_px)
    if explained[pose.inliers].mean() <= SUPPORTED_PART:
        return None
    # Matches that moved without parallax moved in any direction. By chance, few of them moved along
    # their epipolar lines.
    moved = shift > noise
    if moved.any():
        along = 2 / math.pi * np.arcsin(noise / shift[moved])
        agreeing = int((from_line[moved] <= noise).sum())
        digits = significance(int(moved.sum()), agreeing, float(along.mean()), MIN_ESSENTIAL)
        if digits >= SUPPORTED_DIGITS:
            return None
    return Pose(R, None, explained)


def _fit_rotation(rays0: np.ndarray, rays1: np.ndarray, scale: float) -> np.ndarray:
    """Fit the rotation 0 -> 1 (3, 3) to rays (n, 3), by the Cauchy loss of the angles between them.

    Args:
        scale: the angle in radians at which a ray has half the weight.
    """
    unit0, unit1 = (rays / np.linalg.norm(rays, axis=1, keepdims=True) for rays in (rays0, rays1))
    weights = np.ones(len(unit0))
    R = np.eye(3)
    for _ in range(ROTATION_ROUNDS):
        # Weighted least squares (Kabsch 1976)
        U, _, Vt = np.linalg.svd(unit1.T @ (unit0 * weights[:, None]))
        R = U @ np.diag([1.0, 1.0, np.linalg.det(U @ Vt)]) @ Vt
        angles = np.linalg.norm(unit1 - unit0 @ R.T, axis=1)
        weights = 1.0 / (1.0 + (angles / scale) ** 2)
    return R


def local_maps(points0: np.ndarray, points1: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    """Find local affine maps 0 -> 1 at K matches; return (K, 2, 2).

    Inliers of a homography that fits most matches get its derivative. Other matches get the
    least-squares affine map of the nearest inliers of one homography or epipolar geometry. Without
    a geometry all get `fallback`.

    Args:
        points0, points1: (K, 2) px. fallback: (K, 2, 2).
    """
    rounded = points0.astype(np.float32), points1.astype(np.float32)
    H, planar = fit_homography(*rounded, GEOMETRY_PX)
    agreeing = planar
    # Where a plane does not explain most matches, those that fit one camera motion count too.
    if planar.sum() < PLANAR * len(planar):
        agreeing = planar | fit_fundamental(*rounded, GEOMETRY_PX).inliers
    if agreeing.sum() < MIN_AGREEING:
        return fallback
    # On one plane the homography's own derivative is more exact than a fit to neighbours.
    maps = nearest_affine(points0, points1, agreeing)
    if H is not None and planar.sum() >= PLANAR * agreeing.sum():
        maps[planar] = jacobians(H, points0[planar])
    return maps


def nearest_affine(points0: np.ndarray, points1: np.ndarray, agreeing: np.ndarray) -> np.ndarray:
    """Fit affine maps 0 -> 1 at K matches to their nearest agreeing matches; return (K, 2, 2).

    Each map is regularized by one map of all agreeing matches.

    Args:
        points0, points1: (K, 2) px.
        agreeing: (K,) bool, the matches to which maps are fitted, two or more.
    """
    from scipy.spatial import KDTree

    agreeing0 = points0[agreeing]
    agreeing1 = points1[agreeing]
    count = min(NEIGHBOURS, len(agreeing0))
    distance, index = KDTree(agreeing0).query(points0, count)
    # Weights (K, n) of the neighbours, with sum 1
    weight = 1.0 / (NEAR_PX + distance)
    weight = weight / weight.sum(1, keepdims=True)
    # (K, n, 2) positions of the neighbours relative to their centre
    p, q = (
        points[index] - (weight[..., None] * points[index]).sum(1, keepdims=True)
        for points in (agreeing0, agreeing1)
    )
    # Solve the normal equations of each map, which is pulled towards the map of all matches.
    whole = np.linalg.lstsq(
        agreeing0 - agreeing0.mean(0), agreeing1 - agreeing1.mean(0), rcond=None
    )[0]
    normal = np.einsum("kn,kni,knj->kij", weight, p, p) + PRIOR_PX**2 * np.eye(2)
    right = np.einsum("kn,kni,knj->kij", weight, p, q) + PRIOR_PX**2 * whole
    return np.linalg.solve(normal, right).swapaxes(1, 2)
