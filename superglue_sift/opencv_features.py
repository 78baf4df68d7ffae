"""Two examples of features of your own, both from OpenCV: `superglue_sift.opencv_features:orb` and `...:kaze`.

`extractors.py` says what such a function must return.
"""

from __future__ import annotations

from typing import Dict

import cv2
import numpy as np

from superglue_sift.errors import RequestError


def orb(gray: np.ndarray, max_keypoints: int) -> Dict[str, np.ndarray]:
    """ORB (Rublee et al. 2011): binary descriptors of 256 bits."""
    return _found(cv2.ORB.create(nfeatures=max_keypoints, fastThreshold=5), gray)


def kaze(gray: np.ndarray, max_keypoints: int) -> Dict[str, np.ndarray]:
    """KAZE (Alcantarilla et al. 2012): float descriptors of 64 entries. RequestError where OpenCV has none."""
    if not hasattr(cv2, "KAZE"):
        raise RequestError(f"OpenCV {cv2.__version__} has no KAZE, which 5.0 took out: pip install 'opencv-python<5'")
    return _found(cv2.KAZE.create(), gray)


def _found(detector: cv2.Feature2D, gray: np.ndarray) -> Dict[str, np.ndarray]:
    points, descriptors = detector.detectAndCompute(gray, None)  # pyright: ignore
    values = np.array([(*p.pt, p.size, p.angle, p.response) for p in points], np.float32).reshape(-1, 5)
    return {
        "keypoints": values[:, :2],
        "scales": values[:, 2],
        "angles": values[:, 3],
        "scores": np.maximum(values[:, 4], 0.0),  # of ORB in flat places just below 0
        "descriptors": descriptors if points else np.empty((0, 1), np.uint8),
    }
