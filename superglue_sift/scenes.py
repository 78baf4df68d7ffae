"""Pairs of photographs of a place: first whether two show the same, then all matches that agree with the geometry.

0. The classical matcher matches the strongest keypoints, in a thirtieth of the network's time. A pair where next to no
   matches agree with one fundamental matrix (MAGSAC++) shows nothing in common and is skipped.
1. The network matches the strongest keypoints. Its strict matches, those above a high confidence, decide: a pair where
   too few of them agree with one fundamental matrix shows nothing in common.
2. The classical matcher matches all keypoints, several times as many (`classical.ratio_matches`). The geometry is
   fitted again over its matches and the strict ones. How many strict ones agree is the pair's score, which decides
   again.
3. All matches, the network's less strict ones too, are kept where they lie near their epipolar lines.

Repeated windows and opposite sides of one building give a network some matches that agree by chance, but few sure ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from superglue_sift import classical, geometry
from superglue_sift.errors import RequestError
from superglue_sift.sift import positions

STRICT = 0.8  # confidence of a strict match, of a model that does not bring its own limit
ACCEPT = 10  # strict matches of one geometry that make a pair, likewise
LIKELY = 9  # classical matches of one geometry without which the network is not asked; any eight may agree by chance
LIKELY_KEYPOINTS = 2048  # of the strongest so many
LIMITS = ("strict_threshold", "accept_pairs")  # what these two are called in the description of a model
STRICT_PX = 1.5  # of the robust fits
BAND_PX = 1.2  # distance to the epipolar line up to which a match is kept, in both images
EXACT_PX = 0.8  # the same, of keypoints that stand where the pixels of all pairs agree
NETWORK_KEYPOINTS = 1024
MAX_KEYPOINTS = 8192
RESIZE = 1600  # px, longer side from which photographs are reduced


@dataclass(frozen=True)
class Rules:
    """How pairs of a scene are matched.

    strict: confidence above which a match is strict. accept: how many strict matches of one geometry make a pair.
    likely: a pair with fewer classical matches of one geometry among the strongest keypoints is skipped.
    network_keypoints: the strongest so many are matched by the network. guided: do the others count at all?
    """

    strict: float = STRICT
    accept: int = ACCEPT
    likely: int = LIKELY
    network_keypoints: int = NETWORK_KEYPOINTS
    guided: bool = True

    @classmethod
    def of_model(cls, info: Mapping[str, Any]) -> Rules:
        """With the limits that the description of a model states, which validation on rendered scenes chose.

        Raises RequestError for a threshold that is no probability, or a limit that is no positive number.
        """
        strict, accept = (info.get(name, own) for name, own in zip(LIMITS, (STRICT, ACCEPT)))
        if type(strict) not in (int, float) or not 0.0 <= strict <= 1.0 or type(accept) is not int or accept < 1:
            stated = ", ".join(f"{name} {value!r}" for name, value in zip(LIMITS, (strict, accept)))
            need = "must be between 0 and 1, and 1 or more"
            raise RequestError(f"the model states {stated}: {need}; name another model")
        return cls(float(strict), accept)


class Side(NamedTuple):
    """A photograph. points: (n, 2) float64 pixels, as reduced to the size SIFT ran on; described: their descriptors."""

    points: np.ndarray
    described: classical.Described


def side_of(records: np.ndarray, size: Tuple[int, int], resize: int) -> Side:
    """A photograph of `size` (width, height) with records (n,) found on it reduced to a longer side of `resize`."""
    unit = max(1.0, max(size) / resize) if resize else 1.0
    return Side(positions(records).astype(np.float64) / unit, classical.described(records))


def strongest(records: np.ndarray, count: int) -> np.ndarray:
    """(m,) the numbers of the `count` keypoints of highest score, strongest first; records (n,)."""
    return np.argsort(-records["score"], kind="stable")[:count]


def agreeing(sides: Tuple[Side, Side]) -> int:
    """How many classical matches of two photographs agree with one fundamental matrix."""
    matches = classical.ratio_matches(sides[0].described, sides[1].described)[0]
    points0, points1 = (side.points[matches[:, number]] for number, side in enumerate(sides))
    return int(geometry.fundamental_with_inliers(points0, points1, STRICT_PX).inliers.sum())


def consistent(points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """(K,) bool: which matches (K, 2), of keypoints at exact places, lie near their epipolar lines; all without any."""
    F = geometry.fundamental_with_inliers(points0, points1, EXACT_PX).model
    return np.ones(len(points0), bool) if F is None else epipolar_distances(F, points0, points1) <= EXACT_PX


class Filled(NamedTuple):
    """matches (K, 2) int64 and scores (K,) float32 of a pair, none where it was not accepted.

    score: how many strict matches agree with the geometry, at least `Rules.accept` where the pair was accepted.
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
    """The matches of a pair, of which the network's are given: `matches` (K, 2) with `scores` (K,).

    A match of the classical matcher alone has one minus the ratio of distances as its score, 0.2 to 1.

    threshold: least score of the network's matches, once the pair is accepted.
    """
    strict, above = matches[scores > rules.strict], scores > threshold
    F, score = _geometry(sides, strict, strict)
    if F is None or score < rules.accept:
        return Filled(matches[:0], scores[:0], score)
    matches, scores = matches[above], scores[above]
    if rules.guided:
        more = classical.ratio_matches(sides[0].described, sides[1].described)
        # the strict ones alone are few in wide views, and those of windows in a row lie along a line
        F, score = _geometry(sides, np.concatenate([strict, more[0]]), strict)
        # of a match that both found the network's score stays
        matches, at = np.unique(np.concatenate([matches, more[0]]), axis=0, return_index=True)
        scores = np.concatenate([scores, more[1]])[at]
    if F is None or score < rules.accept:
        return Filled(matches[:0], scores[:0], score)
    kept = _distances(F, sides, matches) <= BAND_PX
    return Filled(*classical.one_each(matches[kept], scores[kept]), score)


def _geometry(sides: Tuple[Side, Side], matches: np.ndarray, strict: np.ndarray) -> Tuple[Optional[np.ndarray], int]:
    """F (3, 3), or None, of `matches` (K, 2), and how many of the `strict` (S, 2) fit it."""
    points0, points1 = (side.points[matches[:, number]] for number, side in enumerate(sides))
    F = geometry.fundamental_with_inliers(points0, points1, STRICT_PX).model
    return F, 0 if F is None else int((_distances(F, sides, strict) <= STRICT_PX).sum())


def _distances(F: np.ndarray, sides: Tuple[Side, Side], matches: np.ndarray) -> np.ndarray:
    return epipolar_distances(F, *(side.points[matches[:, number]] for number, side in enumerate(sides)))
