"""What a keypoint record holds, whoever found it, and what its descriptor means.

x, y, scale, angle and score as in `sift.KEYPOINT`, then the descriptor, of one of three kinds:

    sift    `descriptor` (128,) uint8    OpenCV's SIFT; compared as RootSIFT
    float   `descriptor` (D,) float32    SuperPoint, KAZE, ...: a direction, taken to unit length
    binary  `bits` (D / 8,) uint8        ORB, BRISK, ...: D bits, 8 in a byte; compared by Hamming distance

Of all three the network sees unit vectors (`superglue.unit_vectors`). D of bits is a multiple of 32, filled up by
zeros, so that records can be read as float32.
"""

from __future__ import annotations

import math
from typing import Tuple

import numpy as np

from superglue_sift.sift import KEYPOINT

_GEOMETRY = ("x", "y", "scale", "angle", "score")


def record_dtype(kind: str, dim: int) -> np.dtype:
    """The record of a keypoint whose descriptor has `dim` entries, of a binary one bits."""
    if kind == "sift":
        return KEYPOINT
    field = ("bits", "u1", (dim // 8,)) if kind == "binary" else ("descriptor", "<f4", (dim,))
    return np.dtype([*((name, "<f4") for name in _GEOMETRY), field])


def kind_of(dtype: np.dtype) -> Tuple[str, int]:
    """(kind, dim) of what `record_dtype` gave. Raises ValueError for any other dtype."""
    if dtype == KEYPOINT:
        return "sift", 128
    for kind, field, bits in (("binary", "bits", 8), ("float", "descriptor", 1)):
        dim = bits * math.prod(dtype[field].shape) if field in (dtype.names or ()) else 0
        if dim and dtype == record_dtype(kind, dim):
            return kind, dim
    raise ValueError(f"{dtype}: no record of keypoints")


def descriptors_of(records: np.ndarray) -> np.ndarray:
    """(n, D) float32 or uint8, of bits (n, D / 8) uint8: the descriptors of (n,) records."""
    return records["bits" if "bits" in (records.dtype.names or ()) else "descriptor"]
