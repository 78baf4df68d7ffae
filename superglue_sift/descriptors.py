"""What a keypoint record holds, whoever found it, and what its descriptor means.

x, y, scale, angle and score as in `sift.KEYPOINT`, then the descriptor, of one of three kinds:

    sift    `descriptor` (128,) uint8    OpenCV's SIFT; compared as RootSIFT; often a second (`orientation`)
    float   `descriptor` (D,) float32    SuperPoint, KAZE, ...: a direction, taken to unit length
    binary  `bits` (D / 8,) uint8        ORB, BRISK, ...: D bits, 8 in a byte; compared by Hamming distance

Of all three the network sees unit vectors. D of bits is a multiple of 32, filled up by
zeros, so that records can be read as float32.
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
    """The record of a keypoint whose descriptor has `dim` entries, of a binary one bits."""
    if kind == "sift":
        return ORIENTED
    field = ("bits", "u1", (dim // 8,)) if kind == "binary" else ("descriptor", "<f4", (dim,))
    return np.dtype([*((name, "<f4") for name in GEOMETRY), field])


def kind_of(dtype: np.dtype) -> Tuple[str, int]:
    """(kind, dim) of what `record_dtype` gave. Raises ValueError for any other dtype."""
    if dtype in (KEYPOINT, ORIENTED):
        return "sift", 128
    for kind, field, bits in (("binary", "bits", 8), ("float", "descriptor", 1)):
        dim = bits * math.prod(dtype[field].shape) if field in (dtype.names or ()) else 0
        if dim and dtype == record_dtype(kind, dim):
            return kind, dim
    raise ValueError(f"{dtype}: no record of keypoints")


def descriptors_of(records: np.ndarray) -> np.ndarray:
    """(n, D) float32 or uint8, of bits (n, D / 8) uint8: the (first) descriptors of (n,) records."""
    return records["bits" if "bits" in (records.dtype.names or ()) else "descriptor"]


def unit_vectors(data: Tensor, kind: str, dim: int) -> Tensor:
    """Descriptors as the network sees them, float32 (..., dim) of length 1; of zeros zeros.

    sift: RootSIFT. float: divided by their length. binary: every bit -1 or +1, so that the cosine of two that differ in
    h of `dim` bits is 1 - 2 h / dim. data: (..., K) uint8, records from the descriptor on (`PairBatch.descriptors0`).
    """
    if kind == "sift":
        return root_sift(data)
    if kind == "float":
        return nn.functional.normalize(floats_of_bytes(data), dim=-1)
    place = 2 ** torch.arange(7, -1, -1, device=data.device)  # as numpy.unpackbits: the highest bit first
    bits = (data.unsqueeze(-1) & place.to(torch.uint8)) != 0
    return (bits.flatten(-2).float() * 2 - 1) / math.sqrt(dim)


def root_sift(descriptors: Tensor) -> Tensor:
    """RootSIFT of uint8 (or float) SIFT descriptors (..., 128): float32, unit length; zeros stay zeros."""
    values = descriptors.float()
    return (values / values.sum(-1, keepdim=True).clamp(min=1.0)).sqrt()


def root_sift_of(descriptors: np.ndarray) -> np.ndarray:
    """`root_sift` of an array (n, 128), to the last bit the same on every machine: torch's square root is not."""
    values = descriptors.astype(np.float32)
    return np.sqrt(values / np.maximum(values.sum(axis=1, keepdims=True), 1.0))
