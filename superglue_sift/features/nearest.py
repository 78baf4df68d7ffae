"""Find nearest neighbours by descriptor, and run the ratio test (Lowe 2004).

The keypoints that the network gets are selected here, too.

The confidence of a match is one minus the ratio of its distance to that of the second nearest
neighbour. `neighbours` compares some hundreds of keypoints: the baselines of training and
evaluation. `ratio_matches` compares thousands. It keeps mutual nearest neighbours that pass the
test in both directions and are nearer than MAX_DISTANCE. It searches the second nearest in the
whole other image: within an epipolar band the test loses its meaning, wrong matches slide along the
line, and errors of the cameras triple.
"""

from __future__ import annotations

from typing import Tuple

import numpy as np
import torch

from superglue_sift.features.extractors import kind_of
from superglue_sift.features.sift import ORIENTED, rank, root_sift_of
from superglue_sift.matches import Matches

RATIO = 0.8  # maximum ratio of the distances to the nearest and the second nearest
MAX_DISTANCE = 0.8  # maximum distance of matched descriptors of unit length
BLOCK = 256  # rows of a product, which take 8 MiB at 8,192 keypoints and stay in the cache
ROUNDING = 1e-6  # error of 1 - cosine, so that two copies of a descriptor are equally near
# When keypoints are selected, a keypoint counts as matched up to this ratio of distances. With a
# ratio of 1, the network gets only keypoints with something similar in the other image, and finds
# 20 times as many matches in photographs that have nothing in common.
SELECTING_RATIO = 0.95


def unit_rows(records: np.ndarray) -> np.ndarray:
    """Return the (first) descriptors of records (n,) as (n, D) float32 of length 1.

    For SIFT they are RootSIFT.
    """
    rows = records["descriptor"]
    if kind_of(records.dtype)[0] == "sift":
        return root_sift_of(rows)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def neighbours(rows: np.ndarray, others: np.ndarray) -> Tuple[Matches, np.ndarray]:
    """Match each of `rows` (n, D) float32 with the nearest of `others` (m, D).

    All are unit vectors. Several rows may have the same neighbour. Without a second neighbour the
    score is 0.

    Returns:
        N matches, or none if m is 0, and an array (n,) bool. It says whether the row is also the
        nearest one of its neighbour.
    """
    if len(rows) == 0 or len(others) == 0:
        return Matches.none(), np.zeros(0, bool)
    nearest, cosine, second, rival = compare(rows, others)
    ratio = ratio_of(cosine, second) if len(others) > 1 else np.ones(len(rows), np.float32)
    indices = np.stack([np.arange(len(rows)), nearest], axis=1)
    return Matches(indices, 1.0 - ratio), cosine >= rival


def compare(
    rows: np.ndarray, others: np.ndarray
) -> Tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Find the nearest of `others` (m, D) for each of `rows` (n, D), unit vectors, by one product.

    The rival is infinite where another row is nearer to the neighbour. If several rows are equally
    near, only the first has a finite rival.

    Returns:
        Four arrays (n,):
        - the index of the nearest neighbour, int64,
        - the cosine of the row and this neighbour,
        - the second largest cosine of the row,
        - the rival, the largest cosine of this neighbour with any other row.
    """
    nearest = np.empty(len(rows), np.int64)
    cosine, second = np.empty((2, len(rows)), np.float32)
    # The largest cosine of each column, in rows whose nearest is another column
    rest = np.full(len(others), -1.0, np.float32)
    product = torch.empty((BLOCK, len(others)), dtype=torch.float32, device="cpu")
    right = torch.from_numpy(others).T
    for start in range(0, len(rows), BLOCK):
        # (BLOCK, D) and (D, m) -> (BLOCK, m) cosines, in memory that all blocks share
        left = torch.from_numpy(rows[start : start + BLOCK])
        values = torch.mm(left, right, out=product[: len(left)]).numpy()
        here = slice(start, start + len(left))
        at = np.arange(len(left))
        nearest[here] = best = values.argmax(axis=1)
        cosine[here] = values[at, best]
        # Take out each row's nearest. The maximum of a row is then its second largest cosine.
        values[at, best] = -1.0
        second[here] = values.max(axis=1)
        np.maximum(rest, values.max(axis=0), out=rest)
    # Where several rows have one nearest neighbour, all but the nearest of these rows are beaten.
    order = np.lexsort((-cosine, nearest))
    beaten = order[1:][np.diff(nearest[order]) == 0]
    np.maximum.at(rest, nearest[beaten], cosine[beaten])
    rival = rest[nearest]
    rival[beaten] = np.inf
    return nearest, cosine, second, rival


def ratio_of(cosine: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Compute the ratio (n,) of two distances from the cosines of unit vectors.

    |a - b|^2 = 2 - 2 cos.
    """
    nearer, farther = ((1.0 - values).clip(0) + ROUNDING for values in (cosine, second))
    return np.sqrt(nearer / farther)


def ratio_matches(records0: np.ndarray, records1: np.ndarray, ratio: float = RATIO) -> Matches:
    """Match two images' keypoint records, (m,) and (n,), by the ratio test in both directions.

    The score is one minus the larger ratio of both directions, so the order of the images does not
    matter. A keypoint with two orientations is matched by either.

    Args:
        ratio: the maximum ratio. With 1, all mutual nearest neighbours within MAX_DISTANCE are
            returned.
    """
    rows, owner = _describe(records0)
    others, other_owner = _describe(records1)
    if min(len(rows), len(others)) < 2:
        return Matches.none()
    nearest, cosine, second, rival = compare(rows, others)
    ratios = ratio_of(cosine, np.maximum(second, rival))
    # A row that is not the nearest of its neighbour has an infinite rival and fails.
    kept = (cosine > 1.0 - MAX_DISTANCE**2 / 2) & (ratios < ratio)
    # Convert rows, one for each orientation, to keypoints.
    indices = np.stack([owner[kept], other_owner[nearest[kept]]], axis=1)
    return keep_one_to_one(Matches(indices, 1.0 - ratios[kept]))


def _describe(records: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Return the unit descriptors of records (n,), a row for each orientation, and their owners.

    The rows are (m, D) float32. The owner of a row, (m,) int64, is the index of its keypoint.
    """
    rows = unit_rows(records)
    owner = np.arange(len(records))
    if records.dtype == ORIENTED:
        two = np.flatnonzero(records["second_descriptor"].any(axis=1))
        rows = np.concatenate([rows, root_sift_of(records["second_descriptor"][two])])
        owner = np.concatenate([owner, two])
    return rows, owner


def keep_one_to_one(matches: Matches) -> Matches:
    """Keep the matches that share no keypoint with a more confident one, in image 0's order."""
    index0, index1 = matches.indices.T
    return matches.only(one_to_one_rows(index0, index1, matches.scores)).sort()


def one_to_one_rows(ends0: np.ndarray, ends1: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Find the matches that share neither end with a better one; return indices by falling score.

    Args:
        ends0, ends1: (K,) keypoints or (K, 2) positions. scores: (K,). The order of the images does
            not matter.
    """
    order = np.argsort(-scores, kind="stable")
    # `np.unique` returns the first match of each end, which is the best one in this order.
    best0, best1 = (np.unique(ends[order], axis=0, return_index=True)[1] for ends in (ends0, ends1))
    return order[np.intersect1d(best0, best1)]


def select_keypoints(
    records0: np.ndarray, records1: np.ndarray, most: int, mutual: Matches
) -> Tuple[np.ndarray, np.ndarray]:
    """Select the keypoints of a pair that the network gets, at most `most` of each image.

    A match needs its keypoint in both images. Which keypoints are in both depends on the other
    image, above all on its scale. So keypoints are selected for each pair: first those that the
    ratio test matches with a generous limit (Lowe 2004, section 7.1), then those of highest rank.

    Args:
        records0, records1: (M,) and (N,) keypoints. mutual: their `ratio_matches` with ratio 1.
            Returns indices (m,) and (n,), ascending.
    """
    if max(len(records0), len(records1)) <= most:
        return np.arange(len(records0)), np.arange(len(records1))
    likely = mutual.above(1.0 - SELECTING_RATIO)
    first = likely.indices[np.argsort(-likely.scores, kind="stable")[:most]]
    selected = []
    for records, ends in zip((records0, records1), first.T):
        order = np.argsort(-rank(records), kind="stable")
        # Fill up with the keypoints of highest rank.
        others = order[~np.isin(order, ends)]
        selected.append(np.sort(np.concatenate([ends, others])[:most]))
    return selected[0], selected[1]
