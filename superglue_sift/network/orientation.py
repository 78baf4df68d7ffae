"""By which of its orientations a SIFT keypoint is matched: that whose descriptor has the nearer one in the other view.

A keypoint has a descriptor for each strong orientation of its neighbourhood, and which is the stronger changes from
view to view. Lowe (2004, section 5) makes each a keypoint of its own; here a point stays one point, so that truth and
matches are one to one, and the pair of views decides. No gradient passes through it.
"""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Tuple

import torch
from torch import Tensor

from superglue_sift.batch import DESCRIPTOR_AT, Pair, PairBatch, from_pairs
from superglue_sift.descriptors import root_sift
from superglue_sift.network.packing import Layout
from superglue_sift.sift import KEYPOINT, ORIENTED
from superglue_sift.torch_compat import no_autocast

PADDED_BYTES = 256 << 20  # of one matrix of cosines, for the pairs that a GPU takes at a time
_ONE = KEYPOINT.itemsize
_ANGLE = slice(12, 16)  # bytes of a record, behind x, y and scale
_SECOND_ANGLE = slice(_ONE, _ONE + 4)


@torch.no_grad()
def choose_orientations(batch: PairBatch, layout: Optional[Layout] = None) -> PairBatch:
    """The batch with KEYPOINT records of ORIENTED ones; any other batch as it is. layout: of the batch, if at hand."""
    if batch.records0.shape[-1] != ORIENTED.itemsize:
        return batch
    sides = batch.records0, batch.records1
    with no_autocast(batch.device.type):
        if batch.device.type == "cpu":
            chosen = _one_by_one(*sides, batch.counts0.tolist(), batch.counts1.tolist())
        else:
            chosen = _by_parts(*sides, layout or Layout(batch))
    return dataclasses.replace(batch, records0=chosen[0], records1=chosen[1])


def choose_pair(pair: Pair) -> Pair:
    """`choose_orientations` of one pair: KEYPOINT records where it has ORIENTED ones."""
    if ORIENTED not in (pair.records0.dtype, pair.records1.dtype):
        return pair
    chosen = choose_orientations(from_pairs([pair]))
    counts = len(pair.records0), len(pair.records1)
    records = [
        t[0, :count].numpy().reshape(-1).view(KEYPOINT) for t, count in zip((chosen.records0, chosen.records1), counts)
    ]
    return Pair(records[0], records[1], pair.size0, pair.size1)


def _one_by_one(records0: Tensor, records1: Tensor, counts0: List[int], counts1: List[int]) -> Tuple[Tensor, Tensor]:
    """On a CPU, where only what has a second orientation costs anything."""
    chosen0, chosen1 = records0[..., :_ONE].clone(), records1[..., :_ONE].clone()
    for i, counts in enumerate(zip(counts0, counts1)):
        if min(counts) == 0:
            continue
        own = records0[i, : counts[0]], records1[i, : counts[1]]
        seconds = [r[:, _SECOND_ANGLE.stop :].any(1).nonzero()[:, 0] for r in own]
        if not any(map(len, seconds)):
            continue
        stacked = [torch.cat([_first(r), _second(r[rows])]) for r, rows in zip(own, seconds)]
        cosines = stacked[0] @ stacked[1].t()
        for chosen, r, rows, best in zip((chosen0[i], chosen1[i]), own, seconds, (cosines.amax(1), cosines.amax(0))):
            rows = rows[best[len(r) :] > best[rows]]
            chosen[rows] = _with_second(r[rows])
    return chosen0, chosen1


def _by_parts(records0: Tensor, records1: Tensor, layout: Layout) -> List[Tensor]:
    """On a GPU: cosines of the pairs of each part of the layout at once, all else of both sides at once."""
    tokens = layout.pack_sides(records0, records1)
    # of padding and of second descriptors that do not exist all entries and so all cosines are 0, the least there is
    unit = root_sift(torch.stack([tokens[:, DESCRIPTOR_AT:_ONE], tokens[:, _SECOND_ANGLE.stop :]], 1))
    halves = layout.halves(unit)
    best: Tuple[List[Tensor], List[Tensor]] = ([], [])
    for part in layout.parts:
        sides = [side.pad(t[rows]).flatten(1, 2) for side, t, rows in zip(part.sides, halves, part.rows)]
        found = [unit.new_empty(side.shape[:2]) for side in sides]
        pairs = max(1, PADDED_BYTES // (4 * sides[0].shape[1] * sides[1].shape[1]))
        for chunk in (slice(start, start + pairs) for start in range(0, len(sides[0]), pairs)):
            cosines = torch.bmm(sides[0][chunk], sides[1][chunk].transpose(1, 2))
            for axis, own in zip((2, 1), found):
                torch.amax(cosines, axis, out=own[chunk])
        for own, side, cosines in zip(best, part.sides, found):
            own.append(side.pack(cosines.unflatten(1, (-1, 2))))
    first, second = torch.cat([*best[0], *best[1]]).unbind(1)
    chosen = torch.where((second > first).unsqueeze(1), _with_second(tokens), tokens[:, :_ONE])
    return [side.pad(half) for side, half in zip(layout.sides, layout.halves(chosen))]


def _first(records: Tensor) -> Tensor:
    return root_sift(records[..., DESCRIPTOR_AT:_ONE])


def _second(records: Tensor) -> Tensor:
    return root_sift(records[..., _SECOND_ANGLE.stop :])


def _with_second(records: Tensor) -> Tensor:
    """(..., 148) bytes: angle and descriptor are those of the second orientation."""
    parts = (
        records[..., : _ANGLE.start],
        records[..., _SECOND_ANGLE],
        records[..., _ANGLE.stop : DESCRIPTOR_AT],
        records[..., _SECOND_ANGLE.stop :],
    )
    return torch.cat(parts, -1)
