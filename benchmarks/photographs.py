"""Photographs and pairs of views to measure on, from the photographs inside scikit-image."""

from __future__ import annotations

import itertools
from typing import List, Tuple

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
    # enlarge what is smaller, then cut to the middle
    scale = max(SIZE[0] / width, SIZE[1] / height, 1.0)
    gray = cv2.resize(gray, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    return cv2.getRectSubPix(gray, SIZE, ((gray.shape[1] - 1) / 2, (gray.shape[0] - 1) / 2))


def make_batch(keypoints: int, pairs: int) -> PairBatch:
    """Return a batch of photographs and views of them by mild random homographies.

    Each view has exactly `keypoints`, at most 512, because noise adds keypoints to smooth
    photographs. After eight pairs the same ones come again.
    """
    rng = np.random.default_rng(0)
    made: List[Tuple[Pair, np.ndarray]] = []
    for image in photographs(pairs):
        # up to 5 % of scale and shear, some 15 px of shift, and a little perspective
        H = np.eye(3) + rng.normal(0, [[0.05, 0.05, 15], [0.05, 0.05, 15], [5e-5, 5e-5, 0]])
        warped = cv2.warpPerspective(image, H, SIZE, borderMode=cv2.BORDER_REFLECT)
        noisy = np.stack([image, warped]) + rng.normal(0, 8, (2, *image.shape))
        views = np.clip(noisy, 0, 255).astype(np.uint8)
        records = (sift.extract(view, keypoints) for view in views)
        made.append((Pair(*records, SIZE, SIZE), H))
    made = list(itertools.islice(itertools.cycle(made), pairs))
    return from_pairs([pair for pair, _ in made], np.stack([H for _, H in made]))
