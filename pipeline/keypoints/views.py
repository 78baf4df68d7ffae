"""Render views of a photograph by random homographies without borders, and find their keypoints.

All functions are pure functions of pixels, name and parameters.

A view shows what lies in a quadrilateral of the image. The quadrilateral is made around the origin
(perspective, rotation, scale) and moved to a random position where its bounding box lies inside the
image, so no pixel is missing. Folded quadrilaterals are rejected. Quadrilaterals that are magnified
too much are rejected, too: magnified pixels contain no finer detail, and SIFT finds fewer, coarser
keypoints there. The idea is SuperPoint's homographic adaptation (DeTone et al. 2018) and
SuperGlue's appendix E.

Distortions follow the order of a camera: light, lens, sensor, file. They take about 1 ms for a view
of 512x384, since all changes of gray levels share one look-up table and the noise is cut from a
tile that is drawn once.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Optional

import cv2
import numpy as np

from pipeline.keypoints.store import ImageViews
from pipeline.params import Homography, KeypointsParams, Photometric
from superglue_sift.features import extractors
from superglue_sift.features.images import BadImage
from superglue_sift.geometry.two_view import (
    Size,
    compose,
    compute_jacobians,
    get_corners,
    inverse,
    map_to_resized,
    through_four_points,
    transform,
)

# Increase this number when the same photograph and parameters give other views or keypoints. Shards
# made with another number are then made again. tests/keypoints fails if a golden shard changes and
# this number does not.
VERSION = 2

MAX_UPSCALE = 2.0  # Most view pixels per image pixel. It limits how small images may be
MAX_SIDE = 32_767  # px. cv2.warpPerspective takes images with shorter sides
MILD_SCALE_MIN = 0.9  # Smallest view 0, as a fraction of the largest crop
_TRIES = 20  # Number of random views that may be rejected before a mild view is taken
SHRINK_BELOW = 0.7  # View pixels per image pixel; above it bilinear sampling hardly aliases
JPEG_QUALITY = (40, 95)  # The range from which the quality of a JPEG is drawn
TILE = 1024  # Side of the noise tile in px
_MIN_BLUR = 0.2  # Standard deviation in px. A weaker blur is invisible and is skipped


def make_image_views(
    gray: np.ndarray, name: str, settings: KeypointsParams, mask: Optional[np.ndarray] = None
) -> ImageViews:
    """Render the views of an image and find their keypoints.

    View 0 is a mild crop without photometric distortion. The other views are random homographies
    with distortion. Views with few or no keypoints stay for training. The seed, the name of the
    image and the index of the view determine every draw.

    Args:
        gray: (H, W) uint8.
        name: name of the image.
        settings: the section `keypoints` of the parameters.
        mask: (H, W) uint8. No keypoint lies where it is 0.

    Raises:
        BadImage: If the image cannot be used. The exception gives the reason.
    """
    size = (gray.shape[1], gray.shape[0])
    require_size(name, size, (settings.width, settings.height))
    extractor = extractors.load_extractor(settings.extractor)
    homographies = []
    features = []
    for index in range(settings.views_per_image):
        rng = make_generator(settings.seed, name, index)
        factor = 1.0 if settings.smallest == 1.0 else rng.uniform(settings.smallest, 1.0)
        view_size = (round(settings.width * factor), round(settings.height * factor))
        if index == 0:
            H = sample_mild_view(rng, size, view_size)
            view = render(gray, H, view_size)
        else:
            # The strength grows linearly from `difficulty_first` at view 1 to 1 at the last view.
            fraction = (index - 1) / max(settings.views_per_image - 2, 1)
            strength = settings.difficulty_first + fraction * (1.0 - settings.difficulty_first)
            H = sample_view(rng, size, view_size, settings.views.homography, strength)
            view = distort(render(gray, H, view_size), rng, settings.views.photometric)
        homographies.append(H)
        view_mask = None if mask is None else render(mask, H, view_size, cv2.INTER_NEAREST)
        features.append(extractor(view, settings.max_keypoints, view_mask))
    return ImageViews(name, size, np.array(homographies), features)


def require_size(name: str, image_size: Size, view_size: Size) -> None:
    """Check that a view of this size can be made of an image.

    Args:
        name: name of the image, which the error names.
        image_size: width and height of the image in px.
        view_size: width and height of the view in px.

    Raises:
        BadImage: If the image is too small for the view, or so large that OpenCV cannot warp it.
    """
    if max(image_size) >= MAX_SIDE:
        raise BadImage(name, f"too long: {max(image_size)} px, at most {MAX_SIDE - 1}")
    smallest = [math.ceil((side - 1) / MAX_UPSCALE) + 1 for side in view_size]
    if any(side < least for side, least in zip(image_size, smallest)):
        size, needed = ("x".join(map(str, size_px)) for size_px in (image_size, smallest))
        raise BadImage(name, f"too small: {size}, a view needs {needed} pixels")


# --- geometry


def make_generator(seed: int, name: str, index: int) -> np.random.Generator:
    """Return the generator of random numbers of one view.

    Its numbers do not depend on other images, on the workers or on their order.

    Args:
        seed: the key `keypoints.seed`.
        name: name of the image.
        index: index of the view.
    """
    digest = hashlib.sha256(f"{seed}\n{index}\n{name}".encode("utf-8", "surrogateescape")).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def sample_view(
    rng: np.random.Generator,
    image_size: Size,
    view_size: Size,
    limits: Homography,
    difficulty: float = 1.0,
) -> np.ndarray:
    """Sample a random view and return its H_image_to_view, (3, 3) float64.

    The corners of the view are a convex quadrilateral inside the image, and no image pixel is
    magnified more than `limits.max_upscale` times.

    Args:
        rng: the generator of this view (`make_generator`). The order of its draws is fixed.
        image_size: width and height of the image in px.
        view_size: width and height of the view in px. The view must fit into the image
            (`require_size`).
        limits: the section `views.homography`.
        difficulty: from 0 (the largest upright crop, centered) to 1 (the limits in full).
    """
    for attempt in range(_TRIES):
        strength = difficulty * (1.0 - attempt / _TRIES)  # Weaker after each rejection
        H = _try_to_sample_view(rng, image_size, view_size, limits, strength)
        if H is not None:
            return H
    return sample_mild_view(rng, image_size, view_size)


def sample_mild_view(rng: np.random.Generator, image_size: Size, view_size: Size) -> np.ndarray:
    """Sample an upright crop of 90 to 100 % of the largest that fits, as for view 0.

    Args:
        rng: the generator of this view.
        image_size: width and height of the image in px.
        view_size: width and height of the view in px.

    Returns:
        H_image_to_view, (3, 3) float64.
    """
    largest = compute_largest_crop_scale(image_size, view_size)
    scale = largest * rng.uniform(max(MILD_SCALE_MIN, min(1.0, 1.0 / (MAX_UPSCALE * largest))), 1.0)
    quad = get_corners(view_size) - get_corners(view_size).mean(0)
    return _move_into_image(rng, quad * scale, image_size, view_size)


def compute_largest_crop_scale(image_size: Size, view_size: Size) -> float:
    """Return the image pixels per view pixel of the largest upright crop.

    Sizes are measured between the centers of the corner pixels.

    Args:
        image_size: width and height of the image in px.
        view_size: width and height of the view in px.
    """
    return min((image - 1) / (view - 1) for image, view in zip(image_size, view_size))


def _try_to_sample_view(
    rng: np.random.Generator, image_size: Size, view_size: Size, limits: Homography, strength: float
) -> Optional[np.ndarray]:
    """Sample one view as `sample_view` does, or return None if it must be rejected."""
    # Move, rotate and tilt the corners of the view, a quadrilateral (4, 2).
    shift = limits.perspective * strength * rng.uniform(-1.0, 1.0, (4, 2))
    angle = math.radians(limits.rotation_deg) * strength * rng.uniform(-1.0, 1.0)
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    outline = get_corners(view_size) - get_corners(view_size).mean(0)
    quad = _map_linearly(outline + shift * np.array(view_size), rotation)
    if limits.tilt_deg > 0.0:
        quad = _map_linearly(
            quad, _draw_foreshortening(math.radians(limits.tilt_deg) * strength, rng)
        )
    if not _is_convex(quad):
        return None
    largest = compute_largest_crop_scale(image_size, view_size)
    # At `max_scale` the quadrilateral still fits into the image. At `min_scale` it is magnified as
    # much as the limits allow.
    max_scale = min(largest, *((np.array(image_size) - 1) / np.ptp(quad, axis=0)))
    min_scale = (
        compute_magnification(through_four_points(quad, get_corners(view_size)), view_size).max()
        / limits.max_upscale
    )
    if min_scale > max_scale:
        return None
    min_scale = min(
        max(largest * (1.0 - strength * (1.0 - limits.scale_min)), min_scale), max_scale
    )
    # Draw a log-uniform scale within the bounds, and a random position.
    quad *= math.exp(rng.uniform(math.log(min_scale), math.log(max_scale)))
    return _move_into_image(rng, quad, image_size, view_size, strength)


def _map_linearly(points: np.ndarray, A: np.ndarray) -> np.ndarray:
    """Map points (N, 2) by a matrix A (2, 2), with the same bits on every processor."""
    return points[:, :1] * A[:, 0] + points[:, 1:] * A[:, 1]


def _draw_foreshortening(tilt: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the stretch (2, 2) of a camera tilted by up to `tilt` radians in a random direction.

    The stretch is log-uniform between 1 and 1 / cos(tilt). With uniform angles few pairs would be
    stretched by 2 and more, but photographs of a wall from its side are (Morel and Yu 2009,
    "ASIFT", section 2.2: transition tilts).
    """
    direction = rng.uniform(0.0, math.pi)
    axis = np.array([math.cos(direction), math.sin(direction)])
    return np.eye(2) + (math.cos(tilt) ** -rng.uniform() - 1.0) * np.outer(axis, axis)


def _move_into_image(
    rng: np.random.Generator,
    quad: np.ndarray,
    image_size: Size,
    view_size: Size,
    strength: float = 1.0,
) -> np.ndarray:
    """Move the corners `quad` (4, 2) of a view into the image, and return its H_image_to_view.

    `strength` is from 0 (the center of the image) to 1 (anywhere in the image).
    """
    low = quad.min(0)
    high = quad.max(0)
    last = np.array(image_size) - 1.0
    # (2,) px, by how much the bounding box may move
    margin = np.maximum(last - (high - low), 0.0)
    position = 0.5 + strength * rng.uniform(-0.5, 0.5, 2)
    moved = np.clip(quad - low + margin * position, 0.0, last)
    return through_four_points(moved, get_corners(view_size))


def _is_convex(quad: np.ndarray) -> bool:
    """Return whether the quadrilateral (4, 2) is convex, with no corner close to 180 degrees."""
    edges = np.roll(quad, -1, axis=0) - quad
    following = np.roll(edges, -1, axis=0)
    crosses = edges[:, 0] * following[:, 1] - edges[:, 1] * following[:, 0]
    lengths = np.linalg.norm(edges, axis=1) * np.linalg.norm(following, axis=1)
    return bool((crosses > 0.1 * lengths).all())


def compute_magnification(H: np.ndarray, view_size: Size) -> np.ndarray:
    """Return the view pixels per image pixel along the most stretched direction, (4,).

    They are measured at the corners of the view, because the local scale of a homography has its
    extremes over a convex quadrilateral at the corners.

    Args:
        H: (3, 3), from the image to the view.
        view_size: width and height of the view in px.
    """
    J = compute_jacobians(H, transform(get_corners(view_size), inverse(H)))
    # (4, 2, 2): the larger singular value of each 2x2 matrix, in closed form
    (a, b), (c, d) = J.transpose(1, 2, 0)
    larger = np.hypot(a + d, c - b) + np.hypot(a - d, b + c)
    return 0.5 * larger


# --- pixels


def render(
    image: np.ndarray,
    H_image_to_view: np.ndarray,
    view_size: Size,
    sampling: int = cv2.INTER_LINEAR,
) -> np.ndarray:
    """Render the view of an image, uint8.

    Args:
        image: (H, W) or (H, W, 3) uint8. If the view is much smaller, areas are averaged first, to
            avoid aliasing.
        H_image_to_view: (3, 3) float64, pixel centers at integers.
        view_size: width and height of the view in px.
        sampling: OpenCV's flag, which is bilinear by default. A mask needs the nearest pixel, so
            that its edges stay sharp.
    """
    H = H_image_to_view
    # View pixels per image pixel: the shoelace formula gives the area of the view in the image.
    x, y = transform(get_corners(view_size), inverse(H)).T
    area = 0.5 * abs((x * np.roll(y, -1) - y * np.roll(x, -1)).sum())
    scale = float(np.sqrt((view_size[0] - 1) * (view_size[1] - 1) / area))
    # Reduce the image first, so that its areas are averaged. H is then from the reduced image.
    if scale < SHRINK_BELOW:
        height, width = image.shape[:2]
        small = (max(round(width * scale), 1), max(round(height * scale), 1))
        H = compose(H, inverse(map_to_resized((width, height), small)))
        shrinking = cv2.INTER_AREA if sampling == cv2.INTER_LINEAR else sampling
        image = cv2.resize(image, small, interpolation=shrinking)
    # Replicate the border, because rounding may reach a fraction of a pixel beyond it.
    return cv2.warpPerspective(image, H, view_size, None, sampling, cv2.BORDER_REPLICATE)


def distort(view: np.ndarray, rng: np.random.Generator, limits: Photometric) -> np.ndarray:
    """Return a distorted copy of a view, (H, W) uint8, with the same geometry.

    The number of draws from `rng` does not depend on the limits, so if one distortion is switched
    off, the others stay the same.

    Args:
        view: (H, W) uint8.
        rng: the generator of this view.
        limits: the section `views.photometric`.
    """
    brightness, contrast, gamma = rng.uniform(-1.0, 1.0, 3)
    blur, noise, jpeg, quality, x, y = rng.uniform(0.0, 1.0, 6)
    distorted = cv2.LUT(
        view,
        _make_gray_table(
            brightness * limits.brightness, contrast * limits.contrast, gamma * limits.gamma
        ),
    )
    # Light is done; next blur, noise, JPEG.
    if blur * limits.blur > _MIN_BLUR:
        distorted = cv2.GaussianBlur(distorted, (0, 0), blur * limits.blur)
    if limits.noise > 0.0:
        distorted = _add_noise(distorted, 255.0 * noise * limits.noise, x, y)
    if jpeg < limits.jpeg:
        jpeg_quality = round(JPEG_QUALITY[0] + quality * (JPEG_QUALITY[1] - JPEG_QUALITY[0]))
        distorted = compress_as_jpeg(distorted, jpeg_quality)
    return distorted


def _make_gray_table(brightness: float, contrast: float, gamma: float) -> np.ndarray:
    """Return a table that maps gray levels to gray levels, (256,) uint8.

    Contrast is around the middle gray. Gamma is symmetric: the exponents 1.25 and 1 / 1.25 are
    equally likely.
    """
    level = np.linspace(0.0, 1.0, 256)
    exponent = 1.0 + gamma if gamma >= 0 else 1.0 / (1.0 - gamma)
    level = (level**exponent - 0.5) * (1.0 + contrast) + 0.5 + brightness
    return np.clip(np.rint(level * 255.0), 0, 255).astype(np.uint8)


@functools.lru_cache(maxsize=1)
def _make_noise_tile() -> np.ndarray:
    """Return Gaussian noise of standard deviation 16, (TILE, TILE) int16.

    It is the same in every process.
    """
    rng = np.random.Generator(np.random.PCG64(0))
    return np.rint(16.0 * rng.standard_normal((TILE, TILE))).astype(np.int16)


def _add_noise(view: np.ndarray, deviation: float, x: float, y: float) -> np.ndarray:
    """Add noise of a standard deviation (gray levels), cut from the tile at (x, y) from 0 to 1.

    Where the view is larger than the tile, the tile is repeated.
    """
    height, width = view.shape
    rows = (int(y * TILE) + np.arange(height)) % TILE
    columns = (int(x * TILE) + np.arange(width)) % TILE
    noise = np.ascontiguousarray(_make_noise_tile()[rows][:, columns])
    # In the tile, the noise has the deviation 16.
    noisy = cv2.addWeighted(view.astype(np.int16), 1.0, noise, deviation / 16.0, 0.0)
    return noisy.clip(0, 255).astype(np.uint8)


def compress_as_jpeg(view: np.ndarray, quality: int) -> np.ndarray:
    """Return a view (H, W) uint8 after compression as JPEG at `quality` (1 to 100)."""
    _, data = cv2.imencode(".jpg", view, [cv2.IMWRITE_JPEG_QUALITY, quality])
    return cv2.imdecode(data, cv2.IMREAD_GRAYSCALE)
