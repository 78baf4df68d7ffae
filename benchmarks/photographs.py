"""Photographs of 640x480 to measure on, from those that ship inside scikit-image."""

from __future__ import annotations

from typing import List

import cv2
import numpy as np

SIZE = (640, 480)
BUNDLED = ("astronaut", "coffee", "chelsea", "rocket", "brick", "grass", "gravel", "camera")


def photographs(count: int) -> List[np.ndarray]:
    """Up to eight gray images, (480, 640) uint8, scaled to fill it and cut to their middle."""
    from skimage import data

    return [_cut(np.asarray(getattr(data, name)())) for name in BUNDLED[:count]]


def _cut(image: np.ndarray) -> np.ndarray:
    gray = image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    height, width = gray.shape
    scale = max(SIZE[0] / width, SIZE[1] / height, 1.0)
    gray = cv2.resize(gray, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    return cv2.getRectSubPix(gray, SIZE, ((gray.shape[1] - 1) / 2, (gray.shape[0] - 1) / 2))
