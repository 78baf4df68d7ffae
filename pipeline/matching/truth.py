"""Ground truth: which keypoints show the same point, from coordinates and a homography alone.

Used by the loss, by validation and by evaluation alike, so that there is one definition of right.
"""

from __future__ import annotations

from typing import List, NamedTuple

import torch
from torch import Tensor

from pipeline.matching.homography import transform

UNMATCHED = -1  # has no counterpart: belongs in the dustbin
IGNORED = -2  # neither right nor wrong: too near to be unmatched, not near enough to be a match


class Truth(NamedTuple):
    """Of one pair: matches0 (M,) int64, the index in image 1, or UNMATCHED or IGNORED; matches1 (N,) back."""

    matches0: Tensor
    matches1: Tensor


def reprojection_error(keypoints0: Tensor, keypoints1: Tensor, H_0to1: Tensor) -> Tensor:
    """Symmetric error of each two keypoints: the larger of the two directions, px.

    Args:
        keypoints0 (M, 2), keypoints1 (N, 2) px; H_0to1 (3, 3), float64.

    Returns:
        (M, N) float32.
    """
    H = H_0to1.double()
    forward = transform(keypoints0.double(), H).float()
    back = transform(keypoints1.double(), torch.linalg.inv(H)).float()
    # direct differences: the matrix-product form of cdist loses the third digit at 640 px
    exact = "donot_use_mm_for_euclid_dist"
    error = torch.cdist(forward, keypoints1.float(), compute_mode=exact)
    error = torch.maximum(error, torch.cdist(keypoints0.float(), back, compute_mode=exact))
    return torch.nan_to_num(error, nan=float("inf"), posinf=float("inf"))


def _outside(keypoints: Tensor, H: Tensor, size: Tensor) -> Tensor:
    """(N,) bool: mapped by H, the point falls outside an image of `size` (width, height)."""
    mapped = transform(keypoints.double(), H.double())
    inside = (mapped >= -0.5) & (mapped <= size.double() - 0.5)
    return ~inside.all(-1)


def pair_truth(
    keypoints0: Tensor,
    keypoints1: Tensor,
    H_0to1: Tensor,
    size0: Tensor,
    size1: Tensor,
    positive_px: float = 3.0,
    negative_px: float = 5.0,
) -> Truth:
    """Ground truth of one pair.

    Mutual nearest neighbours under `positive_px` match. Of the rest, those that fall outside the other view
    or whose nearest counterpart is `negative_px` or more away are unmatched; what is left is ignored.

    Args:
        keypoints0 (M, 2), keypoints1 (N, 2): px, no padding; either may be empty.
        H_0to1: (3, 3) float64.
        size0, size1: (2,) width and height, px.
    """
    device = keypoints0.device
    matches0 = torch.full((len(keypoints0),), UNMATCHED, dtype=torch.int64, device=device)
    matches1 = torch.full((len(keypoints1),), UNMATCHED, dtype=torch.int64, device=device)
    if len(keypoints0) == 0 or len(keypoints1) == 0:
        return Truth(matches0, matches1)
    error = reprojection_error(keypoints0, keypoints1, H_0to1)
    best0, best1 = error.min(1), error.min(0)
    rows = torch.arange(len(keypoints0), device=device)
    positive = (best1.indices[best0.indices] == rows) & (best0.values < positive_px)
    outside0 = _outside(keypoints0, H_0to1, size1)
    outside1 = _outside(keypoints1, torch.linalg.inv(H_0to1.double()), size0)
    matches0[(best0.values < negative_px) & ~outside0] = IGNORED
    matches1[(best1.values < negative_px) & ~outside1] = IGNORED
    left, right = rows[positive], best0.indices[positive]
    matches0[left], matches1[right] = right, left
    return Truth(matches0, matches1)


def ground_truth(batch, positive_px: float = 3.0, negative_px: float = 5.0) -> List[Truth]:
    """`pair_truth` of each pair of a PairBatch with homographies, without padding: B Truths."""
    return [
        pair_truth(
            batch.keypoints0[i, : int(batch.counts0[i])],
            batch.keypoints1[i, : int(batch.counts1[i])],
            batch.H_0to1[i],
            batch.image_size0[i],
            batch.image_size1[i],
            positive_px,
            negative_px,
        )
        for i in range(len(batch.counts0))
    ]
