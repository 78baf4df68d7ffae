"""Each keypoint's nearest neighbour by descriptor in the other image: what a classical matcher starts from.

As input of the network it spares the first layers the search for a candidate: they can weigh at once how distinctive it
is (Lowe's ratio, section 7.1 of his 2004 paper) and whether the candidates of other keypoints moved, turned and grew
alike. No gradient passes through it.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from superglue_sift.packing import Layout

FEATURES = 8  # numbers for each keypoint, see `Neighbours`


class Neighbours(NamedTuple):
    """Of each keypoint: `index` (..., M) int64 into the other image; `features` (..., M, 3) float32.

    These are the distance of the unit descriptors, its ratio to that of the second nearest (1 without one), and whether
    the two are each other's nearest.
    """

    index: Tensor
    features: Tensor


def nearest(similarity: Tensor) -> Tuple[Neighbours, Neighbours]:
    """Of both images, from cosines (..., M, N) of their descriptors, -inf where padded; M and N at least 1."""
    best0, best1 = similarity.max(-1), similarity.max(-2)
    second = [_second(similarity, best0, -1), _second(similarity, best1, -2)]
    found = []
    for own, other, runner_up in ((best0, best1, second[0]), (best1, best0, second[1])):
        itself = torch.arange(own.indices.shape[-1], device=similarity.device)
        mutual = (other.indices.gather(-1, own.indices) == itself).float()
        cosines = own.values, runner_up
        distance, next_distance = ((2.0 - 2.0 * c.clamp(-1.0, 1.0)).clamp(min=1e-6).sqrt() for c in cosines)
        ratio = distance / next_distance.clamp(min=1e-6)
        found.append(Neighbours(own.indices, torch.stack([distance, ratio.clamp(max=1.0), mutual], -1)))
    return found[0], found[1]


def _second(similarity: Tensor, best, axis: int) -> Tensor:
    """The largest cosine but one along `axis`; the largest itself where there is no other."""
    second = similarity.scatter(axis, best.indices.unsqueeze(axis), -torch.inf).amax(axis)
    return torch.where(second == -torch.inf, best.values, second)


def neighbour_features(descriptors: List[Tensor], geometry: List[Tensor], layout: Layout) -> List[Tensor]:
    """What the keypoint encoder is told of the nearest neighbours of a batch.

    Args:
        descriptors: packed unit descriptors of images 0 and of images 1, (S0, 128) and (S1, 128).
        geometry: packed, (S0, 6) and (S1, 6): position, log score, log scale, cos and sin of the angle.

    Returns:
        (S0, FEATURES), (S1, FEATURES): of `Neighbours` 3, position of the neighbour 2, log ratio of the scales 1, cos
        and sin of the angle between the orientations 2. Zeros where the other image is empty.
    """
    if layout.device.type != "cpu":
        return _padded(descriptors, geometry, layout)
    sides = [[t.split(side.counts) for side, t in zip(layout.sides, each)] for each in (descriptors, geometry)]
    found: Tuple[List[Tensor], List[Tensor]] = ([], [])
    for pair in zip(*sides[0], *sides[1]):
        for side, features in enumerate(_of_pair(*pair)):
            found[side].append(features)
    # a rank may have no pair at all
    return [torch.cat(each) if each else g.new_zeros((0, FEATURES)) for each, g in zip(found, geometry)]


def _of_pair(d0: Tensor, d1: Tensor, g0: Tensor, g1: Tensor, cosines: Optional[Tensor] = None):
    """(..., M, FEATURES) and (..., N, FEATURES) of one pair, or of padded ones with their masked `cosines`."""
    if min(d0.shape[-2], d1.shape[-2]) == 0:
        return tuple(g.new_zeros((*g.shape[:-1], FEATURES)) for g in (g0, g1))
    neighbours = nearest(d0 @ d1.transpose(-1, -2) if cosines is None else cosines)
    return tuple(_relative(own, other, each) for own, other, each in zip((g0, g1), (g1, g0), neighbours))


def _relative(own: Tensor, other: Tensor, neighbours: Neighbours) -> Tensor:
    """(..., M, FEATURES) from both images' geometry and the neighbours of the first."""
    theirs = other.gather(-2, neighbours.index.unsqueeze(-1).expand(*neighbours.index.shape, other.shape[-1]))
    cos0, sin0, cos1, sin1 = own[..., 4], own[..., 5], theirs[..., 4], theirs[..., 5]
    turn = torch.stack([cos0 * cos1 + sin0 * sin1, cos0 * sin1 - sin0 * cos1], -1)
    return torch.cat([neighbours.features, theirs[..., :2], theirs[..., 3:4] - own[..., 3:4], turn], -1)


def _padded(descriptors: List[Tensor], geometry: List[Tensor], layout: Layout) -> List[Tensor]:
    """The pairs of each part of the layout at once, for a GPU."""
    found: Tuple[List[Tensor], List[Tensor]] = ([], [])
    for part in layout.parts:
        d, g = (
            [side.pad(t[rows]) for side, t, rows in zip(part.sides, each, part.rows)]
            for each in (descriptors, geometry)
        )
        features = padded_features(d, g, [side.valid for side in part.sides])
        for own, side, each in zip(found, part.sides, features):
            own.append(side.pack(each))
    return [torch.cat(each) for each in found]


def padded_features(descriptors: List[Tensor], geometry: List[Tensor], valid: List[Tensor]) -> List[Tensor]:
    """`neighbour_features` of padded tensors: (B, M, 128) and (B, N, 128), (B, M, 6) and (B, N, 6).

    valid: (B, M) and (B, N) bool. Returns (B, M, FEATURES), (B, N, FEATURES); where not valid they do not matter.
    """
    (d0, d1), (g0, g1), (valid0, valid1) = descriptors, geometry, valid
    shown = valid0[:, :, None] & valid1[:, None, :]
    cosines = torch.bmm(d0, d1.transpose(1, 2)).masked_fill(~shown, -torch.inf)
    features = _of_pair(d0, d1, g0, g1, cosines)
    both = (valid0.any(1) & valid1.any(1))[:, None, None]
    return [torch.where(both, f, torch.zeros_like(f)) for f in features]
