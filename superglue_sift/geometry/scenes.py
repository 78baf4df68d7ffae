"""Pairs of photographs of one place: decide whether two overlap, then find all matches that fit
their geometry.

0. The classical matcher matches the first keypoints, in a thirtieth of the network's time. A
   pair is skipped if very few of these matches agree with one fundamental matrix (MAGSAC++).
1. The classical matcher matches all keypoints, several times as many as the network, which
   matches the likely ones (`likely`). A pair is rejected if, by the network's matches, the
   probability of one place is too low (`acceptance`).
2. The geometry is fitted again to all classical matches and those of the network that agreed. The
   network's matches are judged by it once more: this probability is the pair's score.
3. All matches near their epipolar lines are kept. Mutual nearest neighbours that fail the ratio
   test must also be where the matches around them say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, NamedTuple, Sequence, Tuple

import numpy as np

from superglue_sift.errors import check_range
from superglue_sift.features import nearest
from superglue_sift.features.features import Features
from superglue_sift.features.nearest import Matches
from superglue_sift.features.sift import rank
from superglue_sift.geometry import acceptance, two_view
from superglue_sift.geometry.acceptance import INLIER_PX
from superglue_sift.geometry.local_maps import confirm, positions_of
from superglue_sift.match_result import MatchResult, near_stamp

ACCEPT = 0.5  # minimum probability of an accepted pair
# Minimum classical matches of one geometry to run the network; any eight may agree by chance
LIKELY = 9
SKIPPED = 0.0  # the score of a pair of which the network was not run; those of others are above
LIKELY_KEYPOINTS = 2048  # first keypoints that the classical matcher matches first
BAND_PX = 2.0  # distance to the epipolar line up to which a match is kept, in both images
EXACT_PX = 0.8  # the same for keypoints that the pixels of all pairs aligned
MAX_KEYPOINTS = 8192
NETWORK_KEYPOINTS = 512  # models are as good as with 1,024, in two thirds of the time
RESIZE = 1600  # px, longer side to which photographs are reduced


@dataclass(frozen=True)
class Rules:
    """How pairs of a scene are matched. Raises RequestError for a value out of range.

    accept: minimum probability that an accepted pair shows one place.
    likely: pairs with fewer classical matches of one geometry, among the first keypoints, are
    skipped.
    """

    accept: float = ACCEPT
    likely: int = LIKELY

    def __post_init__(self) -> None:
        check_range("accept", self.accept, 0, 1)
        check_range("likely", self.likely, 0)


class Side(NamedTuple):
    """Keypoints of a photograph. points: (n, 2) float64 px of the reduced image, of `size`."""

    points: np.ndarray
    size: Tuple[float, float]


def side_of(features: Features, resize: int) -> Side:
    """Side of a photograph, whose features were found at `resize`."""
    width, height = features.size
    unit = two_view.unit_of(features.size, resize)
    points = features.keypoints.astype(np.float64) / unit
    return Side(points, (width / unit, height / unit))


class Screened(NamedTuple):
    """Two photographs after a first look.

    agreeing: number of classical matches that agree with one fundamental matrix. kept: (m,) indices
    of each photograph's keypoints that lie on no stamp of both, by falling rank. sides:
    features of these.
    """

    agreeing: int
    kept: List[np.ndarray]
    sides: List[Features]


def screen(pair: Sequence[Features], resize: int) -> Screened:
    """Look at two photographs with the classical matcher alone; resize: see `side_of`."""
    orders = [np.argsort(-rank(side.records), kind="stable") for side in pair]
    few = [side.select(order[:LIKELY_KEYPOINTS]) for side, order in zip(pair, orders)]
    one, other = (side_of(side, resize) for side in few)
    matches, scores = nearest.ratio_matches(few[0].records, few[1].records)
    found = MatchResult.of(few[0], few[1], matches, scores)
    stamped = found.find_stamps()
    index0, index1 = found.matches[~stamped].T
    fit = two_view.fit_fundamental(one.points[index0], other.points[index1], INLIER_PX)
    sizes = (found.size0, found.size1)
    kept = [
        order[~near_stamp(side.keypoints[order], points[stamped], sizes)]
        for side, order, points in zip(pair, orders, (found.points0, found.points1))
    ]
    sides = [side.select(index) for side, index in zip(pair, kept)]
    return Screened(int(fit.inliers.sum()), kept, sides)


def consistent(
    points0: np.ndarray, points1: np.ndarray, sizes: Tuple[two_view.Size, two_view.Size]
) -> np.ndarray:
    """(K,) bool: matches (K, 2) of exactly placed keypoints near their epipolar lines; all without
    a geometry.

    sizes: of both images. EXACT_PX was chosen at RESIZE.
    """
    points0 = points0 / two_view.unit_of(sizes[0], RESIZE)
    points1 = points1 / two_view.unit_of(sizes[1], RESIZE)
    F = two_view.fit_fundamental(points0, points1, EXACT_PX).model
    if F is None:
        return np.ones(len(points0), bool)
    return two_view.epipolar_distances(F, points0, points1) <= EXACT_PX


class Filled(NamedTuple):
    """matches (K, 2) int64 and scores (K,) float32 of a pair, empty if it was rejected.

    score: probability that both show one place, at least `Rules.accept` in an accepted pair.
    """

    matches: np.ndarray
    scores: np.ndarray
    score: float


NOTHING = Filled(np.empty((0, 2), np.int64), np.empty(0, np.float32), SKIPPED)


def finish(
    screened: Screened,
    found: MatchResult,
    more: Matches,
    threshold: float,
    resize: int,
    accept: float,
) -> Filled:
    """`fill` a pair that was screened, from the matches of the network and the classical ones.

    Returns indices of the keypoints before screening, in the order of image 0.
    """
    one, other = (side_of(side, resize) for side in screened.sides)
    pair = fill(found.matches, found.scores, threshold, (one, other), accept, more)
    kept0, kept1 = screened.kept
    matches = np.stack([kept0[pair.matches[:, 0]], kept1[pair.matches[:, 1]]], axis=1)
    order = np.argsort(matches[:, 0])
    return Filled(matches[order], pair.scores[order], pair.score)


def fill(
    matches: np.ndarray,
    scores: np.ndarray,
    threshold: float,
    sides: Tuple[Side, Side],
    accept: float,
    more: Matches,
) -> Filled:
    """Accept or reject a pair, and add classical matches to those of the network.

    matches (K, 2), scores (K,): of the network, `threshold` the minimum score that counts in an
    accepted pair. accept: see `Rules`. more: of the classical matcher, at a ratio up to 1; their
    scores are one minus the ratio of distances.
    """
    found = matched_of(matches, scores, sides)
    judged = acceptance.judge(found)
    agreeing = matches[judged.inliers]
    pair = Matches(matches, scores).above(threshold)
    if judged.probability >= accept:
        sure = more.above(1.0 - nearest.RATIO)
        # those of the network alone may be few in wide views, and lie along a row of windows
        both = _points(sides, np.unique(np.concatenate([agreeing, sure.matches]), axis=0))
        F = two_view.fit_fundamental(*both, INLIER_PX).model
        judged = acceptance.judge(found, judged.F if F is None else F)
        pair = _join(pair, sure)
    if judged.F is None or judged.probability < accept:
        return Filled(matches[:0], scores[:0], judged.probability)
    pair = _near_lines(judged.F, pair, sides)
    unsure = _near_lines(judged.F, more, sides)
    pair = _join(pair, confirm(pair, unsure, (sides[0].points, sides[1].points)))
    return Filled(*pair, judged.probability)


def _join(first: Matches, second: Matches) -> Matches:
    """Both; a match of both has the score of the first."""
    both = np.concatenate([first.matches, second.matches])
    matches, at = np.unique(both, axis=0, return_index=True)
    return Matches(matches, np.concatenate([first.scores, second.scores])[at])


def _near_lines(F: np.ndarray, pair: Matches, sides: Tuple[Side, Side]) -> Matches:
    """The matches near their epipolar lines, of those of one keypoint the surest."""
    away = two_view.epipolar_distances(F, *_points(sides, pair.matches))
    return nearest.one_each(*pair.only(away <= BAND_PX))


def matched_of(
    matches: np.ndarray, scores: np.ndarray, sides: Tuple[Side, Side]
) -> acceptance.Matched:
    """Matches (K, 2) of the network and their scores (K,) as `acceptance` judges them."""
    sizes = (sides[0].size, sides[1].size)
    return acceptance.Matched(*_points(sides, matches), scores.astype(np.float64), sizes)


def _points(sides: Tuple[Side, Side], matches: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Both positions, (K, 2) each, of matches (K, 2)."""
    return positions_of((sides[0].points, sides[1].points), matches)
