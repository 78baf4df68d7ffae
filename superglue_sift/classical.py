"""The classical matcher over thousands of keypoints: mutual nearest RootSIFT with the ratio test in both directions.

A nearest neighbour counts where it is nearer than RATIO times the second nearest (Lowe 2004), in both images, and is
not farther than MAX_DISTANCE. The rivals are all keypoints of the other image: with those of an epipolar band alone
the test loses its meaning, wrong matches slide along the line, and cameras come out three times as wrong.
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
STEPS = 360.0  # of a descriptor's entries in whole numbers, where none is above 127 / 360, as those of SIFT seldom are
LEAST = -(2**30)  # less than any product


class Ranked(NamedTuple):
    """Which of others (m,) are the nearest and second nearest of each row, (n,) int64 each, as the products rank them.

    peaks: (blocks, m), the largest product of each other with the rows of each block.
    """

    first: np.ndarray
    second: np.ndarray
    peaks: np.ndarray


class Described(NamedTuple):
    """Descriptors of one image, (m, D) float32 of unit length, and whose they are: (m,) int64 into its keypoints."""

    rows: np.ndarray
    owner: np.ndarray


def described(records: np.ndarray) -> Described:
    """Of records (n,): of SIFT RootSIFT, a row for each orientation of each keypoint; of others a row for each.

    A binary one has every bit -1 or +1, so that its distances are roots of the Hamming ones.
    """
    owner, kind = np.arange(len(records)), kind_of(records.dtype)[0]
    if kind != "sift":
        given = descriptors_of(records)
        rows = np.unpackbits(given, axis=1).astype(np.float32) * 2 - 1 if kind == "binary" else given
        return Described(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12), owner)
    rows = root_sift_of(records["descriptor"])
    if records.dtype == ORIENTED:
        two = np.flatnonzero(records["second_descriptor"].any(axis=1))
        rows = np.concatenate([rows, root_sift_of(records["second_descriptor"][two])])
        owner = np.concatenate([owner, two])
    return Described(rows, owner)


def ranked(rows: np.ndarray, others: np.ndarray) -> Ranked:
    """Of descriptors (n, D) and (m, D) of unit length, m at least 2: one product of all with all, read once.

    Where torch multiplies whole numbers fast, entries are rounded to 1 / STEPS: a third of the time. That may swap two
    whose cosines are within 0.003 of each other.
    """
    count, whole = len(rows), has_byte_products() and max(np.abs(rows).max(), np.abs(others).max()) * STEPS < 128
    first, second = np.empty(count, np.int64), np.empty(count, np.int64)
    peaks, out = [], torch.empty((BLOCK, len(others)), dtype=torch.int32 if whole else torch.float32)
    left, right = _factor(rows, whole), _factor(others, whole).T
    for start in range(0, count, BLOCK):
        part = left[start : start + BLOCK]
        product = (byte_product if whole else torch.mm)(part, right, out=out[: len(part)]).numpy()
        here, at = slice(start, start + len(part)), np.arange(len(part))
        peaks.append(product.max(axis=0))
        first[here] = best = product.argmax(axis=1)
        product[at, best] = LEAST
        second[here] = product.argmax(axis=1)
    return Ranked(first, second, np.stack(peaks))


def _factor(rows: np.ndarray, whole: bool) -> torch.Tensor:
    """(n, D) for a product, int8 or float32."""
    return torch.from_numpy(np.rint(rows * STEPS).astype(np.int8) if whole else rows)


def ratio_matches(side0: Described, side1: Described) -> Tuple[np.ndarray, np.ndarray]:
    """Matches (K, 2) int64 of keypoints, each at most once, and their scores (K,): one minus the ratio of distances."""
    rows, others = side0.rows, side1.rows
    if min(len(rows), len(others)) < 2:
        return np.empty((0, 2), np.int64), np.empty(0, np.float32)
    found = ranked(rows, others)
    one, two = (np.einsum("nd,nd->n", rows, others[index]) for index in (found.first, found.second))
    cosine, second = np.maximum(one, two), np.minimum(one, two)
    nearest = np.where(one >= two, found.first, found.second)
    kept = np.flatnonzero(_distinct(cosine, second))
    # no rival from this side is as near, which makes them mutual
    kept = kept[_distinct(cosine[kept], _rivals(rows, others, kept, nearest[kept], found.peaks))]
    scores = 1.0 - np.sqrt((1.0 - cosine[kept]).clip(0) / np.maximum(1.0 - second[kept], 1e-6))
    return one_each(np.stack([side0.owner[kept], side1.owner[nearest[kept]]], axis=1), scores)


def _distinct(cosine: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(n,) bool: which neighbours pass the ratio test and are near; |a - b|^2 = 2 - 2 cos."""
    return (cosine > 1.0 - MAX_DISTANCE**2 / 2) & (1.0 - cosine < RATIO**2 * (1.0 - second))


def _rivals(
    rows: np.ndarray, others: np.ndarray, own: np.ndarray, partner: np.ndarray, peaks: np.ndarray
) -> np.ndarray:
    """(K,) the largest cosine of others[partner] with any row but rows[own], for pairs own, partner (K,).

    It is looked for in two blocks alone: that of `own`, and of the others the one with the largest product.
    """
    block, rest = own // BLOCK, peaks[:, partner]
    rest[block, np.arange(len(own))] = LEAST
    other, nearest = rest.argmax(axis=0), np.full(len(own), -1.0, np.float32)
    for number, start in enumerate(range(0, len(rows), BLOCK)):
        here = np.flatnonzero((block == number) | (other == number))
        few, part = torch.from_numpy(others[partner[here]]), torch.from_numpy(rows[start : start + BLOCK])
        product = torch.mm(part, few.T).numpy()
        inside = np.flatnonzero(block[here] == number)
        product[own[here[inside]] - start, inside] = -1.0
        nearest[here] = np.maximum(nearest[here], product.max(axis=0))
    return nearest


def one_each(matches: np.ndarray, scores: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Of matches (K, 2) with scores (K,) those whose two keypoints have no better one, in the order of image 0."""
    order = np.argsort(-scores, kind="stable")
    for side in (0, 1):
        order = order[np.sort(np.unique(matches[order, side], return_index=True)[1])]
    order = order[np.argsort(matches[order, 0])]
    return matches[order], scores[order].astype(np.float32)
