"""Photographs to measure on: those `fetch` wrote, else the ones that ship inside scikit-image."""

from __future__ import annotations

from pathlib import Path
from typing import List

import cv2
import numpy as np

from pipeline.errors import RequestError
from pipeline.image_sets.sources import open_manifest
from superglue_sift.images import decode_gray

SIZE = (640, 480)
BUNDLED = ("astronaut", "coffee", "chelsea", "rocket", "brick", "grass", "gravel", "camera")


def photographs(folder: Path, count: int) -> List[np.ndarray]:
    """`count` gray images, (480, 640) uint8: cropped from larger ones; smaller ones are scaled up."""
    try:
        images = open_manifest(folder)
        entries = images.entries("train")[:count]
        found = [decode_gray(images.read(entry), entry.name) for entry in entries]
    except RequestError:
        found = []
    if not found:
        found = _bundled()
    views = [_cut(image) for image in found]
    return [views[i % len(views)] for i in range(count)]


def _bundled() -> List[np.ndarray]:
    from skimage import data

    found = []
    for name in BUNDLED:
        image = np.asarray(getattr(data, name)())
        gray = image if image.ndim == 2 else cv2.cvtColor(image[..., :3], cv2.COLOR_RGB2GRAY)
        found.append(gray.astype(np.uint8))
    return found


def _cut(image: np.ndarray) -> np.ndarray:
    height, width = image.shape
    scale = max(SIZE[0] / width, SIZE[1] / height)
    if scale > 1:
        image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    height, width = image.shape
    top, left = max(0, height - SIZE[1]) // 2, max(0, width - SIZE[0]) // 2
    cut = image[top : top + SIZE[1], left : left + SIZE[0]]
    return cv2.resize(cut, SIZE) if cut.shape != SIZE[::-1] else np.ascontiguousarray(cut)
