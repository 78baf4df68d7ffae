"""Points in two images: homographies, as maps of the plane and fitted to matches; fundamental
matrices; relative poses; local maps around matches.

Points are in pixels: x right, y down, centre of the first pixel at (0, 0). H_a_to_b maps points of
frame a to frame b: p_b ~ H_a_to_b @ p_a. Maps are computed element by element: the sums of matrix
products and LAPACK's inverses depend on the processor.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple, Optional, Tuple

import cv2
import numpy as np

from superglue_sift.errors import import_extra

Size = Tuple[int, int]  # of an image: (width, height)

TINY = np.finfo(np.float64).tiny
REFERENCE_PX = 1024  # longer side of an image at which lengths in pixels were chosen
MIN_POINTS = 4  # a homography has eight degrees of freedom, two per point
CONFIDENCE = 0.995  # at which RANSAC stops early; default of findHomography
# Scatter of true matches: the best of 0.25 to 2 on validation pairs, for every matcher
SCATTER_PX = 0.5
# The error of the model is added to the deviation of refined matches, since real planes and lenses
# are not ideal. Homographies then measure it: it is MODEL_SCATTER times the scatter of the
# distances, within MODEL_LIMITS_PX.
MIN_DEVIATION_PX = 0.25
MODEL_SCATTER = 1.5
MODEL_LIMITS_PX = (0.05, 0.5)
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
MIRRORED = 2.0  # times the inliers of a homography: if so many fit a mirror image, it is one
MIN_FUNDAMENTAL = 8  # matches for a fundamental matrix
SEVEN = 7  # degrees of freedom of a fundamental matrix, one per match
# A model is supported if at least this part of the matches are inliers, and if wrong matches have
# so many in one of 1,000 pairs at most
SUPPORTED_PART = 0.5
SUPPORTED_DIGITS = 3.0
# Local maps
NEIGHBOURS = 10  # matches to fit a map to
NEAR_PX = 30.0  # distance at which a neighbour has half the weight
PRIOR_PX = 5.0  # neighbours that scatter by this much weigh as much as the map of all
GEOMETRY_PX = 3.0  # inlier distance of the geometry
PLANAR = 0.6  # minimum fraction of inliers of a homography whose derivatives are used
MIN_AGREEING = 6  # inliers; with fewer, maps come from scale and angle
# Relative poses
MIN_ESSENTIAL = 5  # matches for an essential matrix
# Distance of an inlier, in pixels of images of about 1,000 px. From 0.3 to 0.8 poses are equally
# exact, refined or not; from 1 px on they are less exact.
POSE_PX = 0.6


def transform(points, H):
    """Map points (..., N, 2) through homographies (..., 3, 3), arrays or tensors, to (..., N, 2).

    Points on the horizon line become inf or nan, without an error.
    """
    x = points[..., :1]
    y = points[..., 1:]
    H = H[..., None, :, :]
    mapped = x * H[..., :2, 0] + y * H[..., :2, 1] + H[..., :2, 2]
    depth = x * H[..., 2:, 0] + y * H[..., 2:, 1] + H[..., 2:, 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        return mapped / depth


def compose(*homographies: np.ndarray) -> np.ndarray:
    """Chain homographies (..., 3, 3), the last applied first.

    H_0to1 = compose(H_image_to_1, inverse(H_image_to_0)).
    """
    product = functools.partial(np.einsum, "...ij,...jk->...ik")  # no BLAS
    return normalize(functools.reduce(product, homographies))


def inverse(H: np.ndarray) -> np.ndarray:
    """Inverse homographies (..., 3, 3), by the adjugate. Singular matrices raise no error."""
    a, b, c = np.moveaxis(H, -1, 0)
    return normalize(np.stack([np.cross(b, c), np.cross(c, a), np.cross(a, b)], axis=-2))


def normalize(H: np.ndarray) -> np.ndarray:
    """Scale homographies (..., 3, 3) float64 to a lower right entry of 1, unless it is 0."""
    scale = H[..., 2:, 2:]
    return H / np.where(np.abs(scale) > TINY, scale, 1.0)


def through_four_points(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Homography through four correspondences, (4, 2) each, in float64."""
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


def jacobians(H: np.ndarray, points: np.ndarray) -> np.ndarray:
    """(N, 2, 2) derivatives of a homography at points (N, 2)."""
    mapped = transform(points, H)
    depth = points[:, 0] * H[2, 0] + points[:, 1] * H[2, 1] + H[2, 2]
    return (H[None, :2, :2] - mapped[:, :, None] * H[None, None, 2, :2]) / depth[:, None, None]


def mirrored_part(maps: np.ndarray) -> float:
    """Part of the local maps (K, 2, 2) that reverse orientation, as no view of a surface does.

    Where most do, only details that are symmetric themselves were matched.
    """
    areas = maps[:, 0, 0] * maps[:, 1, 1] - maps[:, 0, 1] * maps[:, 1, 0]
    return np.count_nonzero(areas < 0) / max(len(maps), 1)


def resizing(before: Tuple[float, float], after: Tuple[float, float]) -> np.ndarray:
    """(3, 3) map of pixel coordinates under `cv2.resize` from one (width, height) to another."""
    sx = after[0] / before[0]
    sy = after[1] / before[1]
    return np.array([[sx, 0, (sx - 1) / 2], [0, sy, (sy - 1) / 2], [0, 0, 1.0]])


def unit_of(size: Tuple[float, float], side: int = REFERENCE_PX) -> float:
    """Length in px, in an image of `size`, of a pixel of the image reduced to a longer `side`.

    If `side` is 0, the image is not reduced.
    """
    return max(1.0, max(size) / side) if side else 1.0


def divide(size: Size, unit: float) -> Size:
    """Size in whole pixels, at least 1, of an image of `size` reduced by `unit`."""
    return max(1, round(size[0] / unit)), max(1, round(size[1] / unit))


def corners(size: Size) -> np.ndarray:
    """Centres of the corner pixels of an image (width, height): (4, 2) float64, clockwise."""
    w, h = size
    return np.array([[0, 0], [w - 1, 0], [w - 1, h - 1], [0, h - 1]], dtype=np.float64)


def corner_error(H_estimated: Optional[np.ndarray], H_true: np.ndarray, size: Size) -> float:
    """Mean distance in px of image 0's corners mapped by both; inf without an estimate.

    The error of SuperGlue, section 5.1.
    """
    if H_estimated is None:
        return math.inf
    points = corners(size)
    apart = transform(points, H_estimated) - transform(points, H_true)
    error = float(np.linalg.norm(apart, axis=-1).mean())
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True, eq=False)
class Fit:
    """A robust fit of K matches; `model, inliers = fit` takes it apart.

    model: (3, 3) float64, or None. inliers: (K,) bool. significance: see `significance`.
    """

    model: Optional[np.ndarray]
    inliers: np.ndarray
    significance: float = 0.0

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.inliers))

    @property
    def supported(self) -> bool:
        """Whether most matches agree with the model, and more than by chance.

        Where a pattern repeats, matches of different repetitions contradict each other: each of
        many models then has some of them, which is no chance.
        """
        if self.model is None or self.significance < SUPPORTED_DIGITS:
            return False
        return float(self.inliers.mean()) >= SUPPORTED_PART


def significance(count: int, inliers: int, chance: float, sample: int) -> float:
    """Decimal digits by which `inliers` of `count` matches are too many for chance, at least 0.

    Matches that are all wrong have so many inliers, for any choice of `sample` matches, in one of
    10^s pairs (a contrario; Moisan and Stival 2004). Chernoff's inequality bounds the tail of the
    binomial distribution.

    chance: probability that a wrong match is an inlier. sample: how many matches give a model.
    """
    rest = count - sample
    part = (inliers - sample) / max(rest, 1)
    if part <= chance:
        return 0.0
    nats = part * math.log(part / chance)
    if part < 1:
        nats += (1 - part) * math.log((1 - part) / (1 - chance))
    choices = math.lgamma(count + 1) - math.lgamma(sample + 1) - math.lgamma(rest + 1)
    return max(0.0, rest * nats - choices) / math.log(10)


def fit_homography(
    points0: np.ndarray,
    points1: np.ndarray,
    threshold_px: float = 3.0,
    deviations: Optional[np.ndarray] = None,
) -> Fit:
    """`fit_ransac` with the inliers: matches (K, 2) mapped to within `threshold_px` in image 1.

    The model is None if image 1 is a mirror image. OpenCV then finds a few matches that fit by
    chance, but more fit when image 1 is mirrored.
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

    points0, points1: (N, 2) matched pixels, which OpenCV reads as float32.
    threshold_px: inlier distance in image 1.
    iterations: maximum number of samples.
    deviations: (N,) px of refined matches, see `refine_homography`.

    Returns (3, 3) float64. It is None for fewer than four matches, if OpenCV finds no model, and
    for a mirror image.
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

    points0, points1: (N, 2); those within `threshold_px` of H count.
    deviations: (N,) px along each axis from `refinement.refine`, which divide the distances. Where
        they are NaN, or without them, the deviation is SCATTER_PX. The scene's deviation from a
        plane is added to them in quadrature. A first fit measures it by the median distance of
        refined matches.
    """
    inliers = _within(H, points0, points1, threshold_px)
    if inliers.sum() < MIN_POINTS:
        return H
    p0, p1 = (np.asarray(points, np.float64)[inliers] for points in (points0, points1))
    if deviations is None:
        return _minimize(H, p0, p1, np.ones(len(p0)))
    deviations = np.asarray(deviations, np.float64)[inliers]
    H = _minimize(H, p0, p1, weights_of(deviations))
    refined = np.isfinite(deviations)
    if refined.sum() < MIN_POINTS:
        return H
    scatter = MAD_TO_DEVIATION * float(np.median(np.abs(transform(p0, H) - p1)[refined]))
    model_px = float(np.clip(MODEL_SCATTER * scatter, *MODEL_LIMITS_PX))
    return _minimize(H, p0, p1, weights_of(deviations, model_px))


def weights_of(deviations: np.ndarray, added_px: float = MIN_DEVIATION_PX) -> np.ndarray:
    """Weights (N,) of distances by deviations (N,) px and `added_px` in quadrature; NaN gives 1."""
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
        normalize(H).ravel()[:8],
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
    linear = to_homogeneous(points) / depth[:, None]
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


def fit_fundamental(points0: np.ndarray, points1: np.ndarray, threshold_px: float = 3.0) -> Fit:
    """Fundamental matrix F, x1^T F x0 = 0, of matched pixels (K, 2) by OpenCV's MAGSAC++.

    Equal matches give equal bytes. The model is None for fewer than eight matches, and where OpenCV
    fails on degenerate ones.
    """
    none = Fit(None, np.zeros(len(points0), bool))
    if len(points0) < MIN_FUNDAMENTAL:
        return none
    try:
        F, mask = cv2.findFundamentalMat(
            points0, points1, cv2.USAC_MAGSAC, threshold_px, 0.999, 3000
        )
    except cv2.error:  # "!model.empty()" if no sample gives a model
        return none
    return none if F is None else Fit(F, mask.ravel() > 0)


def epipolar_distances(F: np.ndarray, points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """(K,) px: the larger distance of matched points (K, 2) from their lines in both images."""
    homogeneous0, homogeneous1 = (to_homogeneous(points) for points in (points0, points1))
    lines1 = homogeneous0 @ F.T
    lines0 = homogeneous1 @ F
    product = np.abs((homogeneous1 * lines1).sum(axis=1))
    shorter = np.minimum(np.hypot(lines0[:, 0], lines0[:, 1]), np.hypot(lines1[:, 0], lines1[:, 1]))
    return product / np.maximum(shorter, 1e-12)


def to_homogeneous(points: np.ndarray) -> np.ndarray:
    """(K, 2) -> (K, 3), with a last entry of 1."""
    return np.column_stack([points, np.ones(len(points))])


class Pose(NamedTuple):
    """Camera 1 from camera 0: x1 = R x0 + s t, s unknown.

    R (3, 3), t (3,) of length 1, or None; inliers: (K,) bool.
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
    """Relative pose of two cameras with known intrinsics K0, K1 (3, 3), from matched pixels (K, 2).

    PoseLib's LO-RANSAC (Larsson, 2020), deterministic, which ends with a fit to all inliers.
    R and t are None for fewer than five matches or inliers. Raises ValueError for intrinsics that
    are not (3, 3), and RequestError without PoseLib.

    threshold_px: inlier distance, in pixels of the mean focal length.
    """
    poselib = import_extra("poselib", "pose")
    K0, K1 = (np.asarray(K, np.float64) for K in (K0, K1))
    if K0.shape != (3, 3) or K1.shape != (3, 3):
        raise ValueError(f"intrinsics {K0.shape} and {K1.shape}: must be (3, 3)")
    none = Pose(None, None, np.zeros(len(points0), bool))
    if len(points0) < MIN_ESSENTIAL:
        return none
    # Both cameras as one of the mean focal length and square pixels, which is what PoseLib models
    focal = float(np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]]))
    camera = {"model": "SIMPLE_PINHOLE", "width": 1, "height": 1, "params": [focal, 0, 0]}
    pixels = (
        transform(np.asarray(points, np.float64), inverse(K)) * focal
        for points, K in ((points0, K0), (points1, K1))
    )
    options = {"max_epipolar_error": threshold_px}
    found, about = poselib.estimate_relative_pose(*pixels, camera, camera, options)
    if about["num_inliers"] < MIN_ESSENTIAL:
        return none
    t = found.t / np.linalg.norm(found.t)
    return Pose(np.array(found.R), t, np.array(about["inliers"], bool))


def local_maps(points0: np.ndarray, points1: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    """Local affine maps 0 -> 1 at K matches, (K, 2, 2).

    Inliers of a homography that fits most matches get its derivative. Others get the least-squares
    affine map of the nearest inliers of one homography or epipolar geometry. Without a geometry all
    get `fallback` (K, 2, 2).
    """
    given = points0.astype(np.float32), points1.astype(np.float32)
    H, planar = fit_homography(*given, GEOMETRY_PX)
    agreeing = planar
    if planar.sum() < PLANAR * len(planar):
        agreeing = planar | fit_fundamental(*given, GEOMETRY_PX).inliers
    if agreeing.sum() < MIN_AGREEING:
        return fallback
    maps = nearest_affine(points0, points1, agreeing)
    if H is not None and planar.sum() >= PLANAR * agreeing.sum():
        maps[planar] = jacobians(H, points0[planar])
    return maps


def nearest_affine(points0: np.ndarray, points1: np.ndarray, agreeing: np.ndarray) -> np.ndarray:
    """Affine maps (K, 2, 2) of the nearest matches among `agreeing` (K,) bool, two or more.

    Each is regularized by the map of all of these.
    """
    from scipy.spatial import KDTree

    own = points0[agreeing]
    theirs = points1[agreeing]
    count = min(NEIGHBOURS, len(own))
    distance, index = KDTree(own).query(points0, count)
    weight = 1.0 / (NEAR_PX + distance)
    weight = weight / weight.sum(1, keepdims=True)
    p, q = (
        points[index] - (weight[..., None] * points[index]).sum(1, keepdims=True)
        for points in (own, theirs)
    )
    whole = np.linalg.lstsq(own - own.mean(0), theirs - theirs.mean(0), rcond=None)[0]
    normal = np.einsum("kn,kni,knj->kij", weight, p, p) + PRIOR_PX**2 * np.eye(2)
    right = np.einsum("kn,kni,knj->kij", weight, p, q) + PRIOR_PX**2 * whole
    return np.linalg.solve(normal, right).swapaxes(1, 2)
