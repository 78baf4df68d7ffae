"""Pairs of photographs of one place: decide whether two overlap, then find all matches that fit their geometry.

0. The classical matcher matches the strongest keypoints, in a thirtieth of the network's time. A pair is skipped if
   very few of these matches agree with one fundamental matrix (MAGSAC++).
1. The network matches the strongest keypoints. A pair is rejected if too few of the strict matches, those of high
   confidence, agree with one fundamental matrix.
2. The classical matcher matches all keypoints, several times as many (`classical.ratio_matches`). The geometry is
   fitted again to its matches and the strict ones. The number of strict matches that agree is the pair's score, which
   decides again.
3. All matches near their epipolar lines are kept, also less strict ones of the network.

Repeated windows and opposite sides of a building give some matches that agree by chance, but few of high confidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional, Tuple

import numpy as np

from superglue_sift import classical, geometry
from superglue_sift.errors import check_range
from superglue_sift.sift import positions

# Minimum confidence of a strict match, and minimum number of strict matches of one geometry in an accepted pair. Chosen
# with the shipped weights on rendered buildings whose opposite sides look alike and share nothing: at 0.85 at most 8 of
# their matches agreed, and 12 is one and a half times that.
STRICT = 0.85
ACCEPT = 12
LIKELY = 9  # minimum classical matches of one geometry to run the network; any eight may agree by chance
LIKELY_KEYPOINTS = 2048  # strongest keypoints that the classical matcher matches first
STRICT_PX = 1.5  # of the robust fits
BAND_PX = 1.2  # distance to the epipolar line up to which a match is kept, in both images
EXACT_PX = 0.8  # the same for keypoints that the pixels of all pairs aligned
NETWORK_KEYPOINTS = 1024
MAX_KEYPOINTS = 8192
RESIZE = 1600  # px, longer side to which photographs are reduced


@dataclass(frozen=True)
class Rules:
    """How pairs of a scene are matched. Raises RequestError for a value out of range.

    strict: a match above this confidence is strict. accept: minimum number of strict matches of one geometry.
    likely: pairs with fewer classical matches of one geometry among the strongest keypoints are skipped.
    network_keypoints: number of the strongest keypoints that the network matches. guided: also match the others.
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
    """A photograph. points: (n, 2) float64 pixels of the reduced image; described: their descriptors."""

    points: np.ndarray
    described: classical.Described


def side_of(records: np.ndarray, size: Tuple[int, int], resize: int) -> Side:
    """Side of a photograph of `size` (width, height); records: (n,), found after reducing it to `resize`."""
    unit = max(1.0, max(size) / resize) if resize else 1.0
    return Side(positions(records).astype(np.float64) / unit, classical.described(records))


def strongest(records: np.ndarray, count: int) -> np.ndarray:
    """(m,) indices of the `count` keypoints of highest score, strongest first; records (n,)."""
    return np.argsort(-records["score"], kind="stable")[:count]


def agreeing(sides: Tuple[Side, Side]) -> int:
    """Number of classical matches of two photographs that agree with one fundamental matrix."""
    matches = classical.ratio_matches(sides[0].described, sides[1].described)[0]
    points0, points1 = (side.points[matches[:, number]] for number, side in enumerate(sides))
    return int(geometry.fundamental_with_inliers(points0, points1, STRICT_PX).inliers.sum())


def consistent(points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """(K,) bool: matches (K, 2) of exactly placed keypoints near their epipolar lines; all without a geometry."""
    F = geometry.fundamental_with_inliers(points0, points1, EXACT_PX).model
    return np.ones(len(points0), bool) if F is None else epipolar_distances(F, points0, points1) <= EXACT_PX


class Filled(NamedTuple):
    """matches (K, 2) int64 and scores (K,) float32 of a pair, empty if it was rejected.

    score: number of strict matches that agree with the geometry, at least `Rules.accept` in an accepted pair.
    """

    matches: np.ndarray
    scores: np.ndarray
    score: int


def epipolar_distances(F: np.ndarray, points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """(K,) px: the larger distance of matched points (K, 2) from their epipolar lines in both images."""
    ones = np.ones((len(points0), 1))
    homogeneous0, homogeneous1 = np.hstack([points0, ones]), np.hstack([points1, ones])
    lines1, lines0 = homogeneous0 @ F.T, homogeneous1 @ F
    product = np.abs((homogeneous1 * lines1).sum(axis=1))
    shorter = np.minimum(np.hypot(lines0[:, 0], lines0[:, 1]), np.hypot(lines1[:, 0], lines1[:, 1]))
    return product / np.maximum(shorter, 1e-12)


def filled(matches: np.ndarray, scores: np.ndarray, threshold: float, sides: Tuple[Side, Side], rules: Rules) -> Filled:
    """Accept or reject a pair, and add classical matches to those of the network: `matches` (K, 2), `scores` (K,).

    The score of a classical match is one minus its ratio of distances, 0.2 to 1.
    threshold: minimum score of the network's matches in an accepted pair.
    """
    strict, above = matches[scores > rules.strict], scores > threshold
    F, score = _geometry(sides, strict, strict)
    if F is None or score < rules.accept:
        return Filled(matches[:0], scores[:0], score)
    matches, scores = matches[above], scores[above]
    if rules.guided:
        more = classical.ratio_matches(sides[0].described, sides[1].described)
        # strict matches alone are few in wide views, and may lie along a line, as on a row of windows
        F, score = _geometry(sides, np.concatenate([strict, more[0]]), strict)
        # a match of both matchers keeps the network's score
        matches, at = np.unique(np.concatenate([matches, more[0]]), axis=0, return_index=True)
        scores = np.concatenate([scores, more[1]])[at]
    if F is None or score < rules.accept:
        return Filled(matches[:0], scores[:0], score)
    kept = _distances(F, sides, matches) <= BAND_PX
    return Filled(*classical.one_each(matches[kept], scores[kept]), score)


def _geometry(sides: Tuple[Side, Side], matches: np.ndarray, strict: np.ndarray) -> Tuple[Optional[np.ndarray], int]:
    """F (3, 3) of `matches` (K, 2), or None, and how many `strict` matches (S, 2) fit it."""
    points0, points1 = (side.points[matches[:, number]] for number, side in enumerate(sides))
    F = geometry.fundamental_with_inliers(points0, points1, STRICT_PX).model
    return F, 0 if F is None else int((_distances(F, sides, strict) <= STRICT_PX).sum())


def _distances(F: np.ndarray, sides: Tuple[Side, Side], matches: np.ndarray) -> np.ndarray:
    return epipolar_distances(F, *(side.points[matches[:, number]] for number, side in enumerate(sides)))
