"""Show by an example how to use other features: `superglue_sift.opencv_features:kaze`.

See `features/extractors.py`.
"""

from __future__ import annotations

from typing import Dict

import cv2
import numpy as np

from superglue_sift.errors import RequestError


def kaze(gray: np.ndarray, max_keypoints: int) -> Dict[str, np.ndarray]:
    """Extract KAZE features (Alcantarilla et al. 2012).

    Args:
        gray: image, (H, W) uint8.
        max_keypoints: number of keypoints of highest score that the caller keeps. KAZE itself has
            no such limit.

    Returns:
        The arrays that `features/extractors.py` describes. Descriptors are (N, 64) float32.

    Raises:
        RequestError: If OpenCV is version 5, which has no KAZE.
    """
    if not hasattr(cv2, "KAZE"):
        fix = "pip install 'opencv-python<5'"
        raise RequestError(f"OpenCV {cv2.__version__} has no KAZE, which 5.0 removed: {fix}")
    points, descriptors = cv2.KAZE.create().detectAndCompute(gray, None)  # pyright: ignore
    return {
        "keypoints": np.array([point.pt for point in points], np.float32).reshape(-1, 2),
        "scales": np.array([point.size for point in points], np.float32),
        "oris": np.array([point.angle for point in points], np.float32),
        "scores": np.array([point.response for point in points], np.float32),
        "descriptors": descriptors if points else np.empty((0, 64), np.float32),
    }
