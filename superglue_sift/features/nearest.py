"""The ratio test (Lowe 2004) on unit descriptors: the classical matchers.

The confidence of a match is one minus the ratio of its distance to that of the second nearest
neighbour. `neighbours` ranks some hundreds of keypoints: the baselines of training and evaluation.
`ratio_matches` is the classical matcher of scenes: mutual nearest neighbours that pass the test in
both directions and are nearer than MAX_DISTANCE. The second nearest is searched in the whole other
image: within an epipolar band the test loses its meaning, wrong matches slide along the line, and
errors of the cameras triple.
"""

from __future__ import annotations

from typing import NamedTuple, Tuple

import numpy as np
import torch

from superglue_sift.features.extractors import descriptors_of, kind_of
from superglue_sift.features.sift import ORIENTED, root_sift_of

RATIO = 0.8  # of distances
MAX_DISTANCE = 0.8  # between descriptors of unit length
BLOCK = 256  # rows of a product: 8 MiB of it at 8,192 keypoints, which stays in the cache
ROUNDING = 1e-6  # of 1 - cosine: two copies of a descriptor are equally near


class Neighbours(NamedTuple):
    """The nearest of m others to each of n rows.

    nearest: (n,) int64, -1 where m is 0. ratio: (n,) float32, its distance over that of the second
    nearest, 1 without a second. mutual: (n,) bool, whether the row is its nearest one's nearest.
    """

    nearest: np.ndarray
    ratio: np.ndarray
    mutual: np.ndarray


class Matches(NamedTuple):
    """matches (K, 2) int64 of keypoints, each at most once, in the order of image 0, and their
    scores (K,) float32.
    """

    matches: np.ndarray
    scores: np.ndarray

    def only(self, chosen: np.ndarray) -> Matches:
        """The chosen matches. chosen: (K,) bool."""
        return Matches(self.matches[chosen], self.scores[chosen])

    def above(self, score: float) -> Matches:
        """The matches with a greater score."""
        return self.only(self.scores > score)


def _describe(records: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Unit descriptors (m, D) float32 of records (n,), a row for each keypoint and for its second
    orientation, and the keypoint of each, (m,) int64.
    """
    rows = unit_rows(records)
    owner = np.arange(len(records))
    if records.dtype == ORIENTED:
        two = np.flatnonzero(records["second_descriptor"].any(axis=1))
        rows = np.concatenate([rows, root_sift_of(records["second_descriptor"][two])])
        owner = np.concatenate([owner, two])
    return rows, owner


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
    """Neighbours of each of `rows` (n, D) float32 among `others` (m, D), unit vectors."""
    count = len(rows)
    if count == 0 or len(others) == 0:
        nothing = np.full(count, -1, np.int64)
        return Neighbours(nothing, np.ones(count, np.float32), np.zeros(count, bool))
    nearest, cosine, second, rival = rank(rows, others)
    ratio = ratio_of(cosine, second) if len(others) > 1 else np.ones(count, np.float32)
    return Neighbours(nearest, ratio, cosine >= rival)


class Ranked(NamedTuple):
    """The nearest of m others to each of n rows, (n,) each.

    nearest: int64. cosine: of both. second: the second largest cosine of the row. rival: the
    largest cosine of the nearest one with any other row, infinite if that row is nearer to it; of
    equally near rows the first has a finite one.
    """

    nearest: np.ndarray
    cosine: np.ndarray
    second: np.ndarray
    rival: np.ndarray


def rank(rows: np.ndarray, others: np.ndarray) -> Ranked:
    """Rank unit vectors `others` (m, D) for each of `rows` (n, D), by one product."""
    nearest = np.empty(len(rows), np.int64)
    cosine, second = np.empty((2, len(rows)), np.float32)
    rest = np.full(len(others), -1.0, np.float32)  # largest cosine with rows nearer to another one
    product = torch.empty((BLOCK, len(others)))
    right = torch.from_numpy(others).T
    for start in range(0, len(rows), BLOCK):
        left = torch.from_numpy(rows[start : start + BLOCK])
        values = torch.mm(left, right, out=product[: len(left)]).numpy()
        here = slice(start, start + len(left))
        at = np.arange(len(left))
        nearest[here] = best = values.argmax(axis=1)
        cosine[here] = values[at, best]
        values[at, best] = -1.0
        second[here] = values.max(axis=1)
        np.maximum(rest, values.max(axis=0), out=rest)
    # of the rows with one nearest, all but the first in this order
    order = np.lexsort((-cosine, nearest))
    beaten = order[1:][np.diff(nearest[order]) == 0]
    np.maximum.at(rest, nearest[beaten], cosine[beaten])
    rival = rest[nearest]
    rival[beaten] = np.inf
    return Ranked(nearest, cosine, second, rival)


def ratio_of(cosine: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(n,) ratio of two distances by the cosines of unit vectors: |a - b|^2 = 2 - 2 cos."""
    nearer, farther = ((1.0 - values).clip(0) + ROUNDING for values in (cosine, second))
    return np.sqrt(nearer / farther)


def ratio_matches(records0: np.ndarray, records1: np.ndarray, ratio: float = RATIO) -> Matches:
    """Matches of two images' records that pass the ratio test, with scores above 1 - ratio.

    The score is one minus the larger ratio of both directions: the order of the images does not
    matter. ratio: its maximum.
    """
    rows, owner = _describe(records0)
    others, other_owner = _describe(records1)
    if min(len(rows), len(others)) < 2:
        return Matches(np.empty((0, 2), np.int64), np.empty(0, np.float32))
    nearest, cosine, second, rival = rank(rows, others)
    ratios = ratio_of(cosine, np.maximum(second, rival))
    kept = (cosine > 1.0 - MAX_DISTANCE**2 / 2) & (ratios < ratio)
    return one_each(np.stack([owner[kept], other_owner[nearest[kept]]], axis=1), 1.0 - ratios[kept])


def one_each(matches: np.ndarray, scores: np.ndarray) -> Matches:
    """Of matches (K, 2) with scores (K,), those that share no keypoint with a better one."""
    kept = surest_each(matches[:, 0], matches[:, 1], scores)
    kept = kept[np.argsort(matches[kept, 0])]
    return Matches(matches[kept], scores[kept].astype(np.float32))


def surest_each(ends0: np.ndarray, ends1: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Indices of the matches that share neither end with a better one, by falling score (K,).

    ends0, ends1: (K,) keypoints or (K, 2) positions. The order of the images does not matter.
    """
    order = np.argsort(-scores, kind="stable")
    best0, best1 = (np.unique(ends[order], axis=0, return_index=True)[1] for ends in (ends0, ends1))
    return order[np.intersect1d(best0, best1)]
