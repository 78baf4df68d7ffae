"""Ground truth: which keypoints show the same point, from coordinates and a homography alone.

Used by the loss, by validation and by evaluation alike, so that there is one definition of right.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from superglue_sift.geometry import transform
from superglue_sift.packing import Layout

UNMATCHED = -1  # has no counterpart: belongs in the dustbin
IGNORED = -2  # neither right nor wrong: too near to be unmatched, not near enough to be a match
PADDED_BYTES = 64 << 20  # of one matrix of errors, for the pairs that a GPU takes at a time


class Truth(NamedTuple):
    """matches0 (..., M) int64: the index in image 1, or UNMATCHED or IGNORED (also padding); matches1 (..., N) back."""

    matches0: Tensor
    matches1: Tensor


def reprojection_error(keypoints0: Tensor, keypoints1: Tensor, H_0to1: Tensor) -> Tensor:
    """Symmetric error of each two keypoints (..., M, 2) and (..., N, 2) px: the larger of the two directions.

    H_0to1: (..., 3, 3). Returns (..., M, N) float32, px.
    """
    H = H_0to1.double()
    forward = _squared_distance(transform(keypoints0.double(), H).float(), keypoints1.float())
    back = _squared_distance(keypoints0.float(), transform(keypoints1.double(), _inverse(H)).float())
    return torch.maximum(forward, back).sqrt_()


def _squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """(..., M, N) of points a (..., M, 2) and b (..., N, 2); inf where one lies on the horizon.

    By direct differences: the matrix-product form loses the third digit at 640 px, and `torch.cdist` without it takes
    twice as long for points of the plane.
    """
    a, b = (torch.nan_to_num(t, nan=math.inf, posinf=math.inf, neginf=-math.inf) for t in (a, b))
    x, y = (a[..., :, None, axis] - b[..., None, :, axis] for axis in (0, 1))
    return x.square_().addcmul_(y, y)


def _inverse(H: Tensor) -> Tensor:
    """As `torch.linalg.inv`, without its device-to-host synchronisation to learn whether there is one."""
    return torch.linalg.inv_ex(H).inverse


def _outside(keypoints: Tensor, H: Tensor, size: Tensor) -> Tensor:
    """(..., N) bool: mapped by H, the point falls outside an image of `size` (..., 2) (width, height)."""
    mapped = transform(keypoints.double(), H)
    inside = (mapped >= -0.5) & (mapped <= size.double().unsqueeze(-2) - 0.5)
    return ~inside.all(-1)


def pair_truth(
    keypoints0: Tensor,
    keypoints1: Tensor,
    H_0to1: Tensor,
    size0: Tensor,
    size1: Tensor,
    positive_px: float = 3.0,
    negative_px: float = 5.0,
    valid: Optional[Tensor] = None,
) -> Truth:
    """Ground truth of one pair, or of several (with one more axis in front everywhere).

    Mutual nearest neighbours under `positive_px` match. Of the rest, those that fall outside the other view
    or whose nearest counterpart is `negative_px` or more away are unmatched; what is left is ignored.

    Args:
        keypoints0 (M, 2), keypoints1 (N, 2): px; either may be empty.
        H_0to1: (3, 3) float64.
        size0, size1: (2,) width and height, px.
        valid: (M, N) bool, where neither is padding; None: nowhere padding.
    """
    matches0 = torch.full_like(keypoints0[..., 0], UNMATCHED, dtype=torch.int64)
    matches1 = torch.full_like(keypoints1[..., 0], UNMATCHED, dtype=torch.int64)
    if min(matches0.shape[-1], matches1.shape[-1]) == 0:
        return Truth(matches0, matches1)
    error = reprojection_error(keypoints0, keypoints1, H_0to1)
    if valid is not None:
        error.masked_fill_(~valid, math.inf)
    best0, best1 = error.min(-1), error.min(-2)
    H = H_0to1.double()
    outside0, outside1 = _outside(keypoints0, H, size1), _outside(keypoints1, _inverse(H), size0)
    for matches, own, other, outside in ((matches0, best0, best1, outside0), (matches1, best1, best0, outside1)):
        itself = torch.arange(matches.shape[-1], device=matches.device)
        positive = (other.indices.gather(-1, own.indices) == itself) & (own.values < positive_px)
        matches.masked_fill_((own.values < negative_px) & ~outside, IGNORED)
        matches.copy_(torch.where(positive, own.indices, matches))
    return Truth(matches0, matches1)


def ground_truth(batch, positive_px: float = 3.0, negative_px: float = 5.0) -> Truth:
    """`pair_truth` of each pair of a PairBatch with homographies: (B, M) and (B, N), IGNORED where padded.

    Pair by pair on a CPU, whose cache then holds the errors; many together on a GPU.
    """
    keypoints0, keypoints1 = batch.keypoints0, batch.keypoints1
    matches0, matches1 = (
        torch.full(k.shape[:2], IGNORED, dtype=torch.int64, device=k.device) for k in (keypoints0, keypoints1)
    )
    limits = positive_px, negative_px
    if keypoints0.device.type == "cpu":
        for i, (m, n) in enumerate(zip(batch.counts0.tolist(), batch.counts1.tolist())):
            sides = keypoints0[i, :m], keypoints1[i, :n]
            sizes = batch.image_size0[i], batch.image_size1[i]
            matches0[i, :m], matches1[i, :n] = pair_truth(*sides, batch.H_0to1[i], *sizes, *limits)
        return Truth(matches0, matches1)
    for part in Layout(batch).parts:
        side0, side1 = part.sides
        pairs = max(1, PADDED_BYTES // (4 * side0.width * side1.width))
        for start in range(0, len(side0.counts), pairs):
            valid0, valid1 = side0.valid[start : start + pairs], side1.valid[start : start + pairs]
            rows = slice(part.pairs.start + start, part.pairs.start + start + len(valid0))
            points = keypoints0[rows, : side0.width], keypoints1[rows, : side1.width]
            sizes = batch.image_size0[rows], batch.image_size1[rows]
            shown = valid0[:, :, None] & valid1[:, None, :]
            found = pair_truth(*points, batch.H_0to1[rows], *sizes, *limits, shown)
            matches0[rows, : side0.width] = found.matches0.masked_fill(~valid0, IGNORED)
            matches1[rows, : side1.width] = found.matches1.masked_fill(~valid1, IGNORED)
    return Truth(matches0, matches1)
