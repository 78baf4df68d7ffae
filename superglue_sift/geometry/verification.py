"""Decide whether two photographs show one place, and find all matches that fit their geometry.

With `scene=True`, a pair goes through four steps (`Matcher.match`):

1. `first_look`: the ratio test matches the first keypoints, in a thirtieth of the network's time.
   Keypoints on a watermark are left out. The pair is skipped if very few of the matches agree with
   one fundamental matrix.
2. The network matches the selected keypoints, and the ratio test all keypoints.
3. `verify_pair` fits a fundamental matrix to the matches of both (MAGSAC++), and measures how well
   they agree with it. This gives the probability that both photographs show one place.
4. If they do, `add_matches_near_lines` keeps all matches near their epipolar lines. Mutual nearest
   neighbours that fail the ratio test must also be where the matches around them say.

Matches of two different places may agree with one fundamental matrix by chance, or because windows
repeat. Two numbers tell whether it is one place, and a logistic regression weighs them
(`probability`):

- lead: how many more matches agree with this geometry than with the best other one. Where windows
  repeat, the matches that are left fit another geometry nearly as well. A match counts if it is
  also where its neighbours say, in both images. So wrong matches that merely lie near their
  epipolar lines do not count.
- support: which part of the ratio test's matches around the agreeing matches agrees, too. It does
  not depend on the network, which is as confident of an equal window as of the right one. The ratio
  test finds few matches between equal windows, and chance matches disagree with their neighbours.

The matches of a photograph and its mirror image fit one fundamental matrix, too. But the maps
around them reverse orientation, and such a pair is never one place.

Guided matching: the network gets some hundreds of keypoints of each image. Nearest neighbours of
the others are matches, too, if they lie where the network's matches around them lead
(docs/results.md).

`python -m benchmarks.dev.verification` learns the weights from made places (docs/scenes.md).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Iterator, Optional, Sequence, Tuple

import numpy as np

from superglue_sift.errors import check_range
from superglue_sift.features import nearest
from superglue_sift.features.features import Features
from superglue_sift.features.sift import rank
from superglue_sift.geometry import two_view
from superglue_sift.geometry.two_view import Size
from superglue_sift.matches import Matches

# Minimum probability of an accepted pair. With 0.9, a pair that is wrongly accepted counts as much
# as nine pairs that are wrongly rejected.
ACCEPT = 0.9
# The network runs if at least this many ratio matches agree on one geometry. Any eight may agree by
# chance.
LIKELY = 9
SKIPPED = 0.0  # score of a pair for which the network was not run; all other scores are higher
FIRST_KEYPOINTS = 2048  # how many keypoints of an image the first look matches
MAX_KEYPOINTS = 8192
NETWORK_KEYPOINTS = 512  # results are as good as with 1,024, in two thirds of the time
RESIZE = 1600  # px, longer side to which photographs are reduced

# Distances from epipolar lines, in both images, in pixels of the images that SIFT saw
INLIER_PX = 1.5  # limit for an inlier
BAND_PX = 2.0  # limit for a match that is kept
EXACT_PX = 0.8  # limit for keypoints that were refined by the pixels of all pairs

COUNTED = 0.2  # a match of the network counts if its confidence is above this
NEIGHBOURS = 10  # so many nearest matches in an image are the neighbours of a match
FEW = 5  # added to both numbers of matches that `lead` compares, since a few agree by chance
# Few matches of the ratio test say little. Support is therefore computed as if ADDED more matches
# agreed with the geometry, which have USUAL_SUPPORT.
ADDED = 20
USUAL_SUPPORT = 0.75
WEIGHTS = np.array([2.5, 4.5])  # weights of lead and support
BIAS = -6.0

# Watermarks, in pixels of an image of `two_view.REFERENCE_PX`
SAME_PX = 1.5  # translations of one watermark differ by at most this
PLACE_PX = 10.0  # a watermark is at the same place in both images, up to this distance
AROUND_PX = 16.0  # keypoints up to this far from its matches belong to a watermark
FEWEST = 4  # minimum number of matches of a watermark
BORDER = 0.12  # width of the border, as a part of the shorter side
# Maximum ratio of a watermark's area to that of all keypoints. The ratio is 0.16 for a plate in the
# middle, and 0.42 for a copy of the photograph as JPEG of quality 10.
SPREAD = 0.28
# True motion is smooth. Where a few matches share a translation, many more have similar ones.
ALONE = 2.0  # minimum ratio of a watermark's matches to those with similar translations
SIMILAR = 4.0  # limit of similar translations, times SAME_PX

# Guided matching
AROUND = 8  # so many matches around a keypoint give a map
# Maps shrink by half where the squared distances of the matches add up to the square of this.
PRIOR_PX = 5.0
# The matches around a guided match say where it is. It may be away from that place by AWAY times
# their spread, plus AWAY_PX.
AWAY = 0.1
AWAY_PX = 3.0

Points = Tuple[np.ndarray, np.ndarray]  # positions (M, 2) and (N, 2) in both images


@dataclass(frozen=True)
class Rules:
    """Say how the pairs of a scene are matched.

    Attributes:
        accept: minimum probability that both photographs of an accepted pair show one place.
        likely: pairs are skipped if fewer ratio matches of the first keypoints agree on one
            geometry.

    Raises:
        RequestError: For a value out of range.
    """

    accept: float = ACCEPT
    likely: int = LIKELY

    def __post_init__(self) -> None:
        check_range("accept", self.accept, 0, 1)
        check_range("likely", self.likely, 0)


def first_look(pair: Sequence[Features], resize: int) -> Tuple[int, Tuple[np.ndarray, np.ndarray]]:
    """Look at two photographs with the ratio test alone.

    Args:
        resize: longer side in pixels to which the photographs were reduced.

    Returns:
        The number of ratio matches that agree with one fundamental matrix. Also returns, for each
        photograph, the indices (m,) of the keypoints that lie on no watermark, by falling rank.
    """
    # Match the first keypoints by the ratio test.
    orders = [np.argsort(-rank(view.records), kind="stable") for view in pair]
    first = [view.select(order[:FIRST_KEYPOINTS]) for view, order in zip(pair, orders)]
    found = nearest.ratio_matches(first[0].records, first[1].records)
    # Count the matches of one geometry that lie on no watermark.
    marked = find_watermarks(first, found)
    seen0, seen1 = (
        view.as_found(resize).keypoints[order[:FIRST_KEYPOINTS]]
        for view, order in zip(pair, orders)
    )
    unmarked = positions_of((seen0, seen1), found.only(~marked))
    agreeing = two_view.fit_fundamental(*unmarked, INLIER_PX).inliers
    # Drop all keypoints near the watermarks, also those that the ratio test did not match.
    sizes = [view.size for view in pair]
    kept0, kept1 = (
        order[~_is_near(view.keypoints[order], some.keypoints[ends[marked]], sizes)]
        for view, order, some, ends in zip(pair, orders, first, found.indices.T)
    )
    return int(agreeing.sum()), (kept0, kept1)


def match_one_place(
    pair: Sequence[Features],
    points: Points,
    network: Matches,
    mutual: Matches,
    threshold: float,
    accept: float,
) -> Tuple[Matches, float]:
    """Verify a pair, and find all matches of its geometry.

    Args:
        pair: both photographs, without the keypoints of watermarks. Only the last watermarks are
            looked for in their pixels, since watermarks have a place and a size in the file.
        points: (M, 2) and (N, 2) px, positions of the same keypoints in the images that SIFT saw.
        network: all matches of the network, whatever their scores. Those above `threshold` are kept
            if they agree with the geometry.
        mutual: mutual nearest neighbours of all keypoints; their scores are one minus the ratio of
            distances.
        accept: minimum probability of an accepted pair.

    Returns:
        The matches, none for a rejected pair, and the probability of one place.
    """
    # A watermark may lie on keypoints that the first look did not match.
    network = network.only(~find_watermarks(pair, network))
    F, measured = verify_pair(network, mutual, points)
    score = probability(measured)
    if F is None or score < accept:
        return Matches.none(), score
    return add_matches_near_lines(F, network.above(threshold), mutual, points), score


def verify_pair(
    network: Matches, mutual: Matches, points: Points
) -> Tuple[Optional[np.ndarray], np.ndarray]:
    """Fit a geometry to the matches of a pair, and measure how well they agree with it.

    Args:
        network, mutual: as for `match_one_place`.
        points: (M, 2) and (N, 2) px, positions of all keypoints in the images that SIFT saw.

    Returns:
        F (3, 3) with x1^T F x0 = 0, or None if there is no geometry, and its `evidence` (2,).
    """
    counted = network.above(COUNTED)
    ratio = mutual.above(1.0 - nearest.RATIO)
    # The network's matches tell which of several geometries is right. But they may be few if the
    # views are far apart, or lie along one row of windows. So the ratio test's matches help to
    # place the lines.
    F = two_view.fit_fundamental(*_distinct(counted, points)[:2], INLIER_PX).model
    if F is not None:
        agreeing = _join(_near_lines(F, counted, points, INLIER_PX), ratio)
        again = two_view.fit_fundamental(*positions_of(points, agreeing), INLIER_PX).model
        F = F if again is None else again
    return F, evidence(F, counted, ratio, points)


def add_matches_near_lines(
    F: np.ndarray, network: Matches, mutual: Matches, points: Points
) -> Matches:
    """Keep the matches near their epipolar lines, and add those that agree with the matches around.

    Args:
        F, network, mutual, points: as for `verify_pair`. If both the network and the ratio test
            find a match, it has the network's score.
    """
    # Matches that the network or the ratio test is sure of need to be near their lines only.
    exact = _join(network, mutual.above(1.0 - nearest.RATIO))
    sure = nearest.one_each(_near_lines(F, exact, points, BAND_PX))
    # Other mutual nearest neighbours must also be where the matches around them say.
    unsure = nearest.one_each(_near_lines(F, mutual, points, BAND_PX))
    return _join(sure, guided_matches(sure, unsure, points))


def agree_with_one_geometry(
    points0: np.ndarray, points1: np.ndarray, sizes: Tuple[Size, Size]
) -> np.ndarray:
    """Say which matches of refined keypoints are near their epipolar lines.

    Args:
        points0, points1: (K, 2) px, the keypoints of the matches.
        sizes: (width, height) of both images in px.

    Returns:
        (K,) bool. All entries are true if there is no geometry.
    """
    # EXACT_PX was chosen for images reduced to RESIZE.
    points0 = points0 / two_view.unit_of(sizes[0], RESIZE)
    points1 = points1 / two_view.unit_of(sizes[1], RESIZE)
    F = two_view.fit_fundamental(points0, points1, EXACT_PX).model
    if F is None:
        return np.ones(len(points0), bool)
    return two_view.epipolar_distances(F, points0, points1) <= EXACT_PX


def _join(first: Matches, second: Matches) -> Matches:
    """Join two sets of matches, sorted. A match that is in both has the score of the first."""
    both = np.concatenate([first.indices, second.indices])
    indices, at = np.unique(both, axis=0, return_index=True)
    return Matches(indices, np.concatenate([first.scores, second.scores])[at])


def _near_lines(F: np.ndarray, found: Matches, points: Points, limit_px: float) -> Matches:
    """Keep the matches at most `limit_px` from their epipolar lines in both images."""
    away = two_view.epipolar_distances(F, *positions_of(points, found))
    return found.only(away <= limit_px)


def _distinct(found: Matches, points: Points) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keep one match for each position, since two orientations of a point are two keypoints.

    Returns:
        Positions (k, 2) in both images and scores (k,) float64, by falling score.
    """
    points0, points1 = positions_of(points, found)
    kept = nearest.most_confident_each(points0, points1, found.scores)
    return points0[kept], points1[kept], found.scores[kept].astype(np.float64)


# --- evidence


def probability(measured: np.ndarray) -> float:
    """Compute the probability, above 0, that a pair with this evidence (2,) shows one place."""
    return 1.0 / (1.0 + math.exp(-float(measured @ WEIGHTS) - BIAS))


def evidence(
    F: Optional[np.ndarray], network: Matches, ratio: Matches, points: Points
) -> np.ndarray:
    """Measure lead and support of a geometry F (3, 3); return (2,).

    Args:
        network: matches with a score above COUNTED.
        ratio: matches of the ratio test.
        points: (M, 2) and (N, 2) px.

    Returns:
        Zeros if there is no geometry, or if it is the geometry of a mirror image.
    """
    nothing = np.zeros(len(WEIGHTS))
    if F is None:
        return nothing
    points0, points1, _ = _distinct(_join(network, ratio), points)
    away = two_view.epipolar_distances(F, points0, points1)
    maps, smooth = _follow_neighbours(points0[away <= BAND_PX], points1[away <= BAND_PX])
    # Local maps that reverse orientation show a mirror image.
    if two_view.mirrored_part(maps) > 0.5:
        return nothing
    # Fit another geometry to the matches that disagree with this one.
    points0, points1 = (each[away > 2 * BAND_PX] for each in (points0, points1))
    rivals = 0
    other = two_view.fit_fundamental(points0, points1, INLIER_PX).model
    if other is not None:
        near = two_view.epipolar_distances(other, points0, points1) <= BAND_PX
        rivals = _follow_neighbours(points0[near], points1[near])[1]
    lead = math.log((smooth + FEW) / (rivals + FEW))
    return np.array([lead, _support(F, *_distinct(ratio, points))])


def _follow_neighbours(points0: np.ndarray, points1: np.ndarray) -> Tuple[np.ndarray, int]:
    """Fit affine maps from image 0 to image 1 to the neighbours of each match, (k, 2) px.

    Returns:
        The maps (k, 2, 2), none for too few matches, and the number of matches that are where their
        neighbours say, in both images.
    """
    if len(points0) <= NEIGHBOURS:
        return np.zeros((0, 2, 2)), 0
    there = points0, points1
    back = points1, points0
    maps, away1, spread1 = maps_around(there, _nearest(points0), there)
    _, away0, spread0 = maps_around(back, _nearest(points1), back)
    follows = (away0 <= AWAY * spread0 + AWAY_PX) & (away1 <= AWAY * spread1 + AWAY_PX)
    return maps, int(follows.sum())


def _support(F: np.ndarray, points0: np.ndarray, points1: np.ndarray, scores: np.ndarray) -> float:
    """Measure support: which part of the matches around the agreeing matches agrees, too.

    A match agrees if it is near its epipolar lines. Neighbours are searched in each image, and the
    lower part of both images is taken.

    Args:
        points0, points1: (k, 2) px, the ratio test's matches.
        scores: (k,), their weights.
    """
    near = two_view.epipolar_distances(F, points0, points1) <= BAND_PX
    count = int(near.sum())
    if not count or len(scores) <= NEIGHBOURS:
        return USUAL_SUPPORT
    around = (_nearest(points)[near] for points in (points0, points1))
    part = min((scores * near)[each].sum() / scores[each].sum() for each in around)
    return float((count * part + ADDED * USUAL_SUPPORT) / (count + ADDED))


def _nearest(points: np.ndarray) -> np.ndarray:
    """Find the NEIGHBOURS other points nearest to each of k points (k, 2); return indices."""
    from scipy.spatial import KDTree

    return np.asarray(KDTree(points).query(points, NEIGHBOURS + 1)[1])[:, 1:]


# --- watermarks


def find_watermarks(pair: Sequence[Features], found: Matches) -> np.ndarray:
    """Find the matches of date bars, logos and watermarks: (K,) bool.

    No geometry may use them.

    A watermark lies at the same place in both images, so its matches share one translation, and any
    F = [e]x fits them. Two unrelated photographs with the same date bar would seem to show one
    place. COLMAP's watermark test looks for a translation among matches near the border. Here
    matches in the middle count too. Photographs that are identical, or taken from one tripod, also
    share one translation, but all over the picture. A watermark covers a small part of it.
    """
    marked = np.zeros(len(found), bool)
    sizes = (pair[0].size, pair[1].size)
    every = [view.keypoints for view in pair]
    points = [each[ends] for each, ends in zip(every, found.indices.T)]
    for mark in _translations(points[0], points[1], sizes):
        spreads = [_spread(p[mark], e, size) for p, e, size in zip(points, every, sizes)]
        if min(spreads) < SPREAD:
            # Wrong matches between two letters of a watermark also fit F, since both letters lie on
            # one line. So every match with both ends on the watermark belongs to it.
            on_both = [_is_near(each, each[mark], sizes) for each in points]
            marked |= on_both[0] & on_both[1]
    return marked


def _is_near(points: np.ndarray, mark: np.ndarray, sizes: Sequence[Size]) -> np.ndarray:
    """Find the points (n, 2) that lie on the watermark whose matches are at `mark` (k, 2).

    Returns:
        (n,) bool.
    """
    from scipy.spatial import KDTree

    if not len(mark):
        return np.zeros(len(points), bool)
    limit = AROUND_PX * max(map(two_view.unit_of, sizes))
    return KDTree(mark).query(points, distance_upper_bound=limit)[0] < np.inf


def _translations(
    points0: np.ndarray, points1: np.ndarray, sizes: Tuple[Size, Size]
) -> Iterator[np.ndarray]:
    """Yield sets of matches, (K,) bool, that share one translation.

    The matches of a watermark do so.

    A watermark has a fixed place relative to two edges or to the centre. It is drawn in pixels, or
    grows with the image.
    """
    size0, size1 = map(np.array, sizes)
    unit = max(map(two_view.unit_of, sizes))
    parts = np.array(list(itertools.product((0, 0.5, 1), repeat=2)))
    # The size of a watermark is the same in pixels, or relative to the longer side.
    for scale in dict.fromkeys((1.0, max(size1) / max(size0))):
        shifts = points1 - scale * points0
        # A watermark is fixed to the first edge, the centre or the last edge, in x and in y. Each
        # gives one translation.
        for place in np.unique(parts * (size1 - scale * size0), axis=0):
            mark = _one_translation(shifts, place, unit)
            if mark.any():
                yield mark


def _one_translation(shifts: np.ndarray, place: np.ndarray, unit: float) -> np.ndarray:
    """Find the shifts (K, 2) that are like the most frequent one near `place`; return (K,) bool.

    None are found if they are few, or if many more shifts are similar, as they are where the motion
    is true.
    """
    from scipy.spatial import KDTree

    none = np.zeros(len(shifts), bool)
    here = shifts[np.linalg.norm(shifts - place, axis=1) <= PLACE_PX * unit]
    if not len(here):
        return none
    counts = KDTree(here).query_ball_point(here, SAME_PX * unit / 2, return_length=True)
    distance = np.linalg.norm(shifts - here[counts.argmax()], axis=1)
    same = distance <= SAME_PX * unit
    similar = distance <= SIMILAR * SAME_PX * unit  # includes the same shifts
    alone = same.sum() >= ALONE * (similar.sum() - same.sum())
    return same if alone and same.sum() >= FEWEST else none


def _spread(mark: np.ndarray, every: np.ndarray, size: Size) -> float:
    """Compare the area over which `mark` (k, 2) scatters with the area of all keypoints (n, 2).

    An area is the square root of the determinant of the covariance. Keypoints at the border do not
    count. The ratio is 0 if fewer than three matches are left.
    """
    border = BORDER * min(size)
    high = np.array(size) - 1 - border
    mark, every = (p[((p >= border) & (p <= high)).all(1)] for p in (mark, every))
    if len(mark) < 3:
        return 0.0
    area = np.linalg.det(np.cov(mark.T))
    return float(np.sqrt(max(area, 0.0) / max(np.linalg.det(np.cov(every.T)), 1e-12)))


# --- guided matching


def maps_around(
    known: Points, near: np.ndarray, points: Points
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit an affine map to the neighbours of each of k matches.

    Args:
        known: (m, 2) px each, positions of the known matches in both images.
        near: (k, n), the neighbours of each match, as indices of known matches.
        points: (k, 2) px each, positions of the k matches in both images.

    Returns:
        Three arrays:
        - (k, 2, 2), the maps,
        - (k,), the distance in px of each match from the place that its map predicts,
        - (k,), the spread in px of its neighbours in image 1.
    """
    # (m, 2) -> (k, n, 2) neighbours -> (k, 2), their centres
    middle0, middle1 = (each[near].mean(1) for each in known)
    own = known[0][near] - middle0[:, None]
    theirs = known[1][near] - middle1[:, None]
    # Solve for each map by linear least squares. A prior keeps it small where neighbours are near.
    normal = np.einsum("kni,knj->kij", own, own) + PRIOR_PX**2 * np.eye(2)
    maps = np.linalg.solve(normal, np.einsum("kni,knj->kij", own, theirs)).swapaxes(1, 2)
    # Apply each map to the keypoint of its match.
    expected = middle1 + np.einsum("kij,kj->ki", maps, points[0] - middle0)
    spread = np.sqrt((theirs**2).sum(2).mean(1))
    return maps, np.linalg.norm(expected - points[1], axis=1), spread


def guided_matches(known: Matches, others: Matches, points: Points) -> Matches:
    """Keep the matches of `others` that are where the AROUND nearest known matches say.

    A match that shares a keypoint with a known match is dropped. The score of each match that is
    kept is the mean score of those around it.

    Args:
        points: (M, 2) and (N, 2) px, positions of all keypoints of both images.
    """
    from scipy.spatial import KDTree

    others = _without_keypoints_of(known, others)
    if len(known) < AROUND or not len(others):
        return Matches.none()
    # Look up the positions of the known matches and of the others, in both images.
    places = positions_of(points, known)
    asked = positions_of(points, others)
    near = np.asarray(KDTree(places[0]).query(asked[0], AROUND)[1])
    _, away, spread = maps_around(places, near, asked)
    fits = away <= AWAY * spread + AWAY_PX
    return Matches(others.indices, known.scores[near].mean(1)).only(fits)


def _without_keypoints_of(taken: Matches, found: Matches) -> Matches:
    """Drop the matches of `found` that share a keypoint with a match of `taken`."""
    used0, used1 = map(np.isin, found.indices.T, taken.indices.T)
    return found.only(~(used0 | used1))


def add_guided_matches(
    found: Matches,
    mutual: Matches,
    selected: Tuple[np.ndarray, np.ndarray],
    points: Points,
    threshold: float,
) -> Matches:
    """Add mutual nearest neighbours that the network did not get, where its matches lead to them.

    Args:
        found: the network's matches, of which those above `threshold` guide. A match that is added
            replaces less confident matches of its keypoints.
        mutual: mutual nearest neighbours of all keypoints.
        selected: (m,) and (n,), indices of the keypoints that the network got.
        points: (M, 2) and (N, 2) px, positions of all keypoints.
    """
    # Where the network got both keypoints, its answer stands.
    had0, had1 = map(np.isin, mutual.indices.T, selected)
    more = guided_matches(found.above(threshold), mutual.only(~(had0 & had1)), points)
    # A guided match wins, since more matches speak for it.
    return _join(more, _without_keypoints_of(more, found))


def positions_of(points: Points, matches: Matches) -> Points:
    """Return the positions of K matches in both images, (K, 2) float64 each.

    Args:
        points: (M, 2) and (N, 2) px, positions of all keypoints.
    """
    index0, index1 = matches.indices.T
    return points[0][index0].astype(np.float64), points[1][index1].astype(np.float64)
