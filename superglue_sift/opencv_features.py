"""Two example extractors from OpenCV, `superglue_sift.opencv_features:orb` and `...:kaze`. See
`extractors.py`.
"""

from __future__ import annotations

from typing import Dict

import cv2
import numpy as np

from superglue_sift.errors import RequestError
from superglue_sift.features import sift


def orb(gray: np.ndarray, max_keypoints: int) -> Dict[str, np.ndarray]:
    """ORB (Rublee et al. 2011): binary descriptors of 256 bits."""
    return _features(cv2.ORB.create(nfeatures=max_keypoints, fastThreshold=5), gray)


def kaze(gray: np.ndarray, max_keypoints: int) -> Dict[str, np.ndarray]:
    """KAZE (Alcantarilla et al. 2012): float descriptors of 64 entries. Not in OpenCV 5."""
    if not hasattr(cv2, "KAZE"):
        fix = "pip install 'opencv-python<5'"
        raise RequestError(f"OpenCV {cv2.__version__} has no KAZE, which 5.0 removed: {fix}")
    return _features(cv2.KAZE.create(), gray)


def _features(detector: cv2.Feature2D, gray: np.ndarray) -> Dict[str, np.ndarray]:
    points, descriptors = detector.detectAndCompute(gray, None)  # pyright: ignore
    values = sift.values_of(points)
    return {
        "keypoints": sift.positions(values),
        "scales": values["scale"],
        "angles": values["angle"],
        "scores": np.maximum(values["score"], 0.0),  # ORB: slightly negative in flat areas
        "descriptors": descriptors if points else np.empty((0, 1), np.uint8),
    }
