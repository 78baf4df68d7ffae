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
from superglue_sift.packing import Layout
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
    """On a GPU: the pairs of each part of the layout at once, without device-to-host synchronisation."""
    found = [r.new_zeros((*r.shape[:2], _ONE)) for r in (records0, records1)]
    for part in layout.parts:
        sides = [r[part.pairs, : side.width] for r, side in zip((records0, records1), part.sides)]
        pairs = max(1, PADDED_BYTES // (16 * sides[0].shape[1] * sides[1].shape[1]))
        for start in range(0, len(sides[0]), pairs):
            chosen = _chosen(*(r[start : start + pairs] for r in sides))
            for side, each in zip(found, chosen):
                side[part.pairs][start : start + pairs, : each.shape[1]] = each
    return found


def _chosen(*sides: Tensor) -> List[Tensor]:
    """(B, M, 148) and (B, N, 148) of (B, M, 280) and (B, N, 280)."""
    # of padding and of second descriptors that do not exist all entries and so all cosines are 0, the least there is
    stacked = [torch.cat([_first(r), _second(r)], 1) for r in sides]
    cosines = torch.bmm(stacked[0], stacked[1].transpose(1, 2))
    chosen = []
    for r, best in zip(sides, (cosines.amax(2), cosines.amax(1))):
        first, second = best.chunk(2, dim=1)
        chosen.append(torch.where((second > first).unsqueeze(-1), _with_second(r), r[..., :_ONE]))
    return chosen


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
