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

import itertools
from dataclasses import dataclass
from typing import Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from superglue_sift.errors import check_range
from superglue_sift.features import nearest
from superglue_sift.features.features import Features
from superglue_sift.features.sift import rank
from superglue_sift.geometry import acceptance, two_view
from superglue_sift.geometry.acceptance import INLIER_PX
from superglue_sift.geometry.local_maps import guided_matches, positions_of
from superglue_sift.matches import Matches

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
# Watermarks (`find_stamps`), in pixels of an image of `two_view.REFERENCE_PX`
SAME_PX = 1.5  # scatter of the translations of one stamp
PLACE_PX = 10.0  # maximum distance from the same place in both images
AROUND_PX = 16.0  # letters this far from a stamp's matches belong to it
FEWEST = 4  # matches of a stamp
BORDER = 0.12  # width of the border, of the shorter side
# Ratio of areas: 0.16 for a plate in the middle, 0.42 for a copy as JPEG of quality 10
SPREAD = 0.28
# True motion is smooth: a few matches share a translation, and many more have similar ones.
ALONE = 2.0  # minimum ratio of a stamp's matches to those
SIMILAR = 4.0  # times SAME_PX: limit of similar translations


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
    found = nearest.ratio_matches(few[0].records, few[1].records)
    stamped = find_stamps(few, found)
    index0, index1 = found.only(~stamped).indices.T
    fit = two_view.fit_fundamental(one.points[index0], other.points[index1], INLIER_PX)
    sizes = (pair[0].size, pair[1].size)
    kept = [
        order[~near_stamp(side.keypoints[order], first.keypoints[ends[stamped]], sizes)]
        for side, order, first, ends in zip(pair, orders, few, found.indices.T)
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


def finish(
    screened: Screened, found: Matches, more: Matches, threshold: float, resize: int, accept: float
) -> Tuple[Matches, float]:
    """`fill` a pair that was screened, from the matches of the network and the classical ones.

    Returns indices of the keypoints before screening, in the order of image 0.
    """
    one, other = (side_of(side, resize) for side in screened.sides)
    matches, score = fill(found, threshold, (one, other), accept, more)
    return matches.renumber(*screened.kept).sort(), score


def fill(
    found: Matches, threshold: float, sides: Tuple[Side, Side], accept: float, more: Matches
) -> Tuple[Matches, float]:
    """Accept or reject a pair, and add classical matches to those of the network.

    found: matches of the network; `threshold` is the minimum score that counts in an accepted pair.
    accept: see `Rules`. more: of the classical matcher, at a ratio up to 1; their scores are one
    minus the ratio of distances.

    Returns all matches, none if the pair was rejected; and the probability that both photographs
    show one place.
    """
    of_network = matched_of(found, sides)
    judged = acceptance.judge(of_network)
    pair = found.above(threshold)
    if judged.probability >= accept:
        sure = more.above(1.0 - nearest.RATIO)
        # those of the network alone may be few in wide views, and lie along a row of windows
        agreeing = _join(found.only(judged.inliers), sure)
        F = two_view.fit_fundamental(*_points(sides, agreeing), INLIER_PX).model
        judged = acceptance.judge(of_network, judged.F if F is None else F)
        pair = _join(pair, sure)
    if judged.F is None or judged.probability < accept:
        return Matches.none(), judged.probability
    pair = _near_lines(judged.F, pair, sides)
    unsure = _near_lines(judged.F, more, sides)
    pair = _join(pair, guided_matches(pair, unsure, (sides[0].points, sides[1].points)))
    return pair, judged.probability


def _join(first: Matches, second: Matches) -> Matches:
    """Both; a match of both has the score of the first."""
    both = np.concatenate([first.indices, second.indices])
    indices, at = np.unique(both, axis=0, return_index=True)
    return Matches(indices, np.concatenate([first.scores, second.scores])[at])


def _near_lines(F: np.ndarray, pair: Matches, sides: Tuple[Side, Side]) -> Matches:
    """Keep matches near their epipolar lines. Of matches that share a keypoint, keep the most
    confident.
    """
    away = two_view.epipolar_distances(F, *_points(sides, pair))
    return nearest.one_each(pair.only(away <= BAND_PX))


def matched_of(found: Matches, sides: Tuple[Side, Side]) -> acceptance.Matched:
    """Matches of the network as `acceptance` judges them."""
    sizes = (sides[0].size, sides[1].size)
    return acceptance.Matched(*_points(sides, found), found.scores.astype(np.float64), sizes)


def _points(sides: Tuple[Side, Side], found: Matches) -> Tuple[np.ndarray, np.ndarray]:
    """Both positions, (K, 2) each, of K matches."""
    return positions_of((sides[0].points, sides[1].points), found)


def find_stamps(pair: Sequence[Features], found: Matches) -> np.ndarray:
    """(K,) bool: matches of date bars, logos and watermarks, which no geometry may use.

    A stamp lies at the same place in both images, so its matches share one translation, and any
    F = [e]x fits them: two unrelated photographs with one date bar would show the same place.
    COLMAP's watermark test looks for a translation among matches near the border. Here those in
    the middle count too: photographs that are identical, or of one tripod, agree all over the
    picture, a stamp in a small part of it.
    """
    stamped = np.zeros(len(found), bool)
    every = [side.keypoints for side in pair]
    sizes = (pair[0].size, pair[1].size)
    points0, points1 = (each[ends] for each, ends in zip(every, found.indices.T))
    for stamp in _translations(points0, points1, sizes):
        place0 = points0[stamp]
        place1 = points1[stamp]
        spreads = (_spread(place0, every[0], sizes[0]), _spread(place1, every[1], sizes[1]))
        if min(spreads) < SPREAD:
            # wrong matches between two letters of the stamp, which lie on one line, also fit F
            on_both = near_stamp(points0, place0, sizes) & near_stamp(points1, place1, sizes)
            stamped |= on_both
    return stamped


def near_stamp(
    points: np.ndarray, stamp: np.ndarray, sizes: Tuple[two_view.Size, two_view.Size]
) -> np.ndarray:
    """(n,) bool: points (n, 2) of one image on the stamp whose matches are at `stamp` (k, 2).

    sizes: of both images.
    """
    from scipy.spatial import KDTree

    if not len(stamp):
        return np.zeros(len(points), bool)
    limit = AROUND_PX * max(map(two_view.unit_of, sizes))
    return KDTree(stamp).query(points, distance_upper_bound=limit)[0] < np.inf


def _translations(
    points0: np.ndarray, points1: np.ndarray, sizes: Tuple[two_view.Size, two_view.Size]
) -> Iterator[np.ndarray]:
    """(K,) bool each: at least FEWEST matches that share one translation, of a stamp at a fixed
    place from two edges or the centre.

    It is drawn in pixels, or grows with the image that it is drawn on.
    """
    size0, size1 = sizes
    unit = max(map(two_view.unit_of, sizes))
    for scale in dict.fromkeys((1.0, max(size1) / max(size0))):
        shifts = points1 - scale * points0
        wider = size1[0] - scale * size0[0]
        higher = size1[1] - scale * size0[1]
        places = itertools.product((0, wider / 2, wider), (0, higher / 2, higher))
        for place in dict.fromkeys(places):
            stamp = _one_translation(shifts, np.array(place), unit)
            if stamp.sum() >= FEWEST:
                yield stamp


def _one_translation(shifts: np.ndarray, place: np.ndarray, unit: float) -> np.ndarray:
    """(K,) bool: shifts (K, 2) like the most frequent one near `place`, if it stands out."""
    from scipy.spatial import KDTree

    none = np.zeros(len(shifts), bool)
    here = shifts[np.linalg.norm(shifts - place, axis=1) <= PLACE_PX * unit]
    if len(here) < FEWEST:
        return none
    counts = KDTree(here).query_ball_point(here, SAME_PX * unit / 2, return_length=True)
    distance = np.linalg.norm(shifts - here[counts.argmax()], axis=1)
    same = distance <= SAME_PX * unit
    similar = (distance <= SIMILAR * SAME_PX * unit) & ~same
    return same if same.sum() >= ALONE * similar.sum() else none


def _spread(stamp: np.ndarray, every: np.ndarray, size: two_view.Size) -> float:
    """Area over which `stamp` (k, 2) scatters, over that of all keypoints `every` (n, 2).

    An area is the square root of the determinant of the covariance. What lies at the border does
    not count; 0 if no match is left.
    """
    border = BORDER * min(size)
    high = np.array(size) - 1 - border
    stamp = stamp[((stamp >= border) & (stamp <= high)).all(1)]
    every = every[((every >= border) & (every <= high)).all(1)]
    if len(stamp) < 3:
        return 0.0
    area = np.linalg.det(np.cov(stamp.T))
    return float(np.sqrt(max(area, 0.0) / max(np.linalg.det(np.cov(every.T)), 1e-12)))
