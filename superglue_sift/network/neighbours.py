"""Each keypoint's nearest neighbour by descriptor in the other image: what a classical matcher starts from.

As input of the network it spares the first layers the search for a candidate: they can weigh at once how distinctive it
is (Lowe's ratio, section 7.1 of his 2004 paper) and whether the candidates of other keypoints moved, turned and grew
alike. No gradient passes through it.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from superglue_sift.network.packing import Layout

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
        cosines = torch.stack([own.values, runner_up])
        found.append(Neighbours(own.indices, _described(cosines, own.indices, other.indices)))
    return found[0], found[1]


def _second(similarity: Tensor, best, axis: int) -> Tensor:
    """The largest cosine but one along `axis`; -inf where there is no other."""
    return similarity.scatter(axis, best.indices.unsqueeze(axis), -torch.inf).amax(axis)


def _described(cosines: Tensor, index: Tensor, back: Tensor) -> Tensor:
    """(..., M, 3), see `Neighbours`, from the two largest cosines (2, ..., M), `index` and that of the other image."""
    best, second = cosines.unbind(0)
    cosines = torch.stack([best, torch.where(second == -torch.inf, best, second)])
    distance, next_distance = (2.0 - 2.0 * cosines.clamp(-1.0, 1.0)).clamp(min=1e-6).sqrt().unbind(0)
    ratio = distance / next_distance.clamp(min=1e-6)
    itself = torch.arange(index.shape[-1], device=index.device)
    mutual = back.gather(-1, index) == itself
    return torch.stack([distance, ratio.clamp(max=1.0), mutual.to(best.dtype)], -1)


def neighbour_features(descriptors: Tensor, geometry: Tensor, layout: Layout) -> Tensor:
    """What the keypoint encoder is told of the nearest neighbours of a batch.

    Args:
        descriptors: packed unit descriptors of all images, images 0 first, (S, 128).
        geometry: packed, (S, 6): position, log score, log scale, cos and sin of the angle.

    Returns:
        (S, FEATURES): of `Neighbours` 3, position of the neighbour 2, log ratio of the scales 1, cos and sin of the
        angle between the orientations 2. Zeros where the other image is empty.
    """
    if layout.device.type != "cpu":
        return _by_parts(descriptors, geometry, layout)
    d, g = (t.split(layout.both.counts) for t in (descriptors, geometry))
    pairs = len(layout.sizes)
    found = [_of_pair(*each) for each in zip(d, d[pairs:], g, g[pairs:])]
    # a rank may have no pair at all
    return torch.cat([own for side in zip(*found) for own in side]) if found else geometry.new_zeros((0, FEATURES))


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


def _by_parts(descriptors: Tensor, geometry: Tensor, layout: Layout) -> Tensor:
    """On a GPU: cosines of the pairs of each part of the layout at once, all else of the whole batch."""
    shape = (2, len(layout.sizes), layout.both.width)
    cosines = descriptors.new_zeros((2, *shape))  # the largest and the second
    index = torch.zeros(shape, dtype=torch.int64, device=layout.device)
    valid, halves = layout.both.valid.view(shape), layout.halves(descriptors)
    for part in layout.parts:
        sides = [side.pad(t[rows]) for side, t, rows in zip(part.sides, halves, part.rows)]
        similarity = torch.bmm(sides[0], sides[1].transpose(1, 2))
        if not all(side.full for side in part.sides):
            shown = [valid[i, part.pairs, : side.width] for i, side in enumerate(part.sides)]
            similarity.masked_fill_(~(shown[0].unsqueeze(2) & shown[1].unsqueeze(1)), -torch.inf)
        for i, side in enumerate(part.sides):
            axis, there = (-1, -2)[i], (i, part.pairs, slice(side.width))
            torch.max(similarity, axis, out=(cosines[0][there], index[there]))
            without = similarity.scatter(axis, index[there].unsqueeze(axis), -torch.inf)
            torch.amax(without, axis, out=cosines[1][there])
    found = Neighbours(index, _described(cosines, index, index.flip(0)))
    seen = layout.both.pad(geometry).view(*shape, geometry.shape[1])
    features = layout.both.pack(_relative(seen, seen.flip(0), found).flatten(0, 1))
    return features if layout.alone is None else features.masked_fill(layout.alone.unsqueeze(1), 0.0)


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
