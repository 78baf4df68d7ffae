"""The ratio test (Lowe 2004) on unit descriptors, and a classical matcher for thousands of
keypoints.

The confidence of a match is one minus the ratio of its distance to that of the second nearest
neighbour. `neighbours` ranks some hundreds of keypoints exactly: the baselines of training and
evaluation. `ratio_matches` is the classical matcher of scenes: mutual nearest neighbours that
pass the test in both directions and are nearer than MAX_DISTANCE. The second nearest is searched
in the whole other image: within an epipolar band the test loses its meaning, wrong matches slide
along the line, and errors of the cameras triple.
"""

from __future__ import annotations

from typing import NamedTuple, Tuple

import numpy as np
import torch

from superglue_sift.descriptors import descriptors_of, kind_of, root_sift_of
from superglue_sift.sift import ORIENTED
from superglue_sift.torch_compat import byte_product, has_byte_products

RATIO = 0.8  # of distances
MAX_DISTANCE = 0.8  # between descriptors of unit length
BLOCK = 256  # rows of a product: 8 MiB of it at 8,192 keypoints, which stays in the cache
# Entries are rounded to 1 / STEPS if none exceeds 127 / STEPS, which is rare in RootSIFT
STEPS = 360.0
MIN_PRODUCT = -(2**30)  # less than any product
ROUNDING = 1e-6  # of 1 - cosine: two copies of a descriptor are equally near


class Neighbours(NamedTuple):
    """The nearest of m others to each of n rows.

    nearest: (n,) int64, -1 where m is 0. ratio: (n,) float32, its distance over that of the second
    nearest, 1 without a second. mutual: (n,) bool, whether the row is its nearest one's nearest.
    """

    nearest: np.ndarray
    ratio: np.ndarray
    mutual: np.ndarray


class Ranked(NamedTuple):
    """Indices of the nearest and second nearest of m others to each of n rows, (n,) int64 each.

    peaks: (blocks, m), the largest product of each of the others with the rows of each block.
    """

    first: np.ndarray
    second: np.ndarray
    peaks: np.ndarray


class Described(NamedTuple):
    """Unit descriptors of one image, (m, D) float32, and the keypoint of each, (m,) int64."""

    rows: np.ndarray
    owner: np.ndarray


def described(records: np.ndarray) -> Described:
    """Unit descriptors of records (n,): a row for each keypoint, and for its second orientation."""
    rows = unit_rows(records)
    owner = np.arange(len(records))
    if records.dtype == ORIENTED:
        two = np.flatnonzero(records["second_descriptor"].any(axis=1))
        rows = np.concatenate([rows, root_sift_of(records["second_descriptor"][two])])
        owner = np.concatenate([owner, two])
    return Described(rows, owner)


def unit_rows(records: np.ndarray) -> np.ndarray:
    """The (first) descriptors of records (n,) as (n, D) float32 of length 1: RootSIFT for SIFT.

    Bits become -1 or +1: distances are then square roots of Hamming distances.
    """
    kind = kind_of(records.dtype)[0]
    given = descriptors_of(records)
    if kind == "sift":
        return root_sift_of(given)
    rows = np.unpackbits(given, axis=1).astype(np.float32) * 2 - 1 if kind == "binary" else given
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def neighbours(rows: np.ndarray, others: np.ndarray) -> Neighbours:
    """Rank unit vectors `others` (m, D) for each of `rows` (n, D), float32, by all products at
    once.
    """
    count = len(rows)
    if count == 0 or len(others) == 0:
        nothing = np.full(count, -1, np.int64)
        return Neighbours(nothing, np.ones(count, np.float32), np.zeros(count, bool))
    cosine = rows @ others.T
    at = np.arange(count)
    nearest = cosine.argmax(axis=1)
    mutual = cosine.argmax(axis=0)[nearest] == at
    if len(others) == 1:
        return Neighbours(nearest, np.ones(count, np.float32), mutual)
    second = np.partition(cosine, -2, axis=1)[:, -2]
    return Neighbours(nearest, ratio_of(cosine[at, nearest], second), mutual)


def ratio_of(cosine: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(n,) ratio of two distances by the cosines of unit vectors: |a - b|^2 = 2 - 2 cos."""
    squares = [(1.0 - values).clip(0) + ROUNDING for values in (cosine, second)]
    return np.sqrt(squares[0] / squares[1])


def ranked(rows: np.ndarray, others: np.ndarray) -> Ranked:
    """Rank `others` (m, D), m at least 2, for each of `rows` (n, D), in one pass over their
    products.

    Where torch multiplies int8 fast, entries are rounded to 1 / STEPS, which takes a third of the
    time. It may swap neighbours whose cosines differ by less than 0.003.
    """
    count = len(rows)
    whole = has_byte_products() and max(np.abs(rows).max(), np.abs(others).max()) * STEPS < 128
    first = np.empty(count, np.int64)
    second = np.empty(count, np.int64)
    peaks = []
    out = torch.empty((BLOCK, len(others)), dtype=torch.int32 if whole else torch.float32)
    left = _factor(rows, whole)
    right = _factor(others, whole).T
    for start in range(0, count, BLOCK):
        part = left[start : start + BLOCK]
        product = (byte_product if whole else torch.mm)(part, right, out=out[: len(part)]).numpy()
        here = slice(start, start + len(part))
        at = np.arange(len(part))
        peaks.append(product.max(axis=0))
        first[here] = best = product.argmax(axis=1)
        product[at, best] = MIN_PRODUCT
        second[here] = product.argmax(axis=1)
    return Ranked(first, second, np.stack(peaks))


def _factor(rows: np.ndarray, whole: bool) -> torch.Tensor:
    """(n, D) factor of a product, int8 or float32."""
    return torch.from_numpy(np.rint(rows * STEPS).astype(np.int8) if whole else rows)


def ratio_matches(side0: Described, side1: Described) -> Tuple[np.ndarray, np.ndarray]:
    """Matches (K, 2) int64 of keypoints, each at most once, and their scores (K,): one minus the
    ratio of distances.
    """
    rows = side0.rows
    others = side1.rows
    if min(len(rows), len(others)) < 2:
        return np.empty((0, 2), np.int64), np.empty(0, np.float32)
    ranks = ranked(rows, others)
    # exact cosines, which may swap the two
    first, second = (
        np.einsum("nd,nd->n", rows, others[index]) for index in (ranks.first, ranks.second)
    )
    nearest = np.where(first >= second, ranks.first, ranks.second)
    cosine = np.maximum(first, second)
    second = np.minimum(first, second)
    kept = np.flatnonzero(_distinct(cosine, second))
    # the test in the other direction, which makes the matches mutual
    kept = kept[_distinct(cosine[kept], _rivals(rows, others, kept, nearest[kept], ranks.peaks))]
    scores = 1.0 - ratio_of(cosine[kept], second[kept])
    return one_each(np.stack([side0.owner[kept], side1.owner[nearest[kept]]], axis=1), scores)


def _distinct(cosine: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(n,) bool: neighbours that are near and pass the ratio test."""
    return (cosine > 1.0 - MAX_DISTANCE**2 / 2) & (ratio_of(cosine, second) < RATIO)


def _rivals(
    rows: np.ndarray, others: np.ndarray, own: np.ndarray, partner: np.ndarray, peaks: np.ndarray
) -> np.ndarray:
    """(K,) largest cosine of others[partner] with any row except rows[own], for pairs own, partner
    (K,).

    Only two blocks can contain it: the block of `own`, and the other block with the largest
    product.
    """
    block = own // BLOCK
    rest = peaks[:, partner]
    rest[block, np.arange(len(own))] = MIN_PRODUCT
    other = rest.argmax(axis=0)
    nearest = np.full(len(own), -1.0, np.float32)
    for number, start in enumerate(range(0, len(rows), BLOCK)):
        here = np.flatnonzero((block == number) | (other == number))
        few = torch.from_numpy(others[partner[here]])
        part = torch.from_numpy(rows[start : start + BLOCK])
        product = torch.mm(part, few.T).numpy()
        inside = np.flatnonzero(block[here] == number)
        product[own[here[inside]] - start, inside] = -1.0
        nearest[here] = np.maximum(nearest[here], product.max(axis=0))
    return nearest


def one_each(matches: np.ndarray, scores: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Matches (K, 2), scores (K,) without those that share a keypoint with a better one, in the
    order of image 0.
    """
    order = np.argsort(-scores, kind="stable")
    for side in (0, 1):
        order = order[np.sort(np.unique(matches[order, side], return_index=True)[1])]
    order = order[np.argsort(matches[order, 0])]
    return matches[order], scores[order].astype(np.float32)
