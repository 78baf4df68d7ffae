"""Pairs of photographs of one place: decide whether two overlap, then find all matches that fit
their geometry.

0. The classical matcher matches the strongest keypoints, in a thirtieth of the network's time. A
   pair is skipped if very few of these matches agree with one fundamental matrix (MAGSAC++).
1. The network matches the strongest keypoints. A pair is rejected if too few of the strict matches,
   those of high confidence, agree with one fundamental matrix.
2. The classical matcher matches all keypoints, several times as many (`classical.ratio_matches`).
   The geometry is fitted again to its matches and the strict ones. The number of strict matches
   that agree is the pair's score, which decides again.
3. All matches near their epipolar lines are kept, also less strict ones of the network.

Repeated windows and opposite sides of a building give some matches that agree by chance, but few of
high confidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, NamedTuple, Sequence, Tuple, Union

import numpy as np

from superglue_sift import classical, geometry
from superglue_sift.features import Features
from superglue_sift.geometry import MIN_AGREEING, nearest_affine
from superglue_sift.match_result import MatchResult, near_stamp
from superglue_sift.sift import positions, rank
from superglue_sift.system import check_range

# Minimum confidence of a strict match, and minimum number of strict matches of one geometry in an
# accepted pair. Chosen with the shipped weights on rendered buildings whose opposite sides look
# alike and share nothing: at 0.85 at most 8 of their matches agreed, and 12 is one and a half times
# that.
STRICT = 0.85
ACCEPT = 12
# Minimum classical matches of one geometry to run the network; any eight may agree by chance
LIKELY = 9
SKIPPED = -1  # the score of a pair of which the network was not run
LIKELY_KEYPOINTS = 2048  # strongest keypoints that the classical matcher matches first
STRICT_PX = 1.5  # of the robust fits
BAND_PX = 1.2  # distance to the epipolar line up to which a match is kept, in both images
EXACT_PX = 0.8  # the same for keypoints that the pixels of all pairs aligned
MIRRORED = 0.75  # of the local maps: 0.88 to 1 of mirrored photographs, 0 to 0.5 of true pairs
NETWORK_KEYPOINTS = 1024
MAX_KEYPOINTS = 8192
RESIZE = 1600  # px, longer side to which photographs are reduced


@dataclass(frozen=True)
class Rules:
    """How pairs of a scene are matched. Raises RequestError for a value out of range.

    strict: a match above this confidence is strict. accept: minimum number of strict matches of one
    geometry.
    likely: pairs with fewer classical matches of one geometry among the strongest keypoints are
    skipped.
    network_keypoints: number of the strongest keypoints that the network matches. guided: also
    match the others.
    """

    strict: float = STRICT
    accept: int = ACCEPT
    likely: int = LIKELY
    network_keypoints: int = NETWORK_KEYPOINTS
    guided: bool = True

    def __post_init__(self) -> None:
        check_range("strict", self.strict, 0, 1)
        for name, least in (("accept", 1), ("likely", 0), ("network_keypoints", 1)):
            check_range(name, getattr(self, name), least)


class Side(NamedTuple):
    """Keypoints of a photograph. points: (n, 2) float64 px of the reduced image."""

    points: np.ndarray
    described: classical.Described


def side_of(records: np.ndarray, size: geometry.Size, resize: int) -> Side:
    """Side of a photograph of `size` (width, height); records: (n,), found at `resize`."""
    unit = geometry.unit_of(size, resize) if resize else 1.0
    return Side(positions(records).astype(np.float64) / unit, classical.describe(records))


class Screened(NamedTuple):
    """Two photographs after a first look.

    agreeing: number of classical matches that agree with one fundamental matrix. kept: (m,) indices
    of each photograph's keypoints that lie on no stamp of both, strongest first. sides:
    features of these.
    """

    agreeing: int
    kept: List[np.ndarray]
    sides: List[Features]


def screen(pair: Sequence[Features], resize: int) -> Screened:
    """Look at two photographs with the classical matcher alone; resize: see `side_of`."""
    orders = [np.argsort(-rank(side.records), kind="stable") for side in pair]
    few = [select(side, order[:LIKELY_KEYPOINTS]) for side, order in zip(pair, orders)]
    one, other = (side_of(side.records, side.size, resize) for side in few)
    matches, scores = classical.ratio_matches(one.described, other.described)
    found = MatchResult.of(few[0], few[1], matches, scores)
    stamped = found.find_stamps()
    index0, index1 = found.matches[~stamped].T
    fit = geometry.fit_fundamental(one.points[index0], other.points[index1], STRICT_PX)
    sizes = (found.size0, found.size1)
    kept = [
        order[~near_stamp(side.keypoints[order], points[stamped], *sizes)]
        for side, order, points in zip(pair, orders, (found.points0, found.points1))
    ]
    sides = [select(side, index) for side, index in zip(pair, kept)]
    return Screened(int(fit.inliers.sum()), kept, sides)


def select(side: Features, index: Union[slice, np.ndarray]) -> Features:
    return side._replace(records=side.records[index])


def consistent(
    points0: np.ndarray, points1: np.ndarray, units: Tuple[float, float] = (1.0, 1.0)
) -> np.ndarray:
    """(K,) bool: matches (K, 2) of exactly placed keypoints near their epipolar lines; all without
    a geometry.

    units: `geometry.unit_of` of both images for RESIZE, at which EXACT_PX was chosen.
    """
    points0 = points0 / units[0]
    points1 = points1 / units[1]
    F = geometry.fit_fundamental(points0, points1, EXACT_PX).model
    if F is None:
        return np.ones(len(points0), bool)
    return geometry.epipolar_distances(F, points0, points1) <= EXACT_PX


class Filled(NamedTuple):
    """matches (K, 2) int64 and scores (K,) float32 of a pair, empty if it was rejected.

    score: number of strict matches that agree with the geometry, at least `Rules.accept` in an
    accepted pair.
    """

    matches: np.ndarray
    scores: np.ndarray
    score: int


def finish(
    screened: Screened, found: MatchResult, threshold: float, resize: int, rules: Rules
) -> Filled:
    """`fill` a pair that was screened, from the network's matches of `screened.sides`.

    Returns indices of the keypoints before screening, in the order of image 0.
    """
    found = found.only(~found.find_stamps())
    one, other = (side_of(side.records, side.size, resize) for side in screened.sides)
    pair = fill(found.matches, found.scores, threshold, (one, other), rules)
    kept0, kept1 = screened.kept
    matches = np.stack([kept0[pair.matches[:, 0]], kept1[pair.matches[:, 1]]], axis=1)
    order = np.argsort(matches[:, 0])
    return Filled(matches[order], pair.scores[order], pair.score)


def fill(
    matches: np.ndarray,
    scores: np.ndarray,
    threshold: float,
    sides: Tuple[Side, Side],
    rules: Rules,
) -> Filled:
    """Accept or reject a pair, and add classical matches to those of the network.

    matches (K, 2), scores (K,): of the network, `threshold` the minimum score that counts in an
    accepted pair. The score of a classical match is one minus its ratio of distances, 0.2 to 1.
    """
    strict = matches[scores > rules.strict]
    F, score = _geometry(sides, strict, strict)
    above = scores > threshold
    matches = matches[above]
    scores = scores[above]
    if score >= rules.accept and rules.guided:
        more = classical.ratio_matches(sides[0].described, sides[1].described)
        # strict matches alone are few in wide views, and may lie along a line, as on a row of
        # windows
        F, score = _geometry(sides, np.concatenate([strict, more[0]]), strict)
        # a match of both matchers keeps the network's score
        matches, at = np.unique(np.concatenate([matches, more[0]]), axis=0, return_index=True)
        scores = np.concatenate([scores, more[1]])[at]
    if score < rules.accept:
        return Filled(matches[:0], scores[:0], score)
    kept = _distances(F, sides, matches) <= BAND_PX
    return Filled(*classical.one_each(matches[kept], scores[kept]), score)


def _geometry(
    sides: Tuple[Side, Side], matches: np.ndarray, strict: np.ndarray
) -> Tuple[np.ndarray, int]:
    """F (3, 3) of `matches` (K, 2), and how many `strict` matches (S, 2) fit it.

    None of them without F, or if it is one of a mirror image.
    """
    points0, points1 = (side.points[index] for side, index in zip(sides, matches.T))
    F = geometry.fit_fundamental(points0, points1, STRICT_PX).model
    if F is None:
        return np.zeros((3, 3)), 0
    agreeing = strict[_distances(F, sides, strict) <= STRICT_PX]
    points0, points1 = (side.points[index] for side, index in zip(sides, agreeing.T))
    return F, 0 if _is_mirrored(points0, points1) else len(agreeing)


def _is_mirrored(points0: np.ndarray, points1: np.ndarray) -> bool:
    """Whether the maps around most matches (K, 2) are those of a mirror image.

    A photograph fits its mirror image by one F, as details that are symmetric themselves match.
    Between true views, matches at different depths may change order, so that up to half of the maps
    do.
    """
    if len(points0) < MIN_AGREEING:
        return False
    maps = nearest_affine(points0, points1, np.ones(len(points0), bool))
    return geometry.mirrored_part(maps) > MIRRORED


def _distances(F: np.ndarray, sides: Tuple[Side, Side], matches: np.ndarray) -> np.ndarray:
    points = (side.points[index] for side, index in zip(sides, matches.T))
    return geometry.epipolar_distances(F, *points)
