"""Ground truth: which keypoints show the same point, from coordinates and a homography alone.

Used by the loss, by validation and by evaluation alike, so that there is one definition of right.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from superglue_sift.geometry import transform
from superglue_sift.network.packing import Layout, Packing

UNMATCHED = -1  # has no counterpart: belongs in the dustbin
IGNORED = -2  # neither right nor wrong: too near to be unmatched, not near enough to be a match
PADDED_BYTES = 256 << 20  # of one matrix of errors, for the pairs that a GPU takes at a time
FAR = 1e38  # px, whose square is infinite


class Truth(NamedTuple):
    """matches0 (..., M) int64: the index in image 1, or UNMATCHED or IGNORED (also padding); matches1 (..., N) back."""

    matches0: Tensor
    matches1: Tensor


def _errors(points0: Tensor, points1: Tensor, mapped0: Tensor, mapped1: Tensor) -> Tensor:
    """Symmetric error of each two keypoints, (..., M, N) px: the larger of the two directions.

    points0 (..., M, 2), points1 (..., N, 2); mapped0, mapped1: where they are in the other view, without nan.
    """
    forward, back = _squared_distance(mapped0, points1), _squared_distance(points0, mapped1)
    return torch.maximum(forward, back, out=forward).sqrt_()


def _squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """(..., M, N) of points a (..., M, 2) and b (..., N, 2), not infinite both.

    By direct differences: the matrix-product form loses the third digit at 640 px, and `torch.cdist` without it takes
    twice as long for points of the plane.
    """
    x, y = (a[..., :, None, axis] - b[..., None, :, axis] for axis in (0, 1))
    return x.square_().addcmul_(y, y)


def _not_nan(points: Tensor) -> Tensor:
    """inf, far from everything, where one lies on the horizon."""
    return torch.nan_to_num(points, nan=math.inf, posinf=math.inf, neginf=-math.inf)


def _inverse(H: Tensor) -> Tensor:
    """As `torch.linalg.inv`, without its device-to-host synchronisation to learn whether there is one."""
    return torch.linalg.inv_ex(H).inverse


def _inside(mapped: Tensor, size: Tensor) -> Tensor:
    """(..., N) bool: points (..., N, 2) float64 lie in an image of `size` (..., 2) (width, height)."""
    return ((mapped >= -0.5) & (mapped <= size.double().unsqueeze(-2) - 0.5)).all(-1)


def _decided(best: Tensor, partner: Tensor, back: Tensor, inside: Tensor, limits: Tuple[float, float]) -> Tensor:
    """(..., M) int64 matches of one side or, with one more axis in front, of both.

    Args:
        best, partner: (..., M) the least error of each keypoint, and whose it is.
        back: (..., N) the same of the other side: int64 index.
        inside: (..., M) bool, where it lies in the other view.
        limits: px, see `pair_truth`.
    """
    positive_px, negative_px = limits
    itself = torch.arange(best.shape[-1], device=best.device)
    positive = (back.gather(-1, partner) == itself) & (best < positive_px)
    matches = torch.full_like(partner, UNMATCHED).masked_fill_((best < negative_px) & inside, IGNORED)
    return torch.where(positive, partner, matches)


def pair_truth(
    keypoints0: Tensor,
    keypoints1: Tensor,
    H_0to1: Tensor,
    size0: Tensor,
    size1: Tensor,
    positive_px: float = 3.0,
    negative_px: float = 5.0,
) -> Truth:
    """Ground truth of one pair, or of several (with one more axis in front everywhere).

    Mutual nearest neighbours under `positive_px` match. Of the rest, those that fall outside the other view
    or whose nearest counterpart is `negative_px` or more away are unmatched; what is left is ignored.

    Args:
        keypoints0 (M, 2), keypoints1 (N, 2): px; either may be empty.
        H_0to1: (3, 3) float64.
        size0, size1: (2,) width and height, px.
    """
    matches0 = torch.full_like(keypoints0[..., 0], UNMATCHED, dtype=torch.int64)
    matches1 = torch.full_like(keypoints1[..., 0], UNMATCHED, dtype=torch.int64)
    if min(matches0.shape[-1], matches1.shape[-1]) == 0:
        return Truth(matches0, matches1)
    H = H_0to1.double()
    mapped0, mapped1 = transform(keypoints0.double(), H), transform(keypoints1.double(), _inverse(H))
    error = _errors(*(_not_nan(t.float()) for t in (keypoints0, keypoints1, mapped0, mapped1)))
    best0, best1 = error.min(-1), error.min(-2)
    limits = positive_px, negative_px
    return Truth(
        _decided(best0.values, best0.indices, best1.indices, _inside(mapped0, size1), limits),
        _decided(best1.values, best1.indices, best0.indices, _inside(mapped1, size0), limits),
    )


def ground_truth(batch, positive_px: float = 3.0, negative_px: float = 5.0, layout: Optional[Layout] = None) -> Truth:
    """`pair_truth` of each pair of a PairBatch with homographies: (B, M) and (B, N), IGNORED where padded.

    Pair by pair on a CPU, whose cache then holds the errors; many together on a GPU. layout: of the batch, if at hand.
    """
    limits = positive_px, negative_px
    if batch.device.type != "cpu":
        return _by_parts(batch, limits, layout or Layout(batch))
    keypoints0, keypoints1 = batch.keypoints0, batch.keypoints1
    matches0, matches1 = (torch.full(k.shape[:2], IGNORED, dtype=torch.int64) for k in (keypoints0, keypoints1))
    for i, (m, n) in enumerate(zip(batch.counts0.tolist(), batch.counts1.tolist())):
        sides = keypoints0[i, :m], keypoints1[i, :n]
        sizes = batch.image_size0[i], batch.image_size1[i]
        matches0[i, :m], matches1[i, :n] = pair_truth(*sides, batch.H_0to1[i], *sizes, *limits)
    return Truth(matches0, matches1)


def _by_parts(batch, limits: Tuple[float, float], layout: Layout) -> Truth:
    """On a GPU: errors of the pairs of each part of the layout at once; all else of both sides of the batch at once."""
    widths = [side.width for side in layout.sides]
    packing = Packing(layout.both.counts, layout.device, max(widths))
    points = _stacked(batch.keypoints0, batch.keypoints1)  # (2, B, W, 2)
    H = batch.H_0to1.double()
    mapped = transform(points.double(), torch.stack([H, _inverse(H)]))
    inside = _inside(mapped, torch.stack([batch.image_size1, batch.image_size0]))
    padded = ~packing.valid.view(inside.shape)
    # far from everything, and never infinite both
    points = _not_nan(points).masked_fill_(padded.unsqueeze(-1), -FAR)
    mapped = _not_nan(mapped.float()).masked_fill_(padded.unsqueeze(-1), math.inf)
    best = torch.empty(inside.shape, device=layout.device)
    partner = torch.zeros(inside.shape, dtype=torch.int64, device=layout.device)
    for part in layout.parts:
        m, n = (side.width for side in part.sides)
        pairs = max(1, PADDED_BYTES // (4 * m * n))
        for start in range(part.pairs.start, part.pairs.stop, pairs):
            rows = slice(start, min(start + pairs, part.pairs.stop))
            error = _errors(points[0, rows, :m], points[1, rows, :n], mapped[0, rows, :m], mapped[1, rows, :n])
            torch.min(error, -1, out=(best[0, rows, :m], partner[0, rows, :m]))
            torch.min(error, -2, out=(best[1, rows, :n], partner[1, rows, :n]))
    matches = _decided(best, partner, partner.flip(0), inside, limits).masked_fill_(padded, IGNORED)
    return Truth(matches[0, :, : widths[0]], matches[1, :, : widths[1]])


def _stacked(side0: Tensor, side1: Tensor) -> Tensor:
    """(B, M, 2) and (B, N, 2) -> (2, B, max(M, N), 2), zeros where padded."""
    if side0.shape == side1.shape:
        return torch.stack([side0, side1])
    both = side0.new_zeros((2, len(side0), max(side0.shape[1], side1.shape[1]), 2))
    both[0, :, : side0.shape[1]], both[1, :, : side1.shape[1]] = side0, side1
    return both
