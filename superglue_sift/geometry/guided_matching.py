"""Guided matching: affine maps of the matches around a keypoint say where its match must be.

The network gets some hundreds of keypoints of each image. Nearest neighbours of the others are
matches, too, if they lie where the network's matches around them lead (docs/results.md).
"""

from __future__ import annotations

from typing import Tuple

import numpy as np

from superglue_sift.matches import Matches

AROUND = 8  # matches give a map
PRIOR_PX = 5.0  # if squared distances of matches add up to its square, maps shrink by half
# A guided match is where those around it say, to this part of their spread plus some pixels
AWAY = 0.1
AWAY_PX = 3.0


def maps_around(
    known: Tuple[np.ndarray, np.ndarray], near: np.ndarray, points: Tuple[np.ndarray, np.ndarray]
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit affine maps to the neighbours `near` (k, n) of k matches, indices of known matches.

    known, points: positions in both images, (m, 2) and (k, 2).

    Returns maps (k, 2, 2); how far in px (k,) a match is from where its map says; and the spread in
    px (k,) of its neighbours in image 1.
    """
    middle0, middle1 = (each[near].mean(1) for each in known)
    own = known[0][near] - middle0[:, None]
    theirs = known[1][near] - middle1[:, None]
    normal = np.einsum("kni,knj->kij", own, own) + PRIOR_PX**2 * np.eye(2)
    maps = np.linalg.solve(normal, np.einsum("kni,knj->kij", own, theirs)).swapaxes(1, 2)
    expected = middle1 + np.einsum("kij,kj->ki", maps, points[0] - middle0)
    spread = np.sqrt((theirs**2).sum(2).mean(1))
    return maps, np.linalg.norm(expected - points[1], axis=1), spread


def guided_matches(
    known: Matches, others: Matches, points: Tuple[np.ndarray, np.ndarray]
) -> Matches:
    """Keep those of `others` that are where the nearest AROUND of the known matches say, and share
    no keypoint with a known one. The score of each is the mean of those around it.

    points: (M, 2) and (N, 2) px, positions of all keypoints of both images.
    """
    from scipy.spatial import KDTree

    used = [np.isin(ends, taken) for ends, taken in zip(others.indices.T, known.indices.T)]
    others = others.only(~(used[0] | used[1]))
    if len(known) < AROUND or not len(others):
        return Matches.none()
    places = positions_of(points, known)
    asked = positions_of(points, others)
    near = np.asarray(KDTree(places[0]).query(asked[0], AROUND)[1])
    _, away, spread = maps_around(places, near, asked)
    fits = away <= AWAY * spread + AWAY_PX
    return Matches(others.indices, known.scores[near].mean(1)).only(fits)


def add_guided_matches(
    found: Matches,
    mutual: Matches,
    selected: Tuple[np.ndarray, np.ndarray],
    points: Tuple[np.ndarray, np.ndarray],
    threshold: float,
) -> Matches:
    """Add mutual nearest neighbours that the network did not get, where its matches lead to them.

    found: the network's matches, of which those above `threshold` guide; each keypoint that is
    added replaces a less confident match. mutual: of all keypoints. selected: (m,) and (n,),
    keypoints that the network got. points: (M, 2) and (N, 2) px of all keypoints.
    """
    both = [np.isin(ends, index) for ends, index in zip(mutual.indices.T, selected)]
    more = guided_matches(found.above(threshold), mutual.only(~(both[0] & both[1])), points)
    replaced = [np.isin(ends, new) for ends, new in zip(found.indices.T, more.indices.T)]
    kept = found.only(~(replaced[0] | replaced[1]))
    indices = np.concatenate([kept.indices, more.indices])
    return Matches(indices, np.concatenate([kept.scores, more.scores])).sort()


def positions_of(
    points: Tuple[np.ndarray, np.ndarray], matches: Matches
) -> Tuple[np.ndarray, np.ndarray]:
    """Positions of K matches in both images, (K, 2) float64 each, of all points (M, 2), (N, 2)."""
    index0, index1 = matches.indices.T
    return points[0][index0].astype(np.float64), points[1][index1].astype(np.float64)
