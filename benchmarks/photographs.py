"""Photographs of 640x480 to measure on: those of a folder, else the ones that ship inside
scikit-image.
"""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional

import cv2
import numpy as np

from pipeline.errors import RequestError

SIZE = (640, 480)
BUNDLED = ("astronaut", "coffee", "chelsea", "rocket", "brick", "grass", "gravel", "camera")


def photographs(folder: Optional[Path], count: int) -> List[np.ndarray]:
    """`count` gray images, (480, 640) uint8, scaled to fill it and cut to their middle; repeated if
    there are fewer.
    """
    if folder is None:
        from skimage import data

        found = [np.asarray(getattr(data, name)()) for name in BUNDLED]
    else:
        files = sorted(
            path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png")
        )
        found = [cv2.imread(str(path)) for path in files[:count]]
    views = [_cut(image) for image in found if image is not None]
    if not views:
        raise RequestError(f"--images {folder}: holds no JPEG or PNG")
    return [views[i % len(views)] for i in range(count)]


def _cut(image: np.ndarray) -> np.ndarray:
    gray = image if image.ndim == 2 else cv2.cvtColor(image[..., :3], cv2.COLOR_RGB2GRAY)
    height, width = gray.shape
    scale = max(SIZE[0] / width, SIZE[1] / height, 1.0)
    gray = cv2.resize(gray, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    top = (gray.shape[0] - SIZE[1]) // 2
    left = (gray.shape[1] - SIZE[0]) // 2
    return np.ascontiguousarray(gray[top : top + SIZE[1], left : left + SIZE[0]])
