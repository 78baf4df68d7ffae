"""Photographs and pairs of views to measure on, from the photographs inside scikit-image."""

from __future__ import annotations

from typing import List

import cv2
import numpy as np

from superglue_sift.features import sift
from superglue_sift.network.batch import Pair, PairBatch, from_pairs

SIZE = (640, 480)
BUNDLED = ("astronaut", "coffee", "chelsea", "rocket", "brick", "grass", "gravel", "camera")


def photographs(count: int) -> List[np.ndarray]:
    """Return up to eight gray images (480, 640) uint8, scaled and cut to their middle."""
    from skimage import data

    return [_cut(np.asarray(getattr(data, name)())) for name in BUNDLED[:count]]


def _cut(image: np.ndarray) -> np.ndarray:
    gray = image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    height, width = gray.shape
    # Enlarge what is smaller, then cut to the middle
    scale = max(SIZE[0] / width, SIZE[1] / height, 1.0)
    gray = cv2.resize(gray, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    return cv2.getRectSubPix(gray, SIZE, ((gray.shape[1] - 1) / 2, (gray.shape[0] - 1) / 2))


def make_batch(keypoints: int, count: int) -> PairBatch:
    """Return a batch of `count` photographs and views of them by mild random homographies.

    Each view has exactly `keypoints`, at most 512, because noise adds keypoints to smooth
    photographs. After eight pairs the same ones come again.
    """
    rng = np.random.default_rng(0)
    pairs: List[Pair] = []
    maps: List[np.ndarray] = []
    for image in photographs(count):
        # Up to 5 % of scale and shear, some 15 px of shift, and a little perspective
        H = np.eye(3) + rng.normal(0, [[0.05, 0.05, 15], [0.05, 0.05, 15], [5e-5, 5e-5, 0]])
        warped = cv2.warpPerspective(image, H, SIZE, borderMode=cv2.BORDER_REFLECT)
        noisy = np.stack([image, warped]) + rng.normal(0, 8, (2, *image.shape))
        records = (sift.extract(view, keypoints) for view in noisy.clip(0, 255).astype(np.uint8))
        pairs.append(Pair(*records, SIZE, SIZE))
        maps.append(H)
    chosen = [i % len(pairs) for i in range(count)]
    return from_pairs([pairs[i] for i in chosen], np.stack(maps)[chosen])
