"""Sample the homography of a view: without borders, convex, of bounded up-scaling.

A view is cut from a quadrilateral, built around the origin (perspective, scale, rotation), shrunk
until its bounding box fits into the image, and moved to a random place inside, so no pixel is
missing. Folds are rejected, and too much up-scaling: magnified pixels contain no finer detail, and
SIFT finds fewer, coarser keypoints there.

Source of the idea: SuperPoint's homographic adaptation (DeTone et al. 2018), SuperGlue appendix E.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from pipeline.params import Homography
from superglue_sift.features.images import BadImage
from superglue_sift.geometry.two_view import (
    corners,
    inverse,
    jacobians,
    through_four_points,
    transform,
)

Size = Tuple[int, int]  # (width, height)

MAX_UPSCALE = 2.0  # view pixels per image pixel, anywhere in the view
MILD_SCALE_MIN = 0.9  # view 0: minimum fraction of the largest crop
MAX_SIDE = 32_767  # px of an image: cv2.warpPerspective takes fewer
# Where the parameters say how large the views of a split are
SECTION_OF = {"train": "keypoints", "val": "keypoints", "test": "evaluate"}
_TRIES = 20


def generator(seed: int, name: str, index: int) -> np.random.Generator:
    """The generator of view `index` of the image `name`, independent of other images, workers and
    their order.
    """
    digest = hashlib.sha256(f"{seed}\n{index}\n{name}".encode("utf-8", "surrogateescape")).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def fits(image_size: Size, view_size: Size) -> bool:
    """Whether a view can be cut from an image of this size within `MAX_UPSCALE`."""
    return _largest(image_size, view_size) * MAX_UPSCALE >= 1.0


def require_size(name: str, image_size: Size, view_size: Size) -> None:
    """Raises BadImage for an image that does not fit, or that OpenCV cannot warp."""
    if max(image_size) >= MAX_SIDE:
        raise BadImage(name, f"too long: {max(image_size)} px, at most {MAX_SIDE - 1}")
    if not fits(image_size, view_size):
        needed = "x".join(map(str, smallest_image(view_size)))
        size = "x".join(map(str, image_size))
        raise BadImage(name, f"too small: {size}, a view needs {needed} pixels")


def smallest_image(view_size: Size) -> Size:
    """The smallest image (width, height) that `fits`."""
    width, height = (math.ceil((side - 1) / MAX_UPSCALE) + 1 for side in view_size)
    return width, height


def smallest_images(sections: Mapping[str, Any]) -> Dict[str, Size]:
    """The smallest image of each split for the views of these sections of the parameters."""
    return {
        split: smallest_image((sections[section].width, sections[section].height))
        for split, section in SECTION_OF.items()
        if section in sections
    }


def sample_view(
    rng: np.random.Generator,
    image_size: Size,
    view_size: Size,
    limits: Homography,
    difficulty: float = 1.0,
) -> np.ndarray:
    """Sample a random view: H_image_to_view (3, 3) float64.

    The corners of the view are a convex quadrilateral inside the image, and no image pixel is
    magnified more than `limits.max_upscale` times.

    Args:
        rng: consumed in a fixed order; see `generator`.
        image_size, view_size: (width, height) px, which fit (`require_size`).
        difficulty: 0 (the largest upright crop, centred) to 1 (the limits in full).
    """
    for attempt in range(_TRIES):
        strength = difficulty * (1.0 - attempt / _TRIES)  # weaker after each rejection
        H = _try_view(rng, image_size, view_size, limits, strength)
        if H is not None:
            return H
    return mild_view(rng, image_size, view_size)


def mild_view(rng: np.random.Generator, image_size: Size, view_size: Size) -> np.ndarray:
    """Sample view 0: an upright crop of 90 to 100 % of the largest that fits. Arguments:
    `sample_view`.
    """
    largest = _largest(image_size, view_size)
    scale = largest * rng.uniform(max(MILD_SCALE_MIN, min(1.0, 1.0 / (MAX_UPSCALE * largest))), 1.0)
    return _place(rng, _outline(view_size) * scale, image_size, view_size)


def _largest(image_size: Size, view_size: Size) -> float:
    """Image pixels per view pixel of the largest upright crop, between centres of corner pixels."""
    return min((image - 1) / (view - 1) for image, view in zip(image_size, view_size))


def _outline(view_size: Size) -> np.ndarray:
    """(4, 2) corners of a view around the origin."""
    return corners(view_size) - corners(view_size).mean(0)


def _try_view(
    rng: np.random.Generator, image_size: Size, view_size: Size, limits: Homography, strength: float
) -> Optional[np.ndarray]:
    shift = limits.perspective * strength * rng.uniform(-1.0, 1.0, (4, 2))
    angle = math.radians(limits.rotation_deg) * strength * rng.uniform(-1.0, 1.0)
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    quad = _map(_outline(view_size) + shift * np.array(view_size), rotation)
    if limits.tilt_deg > 0.0:
        quad = _map(quad, _foreshortening(math.radians(limits.tilt_deg) * strength, rng))
    if not _convex(quad):
        return None
    largest = _largest(image_size, view_size)
    # bounds of the scale: the quadrilateral fits into the image, and is not magnified too much
    max_scale = min(largest, *((np.array(image_size) - 1) / np.ptp(quad, axis=0)))
    min_scale = (
        magnification(through_four_points(quad, corners(view_size)), view_size).max()
        / limits.max_upscale
    )
    if min_scale > max_scale:
        return None
    min_scale = min(
        max(largest * (1.0 - strength * (1.0 - limits.scale_min)), min_scale), max_scale
    )
    quad *= math.exp(rng.uniform(math.log(min_scale), math.log(max_scale)))
    return _place(rng, quad, image_size, view_size, strength)


def _map(points: np.ndarray, A: np.ndarray) -> np.ndarray:
    """Points (N, 2) through a linear map (2, 2), the same bits on every processor."""
    return points[:, :1] * A[:, 0] + points[:, 1:] * A[:, 1]


def _foreshortening(tilt: float, rng: np.random.Generator) -> np.ndarray:
    """(2, 2) stretch of a camera tilted by up to `tilt` (radians), along a random direction.

    The stretch is log-uniform between 1 and 1 / cos(tilt). With uniform angles, few pairs would be
    stretched by 2 and more, as photographs of a wall from its side are (Morel and Yu 2009, "ASIFT",
    section 2.2: transition tilts).
    """
    direction = rng.uniform(0.0, math.pi)
    axis = np.array([math.cos(direction), math.sin(direction)])
    return np.eye(2) + (math.cos(tilt) ** -rng.uniform() - 1.0) * np.outer(axis, axis)


def _place(
    rng: np.random.Generator,
    quad: np.ndarray,
    image_size: Size,
    view_size: Size,
    strength: float = 1.0,
) -> np.ndarray:
    """Homography of the quadrilateral at a random place inside the image. strength: 0 (centred) to
    1 (anywhere).
    """
    low = quad.min(0)
    high = quad.max(0)
    last = np.array(image_size) - 1.0
    margin = np.maximum(last - (high - low), 0.0)
    position = 0.5 + strength * rng.uniform(-0.5, 0.5, 2)
    inside = np.clip(quad - low + margin * position, 0.0, last)
    return through_four_points(inside, corners(view_size))


def _convex(quad: np.ndarray) -> bool:
    """Whether the quadrilateral is convex, with no corner close to 180 degrees."""
    edges = np.roll(quad, -1, axis=0) - quad
    following = np.roll(edges, -1, axis=0)
    crosses = edges[:, 0] * following[:, 1] - edges[:, 1] * following[:, 0]
    lengths = np.linalg.norm(edges, axis=1) * np.linalg.norm(following, axis=1)
    return bool((crosses > 0.1 * lengths).all())


def magnification(H: np.ndarray, view_size: Size) -> np.ndarray:
    """(4,) view pixels per image pixel along the most stretched direction, at the corners of the
    view.

    The local scale of a homography has its extremes over a convex quadrilateral at the corners.
    """
    J = jacobians(H, transform(corners(view_size), inverse(H)))
    # The larger singular value of each 2x2 matrix, in closed form.
    (a, b), (c, d) = J.transpose(1, 2, 0)
    larger = np.hypot(a + d, c - b) + np.hypot(a - d, b + c)
    return 0.5 * larger
