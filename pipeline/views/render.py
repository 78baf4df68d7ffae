"""Render a view of an image through a homography, and distort its photometry.

Distortions follow the order of a camera: light, lens, sensor, file. They take about 1 ms for a view
of 512x384, since all changes of gray levels share one look-up and the noise is cut from a tile
drawn once.
"""

from __future__ import annotations

import functools
from typing import Tuple

import cv2
import numpy as np

from pipeline.params import Photometric
from superglue_sift.geometry.two_view import compose, corners, inverse, resizing, transform

SHRINK_BELOW = 0.7  # view pixels per image pixel; above it bilinear sampling hardly aliases
JPEG_QUALITY = (40, 95)
TILE = 1024  # side of the noise tile in px
_MIN_BLUR = 0.2  # px; less is invisible


def render(
    image: np.ndarray, H_image_to_view: np.ndarray, view_size: Tuple[int, int]
) -> np.ndarray:
    """Render the view of an image, uint8 of `view_size` (width, height) px, sampled bilinearly.

    Args:
        image: (H, W) or (H, W, 3) uint8; shrunk first by averaging areas where the view is much
            smaller, to avoid aliasing.
        H_image_to_view: (3, 3) float64, pixel centres at integers.
    """
    scale = _scale(H_image_to_view, view_size)
    H = H_image_to_view
    if scale < SHRINK_BELOW:
        height, width = image.shape[:2]
        small = (max(round(width * scale), 1), max(round(height * scale), 1))
        H = compose(H, inverse(resizing((width, height), small)))
        image = cv2.resize(image, small, interpolation=cv2.INTER_AREA)
    # rounding may reach a fraction of a pixel beyond the border
    return cv2.warpPerspective(
        image, H, view_size, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
    )


def _scale(H: np.ndarray, view_size: Tuple[int, int]) -> float:
    """View pixels per image pixel over the whole view: the square root of the ratio of areas."""
    x, y = transform(corners(view_size), inverse(H)).T
    area = 0.5 * abs((x * np.roll(y, -1) - y * np.roll(x, -1)).sum())
    return float(np.sqrt((view_size[0] - 1) * (view_size[1] - 1) / area))


def distort(view: np.ndarray, rng: np.random.Generator, limits: Photometric) -> np.ndarray:
    """A distorted copy of a view, (H, W) uint8 both, with the same geometry.

    rng: the number of draws does not depend on the limits, so switching one distortion off leaves
    the others.
    """
    brightness, contrast, gamma = rng.uniform(-1.0, 1.0, 3)
    blur, noise, jpeg, quality, x, y = rng.uniform(0.0, 1.0, 6)
    out = cv2.LUT(
        view,
        _levels(brightness * limits.brightness, contrast * limits.contrast, gamma * limits.gamma),
    )
    if blur * limits.blur > _MIN_BLUR:
        out = cv2.GaussianBlur(out, (0, 0), blur * limits.blur)
    if limits.noise > 0.0:
        out = _add_noise(out, 255.0 * noise * limits.noise, x, y)
    if jpeg < limits.jpeg:
        level = round(JPEG_QUALITY[0] + quality * (JPEG_QUALITY[1] - JPEG_QUALITY[0]))
        out = compress(out, level)
    return out


def _levels(brightness: float, contrast: float, gamma: float) -> np.ndarray:
    """(256,) uint8 table. Contrast is around the middle gray; gamma is symmetric: 1.25 and 1 / 1.25
    alike.
    """
    level = np.linspace(0.0, 1.0, 256)
    exponent = 1.0 + gamma if gamma >= 0 else 1.0 / (1.0 - gamma)
    level = (level**exponent - 0.5) * (1.0 + contrast) + 0.5 + brightness
    return np.clip(np.rint(level * 255.0), 0, 255).astype(np.uint8)


@functools.lru_cache(maxsize=1)
def _tile() -> np.ndarray:
    """Gaussian noise of standard deviation 16, int16, the same in every process."""
    rng = np.random.Generator(np.random.PCG64(0))
    return np.rint(16.0 * rng.standard_normal((TILE, TILE))).astype(np.int16)


def _add_noise(view: np.ndarray, deviation: float, x: float, y: float) -> np.ndarray:
    """Add noise from a random place of the tile, repeated where the view is larger."""
    height, width = view.shape
    tile = _tile()
    top = int(y * TILE)
    left = int(x * TILE)
    rows = np.arange(top, top + height) % TILE
    columns = np.arange(left, left + width) % TILE
    noise = (
        tile[rows][:, columns]
        if max(height + top, width + left) > TILE
        else tile[rows[0] :, columns[0] :]
    )
    noise = np.ascontiguousarray(noise[:height, :width])
    return (
        cv2.addWeighted(view.astype(np.int16), 1.0, noise, deviation / 16.0, 0.0)
        .clip(0, 255)
        .astype(np.uint8)
    )


def compress(view: np.ndarray, quality: int) -> np.ndarray:
    """JPEG compression at `quality`, 1 to 100, and back."""
    _, data = cv2.imencode(".jpg", view, [cv2.IMWRITE_JPEG_QUALITY, quality])
    return cv2.imdecode(data, cv2.IMREAD_GRAYSCALE)
