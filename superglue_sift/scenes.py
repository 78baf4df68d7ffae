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
from typing import NamedTuple, Optional, Tuple

import numpy as np

from superglue_sift import classical, geometry, stamps
from superglue_sift.errors import check_range
from superglue_sift.features import Features
from superglue_sift.local_maps import MIN_AGREEING, nearest_affine
from superglue_sift.match_result import MatchResult
from superglue_sift.sift import positions

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
    """A photograph. points: (n, 2) float64 pixels of the reduced image; described: their
    descriptors.
    """

    points: np.ndarray
    described: classical.Described


def side_of(records: np.ndarray, size: Tuple[int, int], resize: int) -> Side:
    """Side of a photograph of `size` (width, height); records: (n,), found after reducing it to
    `resize`.
    """
    unit = geometry.unit_of(size, resize) if resize else 1.0
    return Side(positions(records).astype(np.float64) / unit, classical.described(records))


def strongest(records: np.ndarray, count: int) -> np.ndarray:
    """(m,) indices of the `count` keypoints of highest score, strongest first; records (n,)."""
    return np.argsort(-records["score"], kind="stable")[:count]


class Screened(NamedTuple):
    """Two photographs after a first look.

    agreeing: number of classical matches that agree with one fundamental matrix. kept: (m,) indices
    of each photograph's keypoints that lie on no stamp of both (`stamps`), strongest first. sides:
    features of these.
    """

    agreeing: int
    kept: Tuple[np.ndarray, np.ndarray]
    sides: Tuple[Features, Features]


def screen(side0: Features, side1: Features, resize: int) -> Screened:
    """Look at two photographs with the classical matcher alone; resize: see `side_of`."""
    few = [
        side._replace(records=side.records[strongest(side.records, LIKELY_KEYPOINTS)])
        for side in (side0, side1)
    ]
    one, other = (side_of(side.records, side.size, resize) for side in few)
    matches, scores = classical.ratio_matches(one.described, other.described)
    found = MatchResult.of(few[0], few[1], matches, scores)
    stamped = found.stamped()
    index0, index1 = matches[~stamped].T
    fit = geometry.fit_fundamental(one.points[index0], other.points[index1], STRICT_PX)
    kept = []
    sides = []
    for side, stamp in ((side0, found.points0[stamped]), (side1, found.points1[stamped])):
        order = strongest(side.records, len(side.records))
        kept.append(order[~stamps.near(side.keypoints[order], stamp, side0.size, side1.size)])
        sides.append(side._replace(records=side.records[kept[-1]]))
    return Screened(int(fit.inliers.sum()), (kept[0], kept[1]), (sides[0], sides[1]))


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
    return (
        np.ones(len(points0), bool)
        if F is None
        else geometry.epipolar_distances(F, points0, points1) <= EXACT_PX
    )


class Filled(NamedTuple):
    """matches (K, 2) int64 and scores (K,) float32 of a pair, empty if it was rejected.

    score: number of strict matches that agree with the geometry, at least `Rules.accept` in an
    accepted pair.
    """

    matches: np.ndarray
    scores: np.ndarray
    score: int


def filled(
    matches: np.ndarray,
    scores: np.ndarray,
    threshold: float,
    sides: Tuple[Side, Side],
    rules: Rules,
) -> Filled:
    """Accept or reject a pair, and add classical matches to those of the network: `matches` (K, 2),
    `scores` (K,).

    The score of a classical match is one minus its ratio of distances, 0.2 to 1.
    threshold: minimum score of the network's matches in an accepted pair.
    """
    strict = matches[scores > rules.strict]
    above = scores > threshold
    F, score = _geometry(sides, strict, strict)
    if F is None or score < rules.accept:
        return Filled(matches[:0], scores[:0], score)
    matches = matches[above]
    scores = scores[above]
    if rules.guided:
        more = classical.ratio_matches(sides[0].described, sides[1].described)
        # strict matches alone are few in wide views, and may lie along a line, as on a row of
        # windows
        F, score = _geometry(sides, np.concatenate([strict, more[0]]), strict)
        # a match of both matchers keeps the network's score
        matches, at = np.unique(np.concatenate([matches, more[0]]), axis=0, return_index=True)
        scores = np.concatenate([scores, more[1]])[at]
    if F is None or score < rules.accept:
        return Filled(matches[:0], scores[:0], score)
    kept = _distances(F, sides, matches) <= BAND_PX
    return Filled(*classical.one_each(matches[kept], scores[kept]), score)


def _geometry(
    sides: Tuple[Side, Side], matches: np.ndarray, strict: np.ndarray
) -> Tuple[Optional[np.ndarray], int]:
    """F (3, 3) of `matches` (K, 2), and how many `strict` matches (S, 2) fit it; None and 0 for a
    mirror image.
    """
    points0, points1 = (side.points[matches[:, number]] for number, side in enumerate(sides))
    F = geometry.fit_fundamental(points0, points1, STRICT_PX).model
    if F is None:
        return None, 0
    agreeing = strict[_distances(F, sides, strict) <= STRICT_PX]
    if _is_mirrored(sides[0].points[agreeing[:, 0]], sides[1].points[agreeing[:, 1]]):
        return None, 0
    return F, len(agreeing)


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
    return geometry.epipolar_distances(
        F, *(side.points[matches[:, number]] for number, side in enumerate(sides))
    )
