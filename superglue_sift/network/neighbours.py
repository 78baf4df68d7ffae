"""Nearest neighbours by descriptor in the other image, as an input of the network.

The first layers then need not search for candidates: they can compare how distinctive these are (Lowe's ratio, section
7.1 of his 2004 paper), and whether other candidates moved, rotated and scaled alike. No gradient passes through it.
"""

from __future__ import annotations

from typing import List, Tuple

import torch
from torch import Tensor

from superglue_sift.network.packing import Layout

FEATURES = 8  # per keypoint, see `neighbour_features`


def neighbour_features(descriptors: Tensor, geometry: Tensor, layout: Layout) -> Tensor:
    """Inputs of the keypoint encoder from each keypoint's nearest neighbour in the other image.

    Args:
        descriptors: packed unit descriptors of all images, images 0 first, (S, 128).
        geometry: packed, (S, 6): position, log score, log scale, cos and sin of the angle.

    Returns:
        (S, FEATURES): distance of the descriptors, its ratio to that of the second nearest (1 without one), whether
        they are mutual nearest neighbours; position of the neighbour 2, log ratio of the scales, cos and sin of the
        angle between the orientations. Zeros if the other image is empty.
    """
    cosines, nearest = _nearest(descriptors, layout)
    best, second = cosines.unbind(1)  # (S,) each
    cosines = torch.stack([best, torch.where(second == -torch.inf, best, second)])
    distance, next_distance = (2.0 - 2.0 * cosines.clamp(-1.0, 1.0)).clamp(min=1e-6).sqrt().unbind(0)
    ratio = (distance / next_distance.clamp(min=1e-6)).clamp(max=1.0)
    mutual = nearest.index_select(0, nearest) == torch.arange(nearest.shape[0], device=nearest.device)
    theirs = geometry.index_select(0, nearest)
    cos0, sin0, cos1, sin1 = geometry[:, 4], geometry[:, 5], theirs[:, 4], theirs[:, 5]
    features = torch.cat(
        [
            torch.stack([distance, ratio, mutual.to(distance.dtype)], 1),
            theirs[:, :2],
            theirs[:, 3:4] - geometry[:, 3:4],
            torch.stack([cos0 * cos1 + sin0 * sin1, cos0 * sin1 - sin0 * cos1], 1),
        ],
        1,
    )
    return features if layout.alone is None else features.masked_fill(layout.alone.unsqueeze(1), 0.0)


def _nearest(descriptors: Tensor, layout: Layout) -> Tuple[Tensor, Tensor]:
    """The two largest cosines of each keypoint, (S, 2), -inf if missing; row of the nearest neighbour, (S,)."""
    halves = layout.halves(descriptors)
    cosines: Tuple[List[Tensor], List[Tensor]] = ([], [])
    nearest: Tuple[List[Tensor], List[Tensor]] = ([], [])
    for part in layout.parts:
        sides = [side.pad(t[rows]) for side, t, rows in zip(part.sides, halves, part.rows)]
        similarity = torch.bmm(sides[0], sides[1].transpose(1, 2))  # (pairs, m, n)
        if not all(side.full for side in part.sides):
            valid0, valid1 = layout.valid(part)
            similarity = similarity.masked_fill_(~(valid0.unsqueeze(2) & valid1.unsqueeze(1)), -torch.inf)
        for i in (0, 1):
            axis = 2 - i
            best = similarity.max(axis)  # (pairs, m) of side 0, (pairs, n) of side 1
            second = similarity.scatter(axis, best.indices.unsqueeze(axis), -torch.inf).amax(axis)
            cosines[i].append(torch.stack([best.values, second], 2))
            nearest[i].append(best.indices)
    rows = layout.joined(nearest) + layout.partner_starts
    # rows of an empty last image would exceed the last row
    return layout.joined(cosines), rows.clamp(max=rows.shape[0] - 1)
