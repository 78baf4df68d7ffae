"""Homographies as maps of the plane. Element by element: the sums of matrix products and LAPACK's
inverses depend on the processor.
"""

from __future__ import annotations

import functools
import math
from typing import Optional, Tuple

import numpy as np

TINY = np.finfo(np.float64).tiny
REFERENCE_PX = 1024  # longer side of an image at which lengths in pixels were chosen


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
    return normalized(functools.reduce(product, homographies))


def inverse(H: np.ndarray) -> np.ndarray:
    """Inverse homographies (..., 3, 3), by the adjugate. Singular matrices raise no error."""
    a, b, c = np.moveaxis(H, -1, 0)
    return normalized(np.stack([np.cross(b, c), np.cross(c, a), np.cross(a, b)], axis=-2))


def normalized(H: np.ndarray) -> np.ndarray:
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
    """Length in px, in an image of `size`, of a pixel of the image reduced to a longer `side`."""
    return max(1.0, max(size) / side)


def corners(size: Tuple[int, int]) -> np.ndarray:
    """Centres of the corner pixels of an image (width, height): (4, 2) float64, clockwise."""
    w, h = size
    return np.array([[0, 0], [w - 1, 0], [w - 1, h - 1], [0, h - 1]], dtype=np.float64)


def corner_error(
    H_estimated: Optional[np.ndarray], H_true: np.ndarray, size: Tuple[int, int]
) -> float:
    """Mean distance in px of image 0's corners mapped by both; inf without an estimate.

    The error of SuperGlue, section 5.1.
    """
    if H_estimated is None:
        return math.inf
    points = corners(size)
    apart = transform(points, H_estimated) - transform(points, H_true)
    error = float(np.linalg.norm(apart, axis=-1).mean())
    return error if math.isfinite(error) else math.inf
