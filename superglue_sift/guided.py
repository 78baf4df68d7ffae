"""Guided matching: add mutual nearest neighbors where the matches around them predict them.

The network gets some hundreds of keypoints of each image. Mutual nearest neighbors among the others
are matches, too, if they lie where the network's matches around them predict (docs/results.md).
"""

from __future__ import annotations

from typing import Tuple

import numpy as np

from superglue_sift.geometry.local_maps import Points, fit_maps_around
from superglue_sift.geometry.verification import Factors, are_small_errors
from superglue_sift.matches import Matches

NEIGHBORS = 8  # Number of matches around a keypoint to which a map is fitted


def add_guided_matches(
    network_matches: Matches,
    mutual_matches: Matches,
    selected: Tuple[np.ndarray, np.ndarray],
    keypoints: Points,
    factors: Factors,
    threshold: float,
) -> Matches:
    """Add mutual nearest neighbors that the network did not get, where its matches predict them.

    A match that is added replaces less confident matches of its keypoints.

    Args:
        network_matches: all matches of the network.
        mutual_matches: mutual nearest neighbors of all keypoints.
        selected: (m,) and (n,), indices of the keypoints that the network got.
        keypoints: (M, 2) and (N, 2) px, positions of all keypoints of both images.
        factors: px of each file per px of the image that SIFT saw, which multiply the limits.
        threshold: the network's matches with a score above it guide.
    """
    # Where the network got both keypoints, its decision stands.
    is_selected0, is_selected1 = map(np.isin, mutual_matches.indices.T, selected)
    candidates = mutual_matches.select(~(is_selected0 & is_selected1))
    guides = network_matches.keep_above(threshold)
    guided_matches = find_guided_matches(guides, candidates, keypoints, factors)
    # A guided match wins, since more matches speak for it.
    return guided_matches.join(network_matches.drop_keypoints_of(guided_matches))


def find_guided_matches(
    guides: Matches, candidates: Matches, keypoints: Points, factors: Factors
) -> Matches:
    """Find the candidates that are where the nearest NEIGHBORS matches of `guides` predict them.

    A candidate that shares a keypoint with a guide is dropped. The score of each match that is kept
    is the mean score of the guides around it.

    Args:
        guides: matches that are trusted.
        candidates: matches to choose from.
        keypoints: (M, 2) and (N, 2) px, positions of all keypoints of both images.
        factors: px of each file per px of the image that SIFT saw, which multiply the limits.
    """
    from scipy.spatial import KDTree

    candidates = candidates.drop_keypoints_of(guides)
    if len(guides) < NEIGHBORS or not len(candidates):
        return Matches.none()
    guide_points = guides.get_points(keypoints)
    points = candidates.get_points(keypoints)
    neighbors = np.asarray(KDTree(guide_points[0]).query(points[0], NEIGHBORS)[1])
    _, errors, spreads = fit_maps_around(guide_points, neighbors, points, factors[0])
    is_predicted = are_small_errors(errors, spreads, factors[1])
    return Matches(candidates.indices, guides.scores[neighbors].mean(1)).select(is_predicted)
