"""The classical matcher over thousands of keypoints: mutual nearest RootSIFT with the ratio test in both directions.

A nearest neighbour counts where it is nearer than RATIO times the second nearest (Lowe 2004), in both images, and is
not farther than MAX_DISTANCE. The rivals are all keypoints of the other image: with those of an epipolar band alone
the test loses its meaning, wrong matches slide along the line, and cameras come out three times as wrong.
"""

from __future__ import annotations

from typing import NamedTuple, Tuple

import numpy as np
import torch

from superglue_sift.descriptors import root_sift_of
from superglue_sift.sift import ORIENTED

RATIO = 0.8  # of distances
MAX_DISTANCE = 0.8  # between descriptors of unit length
BLOCK = 256  # rows of a product: 8 MiB of it at 8,192 keypoints, which stays in the cache


class Nearest(NamedTuple):
    """Of each row its nearest among others: index (n,) int64, cosine (n,), and of the second nearest (n,) float32."""

    index: np.ndarray
    cosine: np.ndarray
    second: np.ndarray


class Described(NamedTuple):
    """Descriptors of one image, RootSIFT (m, 128) float32, and whose they are: (m,) int64 into its keypoints."""

    rows: np.ndarray
    owner: np.ndarray


def described(records: np.ndarray) -> Described:
    """Of SIFT records (n,), a row for each orientation of each keypoint."""
    rows, owner = root_sift_of(records["descriptor"]), np.arange(len(records))
    if records.dtype == ORIENTED:
        two = np.flatnonzero(records["second_descriptor"].any(axis=1))
        rows = np.concatenate([rows, root_sift_of(records["second_descriptor"][two])])
        owner = np.concatenate([owner, two])
    return Described(rows, owner)


def nearest(rows: np.ndarray, others: np.ndarray) -> Nearest:
    """The two largest cosines of each of `rows` (n, 128) with `others` (m, 128), m at least 2."""
    index, cosine = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
    second = np.empty(len(rows), np.float32)
    product = torch.empty((BLOCK, len(others)))
    left, right = torch.from_numpy(rows), torch.from_numpy(others).T
    for start in range(0, len(rows), BLOCK):
        part = left[start : start + BLOCK]
        block = torch.mm(part, right, out=product[: len(part)]).numpy()
        here, at = slice(start, start + len(part)), np.arange(len(part))
        index[here] = best = block.argmax(axis=1)
        cosine[here] = block[at, best]
        block[at, best] = -1.0
        second[here] = block.max(axis=1)
    return Nearest(index, cosine, second)


def ratio_matches(side0: Described, side1: Described) -> Tuple[np.ndarray, np.ndarray]:
    """Matches (K, 2) int64 of keypoints, each at most once, and their scores (K,): one minus the ratio of distances."""
    if min(len(side0.rows), len(side1.rows)) < 2:
        return np.empty((0, 2), np.int64), np.empty(0, np.float32)
    found = nearest(side0.rows, side1.rows)
    kept = np.flatnonzero(_distinct(found))
    back_rows, place = np.unique(found.index[kept], return_inverse=True)
    back = nearest(side1.rows[back_rows], side0.rows)
    mutual = (back.index[place] == kept) & _distinct(back)[place]
    kept = kept[mutual]
    scores = 1.0 - np.sqrt((1.0 - found.cosine[kept]).clip(0) / np.maximum(1.0 - found.second[kept], 1e-6))
    return one_each(np.stack([side0.owner[kept], side1.owner[found.index[kept]]], axis=1), scores)


def _distinct(found: Nearest) -> np.ndarray:
    """(n,) bool: which nearest neighbours pass the ratio test and are near; |a - b|^2 = 2 - 2 cos."""
    near = found.cosine > 1.0 - MAX_DISTANCE**2 / 2
    return near & (1.0 - found.cosine < RATIO**2 * (1.0 - found.second))


def one_each(matches: np.ndarray, scores: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Of matches (K, 2) with scores (K,) those whose two keypoints have no better one, in the order of image 0."""
    order = np.argsort(-scores, kind="stable")
    for side in (0, 1):
        order = order[np.sort(np.unique(matches[order, side], return_index=True)[1])]
    order = order[np.argsort(matches[order, 0])]
    return matches[order], scores[order].astype(np.float32)
