"""Convert SIFT descriptors to RootSIFT and back."""

from __future__ import annotations

import numpy as np


def to_root_sift(descriptors: np.ndarray) -> np.ndarray:
    """Convert SIFT descriptors (n, 128) to RootSIFT (Arandjelovic 2012).

    Returns:
        (n, 128) float32 of length 1. Zeros stay zeros. The bytes are the same on every machine.
    """
    values = descriptors.astype(np.float32)
    return np.sqrt(values / np.maximum(values.sum(axis=1, keepdims=True), 1.0))


def to_sift(descriptors: np.ndarray) -> np.ndarray:
    """Convert RootSIFT (n, 128), from 0 to 1, to SIFT from 0 to 255. Return SIFT unchanged.

    RootSIFT is the square root of SIFT divided by its sum. OpenCV scales SIFT to a length of 512.
    """
    values = np.asarray(descriptors, np.float32)
    if not values.size or values.max() > 1.0 + 1e-3:
        return values
    squares = np.square(values)
    length = np.maximum(np.linalg.norm(squares, axis=1, keepdims=True), 1e-12)
    return np.minimum(np.rint(512.0 * squares / length), 255.0)
