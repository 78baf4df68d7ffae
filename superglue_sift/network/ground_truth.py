"""Find the true matches of keypoints from their positions and a homography.

The loss, validation and evaluation share this definition of a correct match.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from superglue_sift.features.features import Features
from superglue_sift.geometry.two_view import transform
from superglue_sift.network.batch import get_mask
from superglue_sift.torch_compat import sqrt

UNMATCHED = -1  # the keypoint has no match and belongs in the dustbin
# Ignored: the error lies between the two thresholds.
IGNORED = -2
MAX_ERROR_BYTES = 256 << 20  # maximum memory for the errors of all pairs of keypoints
FAR = 1e38  # px; the square of this distance is infinite


class TrueMatches(NamedTuple):
    """True matches of keypoints.

    Attributes:
        matches0: (..., M) int64, the index in image 1, UNMATCHED or IGNORED. Padding is IGNORED.
        matches1: (..., N) int64, the index in image 0, UNMATCHED or IGNORED.
    """

    matches0: Tensor
    matches1: Tensor


def _compute_squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Compute squared distances (..., M, N) of points a (..., M, 2) and b (..., N, 2).

    At most one of two points may be infinite.
    """
    # Differences are computed directly. The form with a matrix product is wrong in the third digit
    # at 640 px, and `torch.cdist` without this form takes twice as long for 2D points.
    x, y = (a[..., :, None, axis] - b[..., None, :, axis] for axis in (0, 1))
    return x.square_().addcmul_(y, y)


def _is_inside_cell(points: Tensor, cell: Tensor) -> Tensor:
    """Return whether points lie in the photograph of a cell.

    Args:
        points: (..., N, 2) px.
        cell: (..., 3, 3), maps the photograph to the unit square.

    Returns:
        (..., N) bool.
    """
    mapped = transform(points.double(), cell)
    # Points on the horizon are nan, and not inside.
    return ((mapped >= 0.0) & (mapped <= 1.0)).all(-1)


def find_true_matches(
    images0: Features,
    images1: Features,
    H_0to1: Tensor,
    cells: Optional[Tensor] = None,
    positive_px: float = 3.0,
    negative_px: float = 5.0,
) -> TrueMatches:
    """Find the true matches of B pairs from their homographies.

    Keypoints match if they are mutual nearest neighbors and closer than `positive_px`. Other
    keypoints are unmatched if they lie outside the other view, or `negative_px` or more from their
    nearest neighbor. All others are ignored. Where a view also shows other photographs (`cells`),
    their keypoints have no neighbors.

    Args:
        images0, images1: the images of the pairs, with M and N keypoints.
        H_0to1: (B, 3, 3) float64, maps pixels of image 0 to image 1.
        cells: (B, 2, 3, 3) float64, maps pixels of image 0 and of image 1 to the unit square of the
            photograph that both show. Other photographs may lie outside the square. If None, each
            image shows one photograph only.
        positive_px: maximum error of a match, the larger one of both directions, in px.
        negative_px: minimum distance from an unmatched keypoint to its nearest neighbor, in px.

    Returns:
        For each keypoint, (B, M) and (B, N), the index of its match, UNMATCHED or IGNORED.

    Example:
        >>> import numpy as np
        >>> from superglue_sift.network.batch import make_batch
        >>> one = np.ones(2)
        >>> places = np.array([[10.0, 0.0], [20.0, 0.0]])
        >>> image = Features.of(places, one, one, one, np.full((2, 128), 9), (320, 240))
        >>> images0, images1 = make_batch([image]), make_batch([image.select(slice(1))])
        >>> find_true_matches(images0, images1, torch.eye(3)[None]).matches0
        tensor([[ 0, -1]])
    """
    masks = get_mask(images0), get_mask(images1)
    device = H_0to1.device
    M, N = (mask.shape[1] for mask in masks)
    W = max(M, N)
    # (B, M) and (B, N) -> (2, B, W)
    padded = ~torch.stack([pad(mask, (0, W - mask.shape[1])) for mask in masks])
    points, mapped, inside = _map_keypoints(images0, images1, H_0to1, cells, padded)
    # Find the nearest neighbor of each keypoint in the other view, (2, B, W).
    error = torch.empty(inside.shape, dtype=torch.float32, device=device)
    nearest = torch.zeros(inside.shape, dtype=torch.int64, device=device)
    # On a CPU, take one pair at a time, so that its errors stay in the cache.
    pairs = 1 if device.type == "cpu" else max(1, MAX_ERROR_BYTES // (4 * M * N))
    for start in range(0, len(H_0to1), pairs):
        rows = slice(start, start + pairs)
        # (b, M, N) px^2: the error of two keypoints is the larger one of both directions.
        squared = _compute_squared_distances(mapped[0, rows, :M], points[1, rows, :N])
        back = _compute_squared_distances(points[0, rows, :M], mapped[1, rows, :N])
        torch.maximum(squared, back, out=squared)
        del back  # Its memory is free for the matrices of the next pairs.
        torch.min(squared, -1, out=(error[0, rows, :M], nearest[0, rows, :M]))
        torch.min(squared, -2, out=(error[1, rows, :N], nearest[1, rows, :N]))
    error = sqrt(error)
    # Decide for each keypoint: match, unmatched or ignored. Two keypoints are mutual nearest
    # neighbors if the nearest neighbor of the nearest neighbor is the keypoint itself.
    itself = torch.arange(W, device=device)
    positive = (nearest.flip(0).gather(-1, nearest) == itself) & (error < positive_px)
    matches = torch.full_like(nearest, UNMATCHED).masked_fill_(
        (error < negative_px) & inside, IGNORED
    )
    matches = torch.where(positive, nearest, matches).masked_fill_(padded, IGNORED)
    return TrueMatches(matches[0, :, :M], matches[1, :, :N])


def _map_keypoints(
    images0: Features, images1: Features, H_0to1: Tensor, cells: Optional[Tensor], padded: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """Map the keypoints of each view to the other view.

    Padding, keypoints of other photographs, and points on the horizon get positions that are far
    from all keypoints.

    Args:
        images0, images1, H_0to1, cells: as for `find_true_matches`.
        padded: (2, B, W) bool, True for padding. W is the larger of M and N.

    Returns:
        For both views:
        - the keypoints, (2, B, W, 2) float32 px,
        - their positions in the other view, (2, B, W, 2) float32 px,
        - whether the other view shows them, (2, B, W) bool.
    """
    H = H_0to1.double()
    # Invert by cross products, as `two_view.inverse` does. There is no check for singular matrices,
    # since on a GPU it would wait for the device.
    cofactors = torch.cross(H.roll(-1, -2), H.roll(-2, -2), dim=-1)
    determinants = (H * cofactors).sum(-1, keepdim=True)  # The rows agree up to rounding.
    back = (cofactors / determinants).transpose(-1, -2)
    # (B, M, 2) and (B, N, 2) -> (2, B, W, 2)
    W = padded.shape[2]
    both = (images0.keypoints, images1.keypoints)
    points = torch.stack([pad(xy, (0, 0, 0, W - xy.shape[1])) for xy in both])
    mapped = transform(points.double(), torch.stack([H, back]))
    # (B, 2) -> (2, B, 1, 2): the size of the other view
    sizes = torch.stack([images1.image_size, images0.image_size]).double().unsqueeze(2)
    inside = ((mapped >= -0.5) & (mapped <= sizes - 0.5)).all(-1)  # (2, B, W)
    is_isolated = padded
    if cells is not None:
        cells = cells.transpose(0, 1)  # (2, B, 3, 3)
        is_isolated = padded | ~_is_inside_cell(points, cells)
        inside &= _is_inside_cell(mapped, cells.flip(0))
    # Points on the horizon are nan. The mapped positions become infinite and the keypoints FAR,
    # since inf - inf would be nan.
    mapped = torch.nan_to_num(mapped.float(), nan=math.inf, posinf=math.inf, neginf=-math.inf)
    mapped = mapped.masked_fill_(is_isolated.unsqueeze(-1), math.inf)
    return points.masked_fill_(is_isolated.unsqueeze(-1), -FAR), mapped, inside
