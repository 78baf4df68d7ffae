"""Rendering a view of an image through a homography."""

from __future__ import annotations

from typing import Tuple

import cv2
import numpy as np

from superglue_sift.geometry import compose, corners, resizing, transform

# View pixels per image pixel; above it bilinear sampling skips no image pixel worth naming.
SHRINK_BELOW = 0.7


def render(image: np.ndarray, H_image_to_view: np.ndarray, view_size: Tuple[int, int]) -> np.ndarray:
    """The view of an image, uint8 of `view_size` (width, height) px, sampled bilinearly.

    Args:
        image: (H, W) or (H, W, 3) uint8; shrunk first by averaging areas where the view shows it much reduced,
            so that nothing aliases.
        H_image_to_view: (3, 3) float64, pixel centres at integers.
    """
    scale = _scale(H_image_to_view, view_size)
    H = H_image_to_view
    if scale < SHRINK_BELOW:
        height, width = image.shape[:2]
        small = (max(round(width * scale), 1), max(round(height * scale), 1))
        H = compose(H, np.linalg.inv(resizing((width, height), small)))
        image = cv2.resize(image, small, interpolation=cv2.INTER_AREA)
    # the border mode only ever serves the last fraction of a pixel that rounding may ask for
    return cv2.warpPerspective(image, H, view_size, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)


def _scale(H: np.ndarray, view_size: Tuple[int, int]) -> float:
    """View pixels per image pixel over the whole view: the root of the ratio of the areas."""
    x, y = transform(corners(view_size), np.linalg.inv(H)).T
    area = 0.5 * abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))
    return float(np.sqrt((view_size[0] - 1) * (view_size[1] - 1) / area))
