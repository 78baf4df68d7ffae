"""Keypoint records of any extractor, and the meaning of their descriptors.

A record holds x, y, scale, angle and score as in `sift.KEYPOINT`, then a descriptor of one of three
kinds:

    sift    `descriptor` (128,) uint8    OpenCV's SIFT; compared as RootSIFT; may have a second
                                         (`orientation`)
    float   `descriptor` (D,) float32    SuperPoint, KAZE, ...: normalized to unit length
    binary  `bits` (D / 8,) uint8        ORB, BRISK, ...: D bits, 8 per byte; compared by Hamming
                                         distance

The network sees unit vectors of all three. Bits are padded with zeros to a multiple of 32, so that
records can be read as float32.
"""

from __future__ import annotations

import math
from typing import Tuple

import numpy as np
import torch
from torch import Tensor, nn

from superglue_sift.sift import GEOMETRY, KEYPOINT, ORIENTED
from superglue_sift.torch_compat import floats_of_bytes


def record_dtype(kind: str, dim: int) -> np.dtype:
    """Record dtype for descriptors of `dim` entries, or bits."""
    if kind == "sift":
        return ORIENTED
    field = ("bits", "u1", (dim // 8,)) if kind == "binary" else ("descriptor", "<f4", (dim,))
    return np.dtype([*((name, "<f4") for name in GEOMETRY), field])


def kind_of(dtype: np.dtype) -> Tuple[str, int]:
    """(kind, dim) of a dtype from `record_dtype`. Raises ValueError for any other."""
    if dtype in (KEYPOINT, ORIENTED):
        return "sift", 128
    for kind, field, bits in (("binary", "bits", 8), ("float", "descriptor", 1)):
        dim = bits * math.prod(dtype[field].shape) if field in (dtype.names or ()) else 0
        if dim and dtype == record_dtype(kind, dim):
            return kind, dim
    raise ValueError(f"{dtype}: not a record of keypoints")


def descriptors_of(records: np.ndarray) -> np.ndarray:
    """The (first) descriptors of (n,) records: (n, D) float32 or uint8, for bits (n, D / 8)
    uint8.
    """
    return records["bits" if "bits" in (records.dtype.names or ()) else "descriptor"]


def unit_vectors(data: Tensor, kind: str, dim: int) -> Tensor:
    """Descriptors as unit vectors, float32 (..., dim); zeros stay zeros.

    sift: RootSIFT. float: divided by their length. binary: every bit becomes -1 or +1, so that the
    cosine at Hamming distance h is 1 - 2 h / dim. data: (..., K) uint8, the bytes of records from
    the descriptor on (`PairBatch.descriptors0`).
    """
    if kind == "sift":
        return root_sift(data)
    if kind == "float":
        return nn.functional.normalize(floats_of_bytes(data), dim=-1)
    # Highest bit first, as numpy.unpackbits
    place = 2 ** torch.arange(7, -1, -1, device=data.device)
    bits = (data.unsqueeze(-1) & place.to(torch.uint8)) != 0
    return (bits.flatten(-2).float() * 2 - 1) / math.sqrt(dim)


def root_sift(descriptors: Tensor) -> Tensor:
    """RootSIFT of uint8 (or float) SIFT descriptors (..., 128): float32, unit length; zeros stay
    zeros.
    """
    values = descriptors.float()
    return (values / values.sum(-1, keepdim=True).clamp(min=1.0)).sqrt()


def root_sift_of(descriptors: np.ndarray) -> np.ndarray:
    """`root_sift` of an array (n, 128), bitwise equal on every machine, which torch's square root
    is not.
    """
    values = descriptors.astype(np.float32)
    return np.sqrt(values / np.maximum(values.sum(axis=1, keepdims=True), 1.0))


def whole_sift(descriptors: np.ndarray) -> np.ndarray:
    """Convert RootSIFT (N, 128), from 0 to 1, to SIFT from 0 to 255; SIFT is returned unchanged.

    RootSIFT is the square root of SIFT divided by its sum; OpenCV scales SIFT to a length of 512.
    """
    values = np.asarray(descriptors, np.float32)
    if not values.size or values.max() > 1.0 + 1e-3:
        return values
    squares = np.square(values)
    length = np.maximum(np.linalg.norm(squares, axis=1, keepdims=True), 1e-12)
    return np.minimum(np.rint(512.0 * squares / length), 255.0)
