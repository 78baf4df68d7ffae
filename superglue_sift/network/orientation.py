"""Choose one orientation of each SIFT keypoint: the one whose descriptor is closer to a descriptor of the other view.

SIFT has a descriptor for each strong orientation, and the strongest one changes between views. Lowe (2004, section 5)
creates a keypoint for each. Here a point remains one keypoint, so that truth and matches are one to one, and its
orientation depends on the pair of views. No gradient passes through this choice.
"""

from __future__ import annotations

import dataclasses
from typing import Iterator, List, Optional, Tuple

import torch
from torch import Tensor

from superglue_sift.batch import DESCRIPTOR_AT, Pair, PairBatch, from_pairs
from superglue_sift.descriptors import root_sift
from superglue_sift.network.packing import Layout
from superglue_sift.sift import KEYPOINT, ORIENTED
from superglue_sift.torch_compat import no_autocast

MAX_BYTES = 256 << 20  # of the cosines that are held at a time
_ONE = KEYPOINT.itemsize
_ANGLE = slice(12, 16)  # bytes of a record, behind x, y and scale
_SECOND_ANGLE = slice(_ONE, _ONE + 4)


@torch.no_grad()
def choose_orientations(batch: PairBatch, layout: Optional[Layout] = None) -> PairBatch:
    """Replace ORIENTED records by KEYPOINT records; other batches are returned unchanged.

    layout: of the batch, if known.
    """
    if batch.records0.shape[-1] != ORIENTED.itemsize:
        return batch
    with no_autocast(batch.device.type):
        records0, records1 = _chosen(batch.records0, batch.records1, layout or Layout(batch))
    return dataclasses.replace(batch, records0=records0, records1=records1)


def choose_pair(pair: Pair) -> Pair:
    """`choose_orientations` for one pair."""
    if ORIENTED not in (pair.records0.dtype, pair.records1.dtype):
        return pair
    chosen = choose_orientations(from_pairs([pair]))
    counts = len(pair.records0), len(pair.records1)
    records = [
        t[0, :count].numpy().reshape(-1).view(KEYPOINT) for t, count in zip((chosen.records0, chosen.records1), counts)
    ]
    return Pair(records[0], records[1], pair.size0, pair.size1)


def _chosen(records0: Tensor, records1: Tensor, layout: Layout) -> List[Tensor]:
    """Records (B, N, 280) of both sides to (B, N, 148). Cosines are computed for each part of the layout."""
    tokens = layout.pack_sides(records0, records1)  # (S, 280)
    # (S, 2, 128). Padding and missing second descriptors are zero, so their cosine is the minimum, 0.
    unit = root_sift(torch.stack([tokens[:, DESCRIPTOR_AT:_ONE], tokens[:, _SECOND_ANGLE.stop :]], 1))
    halves = layout.halves(unit)
    best: Tuple[List[Tensor], List[Tensor]] = ([], [])
    for part in layout.parts:
        # (pairs, 2 m, 128) and (pairs, 2 n, 128): both orientations of a keypoint are adjacent
        sides = [side.pad(t[rows]).flatten(1, 2) for side, t, rows in zip(part.sides, halves, part.rows)]
        cosines = [unit.new_empty(side.shape[:2]) for side in sides]
        for pairs, rows in _chunks(*sides):
            products = torch.bmm(sides[0][pairs, rows], sides[1][pairs].transpose(1, 2))  # (pairs, rows, 2 n)
            torch.amax(products, 2, out=cosines[0][pairs, rows])
            if rows.start == 0:
                torch.amax(products, 1, out=cosines[1][pairs])
            else:
                torch.maximum(cosines[1][pairs], products.amax(1), out=cosines[1][pairs])
        for side_best, largest in zip(best, cosines):
            side_best.append(largest.unflatten(1, (-1, 2)))
    first, second = layout.joined(best).unbind(1)  # (S,) each
    chosen = torch.where((second > first).unsqueeze(1), _with_second(tokens), tokens[:, :_ONE])
    return [side.pad(half) for side, half in zip(layout.sides, layout.halves(chosen))]


def _chunks(side0: Tensor, side1: Tensor) -> Iterator[Tuple[slice, slice]]:
    """Slices of pairs and of their rows in `side0` (B, 2 m, 128), whose cosines with `side1` fit into MAX_BYTES."""
    fitting = max(1, MAX_BYTES // (4 * side1.shape[1]))  # rows
    pairs = max(1, fitting // side0.shape[1])
    for start in range(0, len(side0), pairs):
        for first in range(0, side0.shape[1], fitting):
            yield slice(start, start + pairs), slice(first, first + fitting)


def _with_second(records: Tensor) -> Tensor:
    """Records (..., 148) with the angle and the descriptor of the second orientation."""
    parts = (
        records[..., : _ANGLE.start],
        records[..., _SECOND_ANGLE],
        records[..., _ANGLE.stop : DESCRIPTOR_AT],
        records[..., _SECOND_ANGLE.stop :],
    )
    return torch.cat(parts, -1)
