"""What the network sees of keypoints, all of order one. No gradient passes through it.

**Descriptors** are unit vectors (`unit_vectors`).

**Orientation.** SIFT has a descriptor for each strong orientation, and the strongest one changes
between views. Lowe (2004, section 5) creates a keypoint for each. Here a point remains one
keypoint, so that truth and matches are one to one, and its orientation is the one whose descriptor
is closer to a descriptor of the other image (`choose_orientations`).

**Nearest neighbours** by descriptor in the other image (`neighbour_features`). The first layers
then need not search for candidates: they can compare how distinctive these are (Lowe's ratio,
section 7.1), and whether other candidates moved, rotated and scaled alike.
"""

from __future__ import annotations

import dataclasses
import math
from typing import List, Tuple

import torch
from torch import Tensor, nn

from superglue_sift.batch import DESCRIPTOR_AT, Images, Keypoints, Pair, PairBatch, from_pairs
from superglue_sift.sift import KEYPOINT, ORIENTED
from superglue_sift.torch_compat import floats_of_bytes, no_autocast

# Typical SIFT values at 512x384
TYPICAL_SCORE = 0.03
TYPICAL_SCALE = 4.0
NEIGHBOUR_FEATURES = 8  # per keypoint, see `neighbour_features`
MAX_BYTES = 256 << 20  # of the cosines that are held at a time
_ONE = KEYPOINT.itemsize
_ANGLE = slice(12, 16)  # bytes of a record, behind x, y and scale
_SECOND_ANGLE = slice(_ONE, _ONE + 4)


def unit_vectors(data: Tensor, kind: str, dim: int) -> Tensor:
    """Descriptors as unit vectors, float32 (..., dim); zeros stay zeros.

    sift: RootSIFT. float: divided by their length. binary: every bit becomes -1 or +1, so that the
    cosine at Hamming distance h is 1 - 2 h / dim. data: (..., K) uint8, the bytes of records from
    the descriptor on (`PairBatch.descriptors0`).
    """
    if kind == "sift":
        return root_sift(data)
    if kind == "float":
        return nn.functional.normalize(floats_of_bytes(data), dim=-1)
    # Highest bit first, as numpy.unpackbits
    place = 2 ** torch.arange(7, -1, -1, device=data.device)
    bits = (data.unsqueeze(-1) & place.to(torch.uint8)) != 0
    return (bits.flatten(-2).float() * 2 - 1) / math.sqrt(dim)


def root_sift(descriptors: Tensor) -> Tensor:
    """RootSIFT of uint8 (or float) SIFT descriptors (..., 128): float32, unit length; zeros stay
    zeros.
    """
    values = descriptors.float()
    return (values / values.sum(-1, keepdim=True).clamp(min=1.0)).sqrt()


def geometry_of(keypoints: Keypoints, scale_angle: bool) -> Tensor:
    """(T, 3 or 6), each of order one: position, log score, log scale, direction."""
    size = keypoints.image_size
    position = (keypoints.positions - (size - 1) / 2) / (size.amax(-1, keepdim=True) / 2)
    score = (keypoints.scores.clamp(min=1e-6) / TYPICAL_SCORE).log().unsqueeze(-1)
    if not scale_angle:
        return torch.cat([position, score], -1)
    scale = (keypoints.scales.clamp(min=1e-3) / TYPICAL_SCALE).log().unsqueeze(-1)
    angle = torch.deg2rad(keypoints.angles).unsqueeze(-1)
    return torch.cat([position, score, scale, angle.cos(), angle.sin()], -1)


@torch.no_grad()
def choose_orientations(batch: PairBatch) -> PairBatch:
    """Replace ORIENTED records by KEYPOINT records; other batches are returned unchanged."""
    if batch.records0.shape[-1] != ORIENTED.itemsize:
        return batch
    with no_autocast(batch.device.type):
        units = [_both_units(records) for records in (batch.records0, batch.records1)]
        best0, best1 = _largest_cosines(*units)
        records0 = _choose(batch.records0, best0)
        records1 = _choose(batch.records1, best1)
    return dataclasses.replace(batch, records0=records0, records1=records1)


def choose_pair(pair: Pair) -> Pair:
    """`choose_orientations` for one pair."""
    if ORIENTED not in (pair.records0.dtype, pair.records1.dtype):
        return pair
    chosen = choose_orientations(from_pairs([pair]))
    records0, records1 = (
        records[0, :count].numpy().reshape(-1).view(KEYPOINT)
        for records, count in (
            (chosen.records0, len(pair.records0)),
            (chosen.records1, len(pair.records1)),
        )
    )
    return Pair(records0, records1, pair.size0, pair.size1)


def _both_units(records: Tensor) -> Tensor:
    """RootSIFT of both orientations of each keypoint, which are adjacent, (B, 2 N, 128).

    Padding and missing second descriptors are zero, so their cosine is the minimum, 0.
    """
    return root_sift(
        torch.stack(
            [records[..., DESCRIPTOR_AT:_ONE], records[..., _SECOND_ANGLE.stop :]], 2
        ).flatten(1, 2)
    )


def _largest_cosines(units0: Tensor, units1: Tensor) -> Tuple[Tensor, Tensor]:
    """Largest cosine of each orientation with any of the other image: (B, M, 2) and (B, N, 2)."""
    best0 = units0.new_empty(units0.shape[:2])
    best1 = units1.new_zeros(units1.shape[:2])
    fitting = max(1, MAX_BYTES // (4 * units1.shape[1]))  # rows
    pairs = max(1, fitting // units0.shape[1])
    for start in range(0, len(units0), pairs):
        chunk = slice(start, start + pairs)
        for first in range(0, units0.shape[1], fitting):
            rows = slice(first, first + fitting)
            # (pairs, rows, 2 N)
            cosines = torch.bmm(units0[chunk, rows], units1[chunk].transpose(1, 2))
            best0[chunk, rows] = cosines.amax(2)
            torch.maximum(best1[chunk], cosines.amax(1), out=best1[chunk])
    return best0.unflatten(1, (-1, 2)), best1.unflatten(1, (-1, 2))


def _choose(records: Tensor, best: Tensor) -> Tensor:
    """Records (B, N, 280) to (B, N, 148), with angle and descriptor of the better one."""
    first, second = best.unbind(2)
    parts = (
        records[..., : _ANGLE.start],
        records[..., _SECOND_ANGLE],
        records[..., _ANGLE.stop : DESCRIPTOR_AT],
        records[..., _SECOND_ANGLE.stop :],
    )
    return torch.where((second > first).unsqueeze(2), torch.cat(parts, -1), records[..., :_ONE])


@torch.no_grad()
def neighbour_features(descriptors: Tensor, geometry: Tensor, images: Images) -> Tensor:
    """Inputs of the keypoint encoder from each keypoint's nearest neighbour in the other image.

    Args:
        descriptors: unit descriptors of all keypoints, (T, 128).
        geometry: (T, 6): position, log score, log scale, cos and sin of the angle.

    Returns:
        (T, 8): distance of the descriptors, its ratio to that of the second nearest (1
        without one), whether they are mutual nearest neighbours; position of the neighbour 2, log
        ratio of the scales, cos and sin of the angle between the orientations. Zeros if the other
        image is empty.
    """
    units = images.split(descriptors)
    places = images.split(geometry)
    features: List[Tensor] = []
    for i in range(0, len(units), 2):
        pair = slice(i, i + 2)
        features += _features_of_pairs(units[pair], places[pair], images.masks[pair])
    return images.join(features)


def _features_of_pairs(
    units: List[Tensor], geometry: List[Tensor], masks: List[Tensor]
) -> List[Tensor]:
    """`neighbour_features` of both sides of a batch: (B, M, 8) and (B, N, 8)."""
    cosines = torch.bmm(units[0], units[1].transpose(1, 2))  # (B, M, N)
    cosines = cosines.masked_fill(~(masks[0].unsqueeze(2) & masks[1].unsqueeze(1)), -torch.inf)
    best = [cosines.max(2), cosines.max(1)]
    features = []
    for side, axis in ((0, 2), (1, 1)):
        values, nearest = best[side]
        second = cosines.scatter(axis, nearest.unsqueeze(axis), -torch.inf).amax(axis)
        second = torch.where(second == -torch.inf, values, second)
        both = torch.stack([values, second]).clamp(-1.0, 1.0)
        distance, next_distance = (2.0 - 2.0 * both).clamp(min=1e-6).sqrt().unbind(0)
        itself = torch.arange(nearest.shape[1], device=nearest.device)
        mutual = best[1 - side].indices.gather(1, nearest) == itself
        ours = geometry[side]
        theirs = geometry[1 - side].gather(1, nearest.unsqueeze(2).expand(-1, -1, ours.shape[2]))
        cos0 = ours[..., 4]
        sin0 = ours[..., 5]
        cos1 = theirs[..., 4]
        sin1 = theirs[..., 5]
        columns = [
            distance,
            (distance / next_distance.clamp(min=1e-6)).clamp(max=1.0),
            mutual.to(distance.dtype),
            theirs[..., 0],
            theirs[..., 1],
            theirs[..., 3] - ours[..., 3],
            cos0 * cos1 + sin0 * sin1,
            cos0 * sin1 - sin0 * cos1,
        ]
        occupied = masks[1 - side].any(1)[:, None, None]
        features.append(torch.stack(columns, 2).masked_fill(~occupied, 0.0))
    return features
