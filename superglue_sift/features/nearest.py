"""Find nearest neighbors by descriptor, and run the ratio test (Lowe 2004).

The keypoints that the network gets are selected here, too (`select_keypoints`).

The confidence of a match is one minus the ratio of its distance to that of the second nearest
neighbor. `match_nearest` compares some hundreds of keypoints, for the baselines of training and
evaluation. `match_by_ratio` compares thousands, and keeps mutual nearest neighbors that pass the
test in both directions and are nearer than MAX_DISTANCE. The second nearest neighbor is searched
in the whole other image. Within an epipolar band the test would lose its meaning: wrong matches
slide along the line, and errors of the cameras triple.
"""

from __future__ import annotations

from typing import Tuple

import numpy as np
import torch

from superglue_sift.features.descriptors import to_root_sift
from superglue_sift.features.features import Features
from superglue_sift.features.sift import rank_keypoints
from superglue_sift.matches import Matches

RATIO = 0.8  # Maximum ratio of the distances to the nearest and the second nearest
MAX_DISTANCE = 0.8  # Maximum distance of matched descriptors of unit length
BLOCK = 256  # Rows of a product, which take 8 MiB at 8,192 keypoints and stay in the cache
ROUNDING = 1e-6  # Error of 1 - cosine, so that two copies of a descriptor are equally near
# When keypoints are selected, a keypoint counts as matched up to this ratio of distances. With a
# ratio of 1, the network gets only keypoints with something similar in the other image, and finds
# 20 times as many matches in photographs that have nothing in common.
SELECTING_RATIO = 0.95


def compute_unit_descriptors(features: Features) -> np.ndarray:
    """Return the first descriptor of each keypoint, (N, D) float32 of length 1.

    For SIFT it is RootSIFT.
    """
    descriptors = features.descriptors[:, 0]
    if features.is_sift:
        return to_root_sift(descriptors)
    return descriptors / np.maximum(np.linalg.norm(descriptors, axis=1, keepdims=True), 1e-12)


def match_nearest(descriptors0: np.ndarray, descriptors1: np.ndarray) -> Tuple[Matches, np.ndarray]:
    """Match each descriptor of image 0 with the nearest descriptor of image 1.

    Several keypoints of image 0 may have the same neighbor. Without a second neighbor the score
    is 0.

    Args:
        descriptors0, descriptors1: (m, D) and (n, D) float32 of length 1.

    Returns:
        The m matches, or none if n is 0, and an array (m,) bool. It says whether the match is also
        the nearest neighbor in the other direction.
    """
    if len(descriptors0) == 0 or len(descriptors1) == 0:
        return Matches.none(), np.zeros(0, bool)
    nearest, cosine, second, rival = find_two_nearest(descriptors0, descriptors1)
    ratio = np.ones(len(descriptors0), np.float32)
    if len(descriptors1) > 1:
        ratio = compute_distance_ratios(cosine, second)
    indices = np.stack([np.arange(len(descriptors0)), nearest], axis=1)
    return Matches(indices, 1.0 - ratio), cosine >= rival


def find_two_nearest(
    descriptors0: np.ndarray, descriptors1: np.ndarray
) -> Tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Find the two nearest descriptors of image 1 for each of image 0, by one matrix product.

    Args:
        descriptors0, descriptors1: (m, D) and (n, D) float32 of length 1.

    Returns:
        Four arrays (m,):
        - the index of the nearest neighbor, int64,
        - the cosine with this neighbor, float32,
        - the second largest cosine, float32,
        - the rival, float32: the largest cosine of this neighbor with any other descriptor of
          image 0. It is infinite where another one is nearer to the neighbor. If several are
          equally near, only the first has a finite rival.
    """
    nearest = np.empty(len(descriptors0), np.int64)
    cosine, second = np.empty((2, len(descriptors0)), np.float32)
    # The largest cosine of each column, in rows whose nearest is another column
    best_other = np.full(len(descriptors1), -1.0, np.float32)
    product = torch.empty((BLOCK, len(descriptors1)), dtype=torch.float32, device="cpu")
    right = torch.from_numpy(descriptors1).T
    for start in range(0, len(descriptors0), BLOCK):
        # (BLOCK, D) and (D, n) -> (BLOCK, n) cosines, in memory that all blocks share
        left = torch.from_numpy(descriptors0[start : start + BLOCK])
        cosines = torch.mm(left, right, out=product[: len(left)]).numpy()
        block = slice(start, start + len(left))
        rows = np.arange(len(left))
        nearest[block] = columns = cosines.argmax(axis=1)
        cosine[block] = cosines[rows, columns]
        # Take out the nearest of each row. The maximum of a row is then its second largest cosine.
        cosines[rows, columns] = -1.0
        second[block] = cosines.max(axis=1)
        np.maximum(best_other, cosines.max(axis=0), out=best_other)
    # If several rows have the same nearest neighbor, only the nearest row keeps it. The others are
    # beaten: the cosine of their rival is set to infinity.
    order = np.lexsort((-cosine, nearest))
    beaten = order[1:][np.diff(nearest[order]) == 0]
    np.maximum.at(best_other, nearest[beaten], cosine[beaten])
    rival = best_other[nearest]
    rival[beaten] = np.inf
    return nearest, cosine, second, rival


def compute_distance_ratios(cosine: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Compute the ratio (n,) of the distances to the two nearest neighbors from their cosines.

    For unit vectors, |a - b|^2 = 2 - 2 cos.
    """
    nearer, farther = ((1.0 - values).clip(0) + ROUNDING for values in (cosine, second))
    return np.sqrt(nearer / farther)


def match_by_ratio(features0: Features, features1: Features, ratio: float = RATIO) -> Matches:
    """Match the keypoints of two images by the ratio test in both directions.

    The score is one minus the larger ratio of both directions, so the order of the images does not
    matter. A keypoint with two orientations is matched by either.

    Args:
        features0, features1: M and N keypoints of the images.
        ratio: the maximum ratio. With 1, all mutual nearest neighbors within MAX_DISTANCE are
            returned.
    """
    descriptors0, keypoint0 = _describe_orientations(features0)
    descriptors1, keypoint1 = _describe_orientations(features1)
    if min(len(descriptors0), len(descriptors1)) < 2:
        return Matches.none()
    nearest, cosine, second, rival = find_two_nearest(descriptors0, descriptors1)
    ratios = compute_distance_ratios(cosine, np.maximum(second, rival))
    # A row that is not the nearest of its neighbor has an infinite rival, so its ratio is large.
    passes = (cosine > 1.0 - MAX_DISTANCE**2 / 2) & (ratios < ratio)
    # Convert rows, one for each orientation, to keypoints.
    indices = np.stack([keypoint0[passes], keypoint1[nearest[passes]]], axis=1)
    return keep_one_to_one(Matches(indices, 1.0 - ratios[passes]))


def _describe_orientations(features: Features) -> Tuple[np.ndarray, np.ndarray]:
    """Return a unit descriptor for each orientation of the keypoints.

    Returns:
        The descriptors (m, D) float32, and the index (m,) int64 of the keypoint of each.
    """
    descriptors = compute_unit_descriptors(features)
    keypoint = np.arange(len(descriptors))
    if features.descriptors.shape[1] > 1:
        second = features.descriptors[:, 1]
        has_two = np.flatnonzero(second.any(axis=1))
        descriptors = np.concatenate([descriptors, to_root_sift(second[has_two])])
        keypoint = np.concatenate([keypoint, has_two])
    return descriptors, keypoint


def keep_one_to_one(matches: Matches) -> Matches:
    """Keep the matches that share no keypoint with a more confident one, in image 0's order."""
    index0, index1 = matches.indices.T
    return matches.select(find_one_to_one(index0, index1, matches.scores)).sort()


def find_one_to_one(ends0: np.ndarray, ends1: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Find the matches that share neither end with a more confident one.

    The order of the images does not matter.

    Args:
        ends0, ends1: (K,) keypoints or (K, 2) positions of the matches.
        scores: (K,).

    Returns:
        The indices of these matches, by descending score.
    """
    order = np.argsort(-scores, kind="stable")
    # `np.unique` returns the first match of each end, which is the best one in this order.
    best0, best1 = (np.unique(ends[order], axis=0, return_index=True)[1] for ends in (ends0, ends1))
    return order[np.intersect1d(best0, best1)]


def select_keypoints(
    features0: Features, features1: Features, max_keypoints: int, mutual_matches: Matches
) -> Tuple[np.ndarray, np.ndarray]:
    """Select the keypoints of a pair that the network gets.

    A match needs its keypoint in both images. Which keypoints are in both depends on the other
    image, above all on its scale. So keypoints are selected for each pair: first those that the
    ratio test matches with a generous limit (Lowe 2004, section 7.1), then those of highest rank.

    Args:
        features0, features1: M and N keypoints.
        max_keypoints: maximum number of keypoints that are selected in each image.
        mutual_matches: the matches of `match_by_ratio` with ratio 1.

    Returns:
        The indices (m,) and (n,) of the selected keypoints, ascending.
    """
    counts = len(features0.keypoints), len(features1.keypoints)
    if max(counts) <= max_keypoints:
        return np.arange(counts[0]), np.arange(counts[1])
    candidates = mutual_matches.keep_above(1.0 - SELECTING_RATIO)
    best = np.argsort(-candidates.scores, kind="stable")[:max_keypoints]
    selected = []
    for features, matched in zip((features0, features1), candidates.indices[best].T):
        order = np.argsort(-rank_keypoints(features), kind="stable")
        # Fill up with the keypoints of highest rank.
        unmatched = order[~np.isin(order, matched)]
        selected.append(np.sort(np.concatenate([matched, unmatched])[:max_keypoints]))
    return selected[0], selected[1]
