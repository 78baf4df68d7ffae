"""Load the photographs inside scikit-image, and make pairs of views to measure on."""

from __future__ import annotations

from typing import List, Sequence

import cv2
import numpy as np
import torch

from pipeline.keypoints.store import EVERYWHERE
from pipeline.train.data import PairBatch
from superglue_sift.features import sift
from superglue_sift.features.features import Features
from superglue_sift.network.batch import make_batch

SIZE = (640, 480)
BUNDLED = ("astronaut", "coffee", "chelsea", "rocket", "brick", "grass", "gravel", "camera")


def load_photographs(count: int) -> List[np.ndarray]:
    """Return up to eight gray images (480, 640) uint8, scaled and cut to their middle."""
    from skimage import data

    return [_cut_to_size(np.asarray(getattr(data, name)())) for name in BUNDLED[:count]]


def _cut_to_size(image: np.ndarray) -> np.ndarray:
    """Return the middle of an image in gray, (480, 640) uint8. Smaller images are enlarged."""
    gray = image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    height, width = gray.shape
    scale = max(SIZE[0] / width, SIZE[1] / height, 1.0)
    gray = cv2.resize(gray, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    return cv2.getRectSubPix(gray, SIZE, ((gray.shape[1] - 1) / 2, (gray.shape[0] - 1) / 2))


def make_pairs(keypoints: int, count: int) -> PairBatch:
    """Make pairs of a photograph and a view of it by a mild random homography.

    After eight pairs the same pairs come again.

    Args:
        keypoints: number of keypoints of each view, at most 512. Smooth photographs have so many
            because of noise.
        count: number of pairs.
    """
    rng = np.random.default_rng(0)
    views: List[Sequence[Features]] = []
    maps: List[np.ndarray] = []
    for image in load_photographs(count):
        # Standard deviations: 5 % of scale and shear, 15 px of shift, a little perspective
        H = np.eye(3) + rng.normal(0, [[0.05, 0.05, 15], [0.05, 0.05, 15], [5e-5, 5e-5, 0]])
        warped = cv2.warpPerspective(image, H, SIZE, borderMode=cv2.BORDER_REFLECT)
        noisy = np.stack([image, warped]) + rng.normal(0, 8, (2, *image.shape))
        noisy = noisy.clip(0, 255).astype(np.uint8)
        views.append([sift.extract(view, keypoints) for view in noisy])
        maps.append(H)
    index = [number % len(views) for number in range(count)]
    images0, images1 = (make_batch(images) for images in zip(*(views[i] for i in index)))
    # Each view shows one photograph only.
    cells = np.broadcast_to(EVERYWHERE, (count, 2, 3, 3)).copy()
    H_0to1 = torch.from_numpy(np.stack(maps)[index])
    return PairBatch(images0, images1, H_0to1, torch.from_numpy(cells))
