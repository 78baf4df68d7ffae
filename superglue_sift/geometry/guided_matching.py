"""Guided matching: affine maps of the matches around a keypoint say where its match must be.

The network gets some hundreds of keypoints of each image. Nearest neighbours of the others are
matches, too, if they lie where the network's matches around them lead (docs/results.md).
"""

from __future__ import annotations

from typing import Tuple

import numpy as np

from superglue_sift.matches import Matches

AROUND = 8  # so many matches around a keypoint give a map
# Maps shrink by half where the squared distances of the matches add up to the square of this.
PRIOR_PX = 5.0
# A guided match may be AWAY times the spread of the matches around it, plus AWAY_PX, from the place
# where they say it is.
AWAY = 0.1
AWAY_PX = 3.0


def maps_around(
    known: Tuple[np.ndarray, np.ndarray], near: np.ndarray, points: Tuple[np.ndarray, np.ndarray]
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit affine maps to the neighbours `near` (k, n) of k matches, which are indices of known
    matches.

    known, points: positions in both images of the known matches, (m, 2), and of the k matches, (k,
        2).

    Returns three arrays:
    - (k, 2, 2), the maps,
    - (k,), the distance in px of each match from the place that its map predicts,
    - (k,), the spread in px of its neighbours in image 1.
    """
    # (m, 2) -> (k, n, 2) neighbours -> (k, 2), their centres
    middle0, middle1 = (each[near].mean(1) for each in known)
    own = known[0][near] - middle0[:, None]
    theirs = known[1][near] - middle1[:, None]
    # Linear least squares of each map, with a prior that keeps it small where neighbours are near
    normal = np.einsum("kni,knj->kij", own, own) + PRIOR_PX**2 * np.eye(2)
    maps = np.linalg.solve(normal, np.einsum("kni,knj->kij", own, theirs)).swapaxes(1, 2)
    # Apply each map to the keypoint of its match.
    expected = middle1 + np.einsum("kij,kj->ki", maps, points[0] - middle0)
    spread = np.sqrt((theirs**2).sum(2).mean(1))
    return maps, np.linalg.norm(expected - points[1], axis=1), spread


def guided_matches(
    known: Matches, others: Matches, points: Tuple[np.ndarray, np.ndarray]
) -> Matches:
    """Keep the matches of `others` that are where the AROUND nearest known matches say.

    A match that shares a keypoint with a known match is dropped. The score of each match that is
    kept is the mean score of those around it.

    points: (M, 2) and (N, 2) px, positions of all keypoints of both images.
    """
    from scipy.spatial import KDTree

    used = [np.isin(ends, taken) for ends, taken in zip(others.indices.T, known.indices.T)]
    others = others.only(~(used[0] | used[1]))
    if len(known) < AROUND or not len(others):
        return Matches.none()
    # Known matches, and matches that are asked for, in both images
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

    found: the network's matches, of which those above `threshold` guide. A match that is added
        replaces less confident matches of its keypoints.
    mutual: mutual nearest neighbours of all keypoints.
    selected: (m,) and (n,), indices of the keypoints that the network got.
    points: (M, 2) and (N, 2) px, positions of all keypoints.
    """
    # Where the network got both keypoints, its answer stands.
    both = [np.isin(ends, index) for ends, index in zip(mutual.indices.T, selected)]
    more = guided_matches(found.above(threshold), mutual.only(~(both[0] & both[1])), points)
    replaced = [np.isin(ends, new) for ends, new in zip(found.indices.T, more.indices.T)]
    # A guided match wins, since more matches speak for it.
    kept = found.only(~(replaced[0] | replaced[1]))
    indices = np.concatenate([kept.indices, more.indices])
    return Matches(indices, np.concatenate([kept.scores, more.scores])).sort()


def positions_of(
    points: Tuple[np.ndarray, np.ndarray], matches: Matches
) -> Tuple[np.ndarray, np.ndarray]:
    """Return the positions of K matches in both images, (K, 2) float64 each.

    points: (M, 2) and (N, 2) px, positions of all keypoints.
    """
    index0, index1 = matches.indices.T
    return points[0][index0].astype(np.float64), points[1][index1].astype(np.float64)
