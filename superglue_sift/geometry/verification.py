"""Decide whether two photographs show one place, and find all matches that fit their geometry.

With `scene=True`, a pair goes through four steps (`Matcher.match`):

1. `preview_pair`: the ratio test matches the first keypoints, in a thirtieth of the network's time.
   Keypoints on a watermark are left out. The pair is skipped if very few of the matches agree with
   one fundamental matrix.
2. The network matches the selected keypoints, and the ratio test all keypoints.
3. `verify_pair` fits a fundamental matrix to the matches of both (MAGSAC++), and measures how well
   they agree with it. This gives the probability that both photographs show one place.
4. If they do, `add_matches_near_lines` keeps all matches near their epipolar lines. Mutual nearest
   neighbours that fail the ratio test must also be where the matches around them say.

Matches of two different places may agree with one fundamental matrix by chance, or because windows
repeat. Two numbers tell whether it is one place, and a logistic regression weighs them
(`place_probability`):

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

Lengths are in pixels of the images that SIFT saw (`Features.as_detected`). Only watermarks are
looked for in pixels of the files, since they have their place and their size there.

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
from superglue_sift.features.sift import rank_keypoints
from superglue_sift.geometry import two_view
from superglue_sift.geometry.two_view import Size
from superglue_sift.matches import Matches

# Minimum probability of an accepted pair. With 0.9, a pair that is wrongly accepted counts as much
# as nine pairs that are wrongly rejected.
ACCEPT = 0.9
# The network runs if at least this many ratio matches agree on one geometry. Any eight may agree by
# chance.
MIN_MATCHES = 9
SKIPPED = 0.0  # Score of a pair for which the network was not run; all other scores are higher
FIRST_KEYPOINTS = 2048  # How many keypoints of an image `preview_pair` matches
MAX_KEYPOINTS = 8192
NETWORK_KEYPOINTS = 512  # Results are as good as with 1,024, in two thirds of the time
RESIZE = 1600  # Longer side in px to which photographs are reduced

# Distances from epipolar lines, in both images, px
INLIER_PX = 1.5  # Limit for an inlier
BAND_PX = 2.0  # Limit for a match that is kept
# Limit for keypoints that were refined by the pixels of all pairs. It holds in images reduced to
# RESIZE, since the image that SIFT saw is not known any more.
EXACT_PX = 0.8

COUNTED = 0.2  # A match of the network counts if its confidence is above this
NEIGHBOURS = 10  # So many nearest matches in an image are the neighbours of a match
FEW = 5  # Added to both numbers of matches that `lead` compares, since a few agree by chance
# Few matches of the ratio test say little. Support is therefore computed as if ADDED more matches
# agreed with the geometry, which have USUAL_SUPPORT.
ADDED = 20
USUAL_SUPPORT = 0.75
WEIGHTS = np.array([2.5, 4.5])  # Weights of lead and support
BIAS = -6.0

# Watermarks, in pixels of an image reduced to `two_view.REFERENCE_PX`
SAME_PX = 1.5  # Translations of one watermark differ by at most this
EXPECTED_PX = 10.0  # A watermark has one of the expected translations, up to this distance
AROUND_PX = 16.0  # Keypoints up to this far from its matches belong to a watermark
FEWEST = 4  # Minimum number of matches of a watermark
BORDER = 0.12  # Width of the border, as a part of the shorter side
# Maximum ratio of a watermark's area to that of all keypoints. The ratio is 0.16 for a plate in the
# middle, and 0.42 for a copy of the photograph as JPEG of quality 10.
SPREAD = 0.28
# True motion is smooth. Where a few matches share a translation, many more have similar ones.
ALONE = 2.0  # Minimum ratio of a watermark's matches to those with similar translations
SIMILAR = 4.0  # Limit of similar translations, times SAME_PX

# Guided matching
GUIDES = 8  # So many matches around a keypoint give a map
# Maps shrink by half where the squared distances of the matches add up to the square of this.
MAP_PRIOR_PX = 5.0
# The matches around a guided match say where it is. It may be away from that place by AWAY times
# their spread, plus AWAY_PX.
AWAY = 0.1
AWAY_PX = 3.0

Points = Tuple[np.ndarray, np.ndarray]  # Positions (M, 2) and (N, 2) px in both images


@dataclass(frozen=True)
class Rules:
    """Say how the pairs of a scene are matched.

    Attributes:
        accept: minimum probability that both photographs of an accepted pair show one place.
        min_matches: pairs are skipped if fewer ratio matches of the first keypoints agree on one
            geometry.

    Raises:
        RequestError: For a value out of range.
    """

    accept: float = ACCEPT
    min_matches: int = MIN_MATCHES

    def __post_init__(self) -> None:
        check_range("accept", self.accept, 0, 1)
        check_range("min_matches", self.min_matches, 0)


def preview_pair(
    pair: Sequence[Features], resize: int
) -> Tuple[int, Tuple[np.ndarray, np.ndarray]]:
    """Match two photographs by the ratio test alone, to decide whether the network shall run.

    Args:
        pair: the features of both photographs.
        resize: longer side in px to which the photographs were reduced.

    Returns:
        The number of ratio matches that agree with one fundamental matrix, and for each photograph
        the indices (m,) of the keypoints that lie on no watermark, by falling rank.
    """
    # Match the first keypoints by the ratio test.
    orders = [np.argsort(-rank_keypoints(features.records), kind="stable") for features in pair]
    first = [features.select(order[:FIRST_KEYPOINTS]) for features, order in zip(pair, orders)]
    matches = nearest.match_by_ratio(first[0].records, first[1].records)
    # Count the matches of one geometry that lie on no watermark.
    is_marked = find_watermarks(first, matches)
    keypoints0, keypoints1 = (
        features.as_detected(resize).keypoints[order[:FIRST_KEYPOINTS]]
        for features, order in zip(pair, orders)
    )
    points = points_of_matches((keypoints0, keypoints1), matches.only(~is_marked))
    inlier_mask = two_view.fit_fundamental(*points, INLIER_PX).inliers
    # Drop all keypoints near the watermarks, also those that the ratio test did not match.
    sizes = [features.size for features in pair]
    unmarked0, unmarked1 = (
        order[~_is_on_mark(features.keypoints[order], some.keypoints[index[is_marked]], sizes)]
        for features, order, some, index in zip(pair, orders, first, matches.indices.T)
    )
    return int(inlier_mask.sum()), (unmarked0, unmarked1)


def match_one_place(
    pair: Sequence[Features],
    keypoints: Points,
    network_matches: Matches,
    mutual_matches: Matches,
    threshold: float,
    accept: float,
) -> Tuple[Matches, float]:
    """Verify a pair, and find all matches of its geometry.

    Args:
        pair: features of both photographs, without the keypoints of watermarks. Their positions, in
            px of the files, serve only to find the last watermarks.
        keypoints: (M, 2) and (N, 2) px, the same keypoints in the images that SIFT saw.
        network_matches: all matches of the network, whatever their scores.
        mutual_matches: mutual nearest neighbours of all keypoints. Their scores are one minus the
            ratio of distances.
        threshold: the network's matches with a score above it are kept if they agree with the
            geometry.
        accept: minimum probability of an accepted pair.

    Returns:
        The matches, none for a rejected pair, and the probability of one place.
    """
    # A watermark may lie on keypoints that `preview_pair` did not match.
    network_matches = network_matches.only(~find_watermarks(pair, network_matches))
    F, evidence = verify_pair(network_matches, mutual_matches, keypoints)
    probability = place_probability(evidence)
    if F is None or probability < accept:
        return Matches.none(), probability
    confident = network_matches.above(threshold)
    return add_matches_near_lines(F, confident, mutual_matches, keypoints), probability


def verify_pair(
    network_matches: Matches, mutual_matches: Matches, keypoints: Points
) -> Tuple[Optional[np.ndarray], np.ndarray]:
    """Fit a geometry to the matches of a pair, and measure how well they agree with it.

    Args:
        network_matches: all matches of the network, whatever their scores.
        mutual_matches: mutual nearest neighbours of all keypoints. Their scores are one minus the
            ratio of distances.
        keypoints: (M, 2) and (N, 2) px, positions in the images that SIFT saw.

    Returns:
        F (3, 3) with x1^T F x0 = 0, or None if there is no geometry, and its evidence (2,) from
        `measure_evidence`.
    """
    counted = network_matches.above(COUNTED)
    ratio_matches = mutual_matches.above(1.0 - nearest.RATIO)
    # The network's matches tell which of several geometries is right. But they may be few if the
    # views are far apart, or lie along one row of windows. So the ratio test's matches help to
    # place the lines.
    F = two_view.fit_fundamental(*_distinct_points(counted, keypoints)[:2], INLIER_PX).model
    if F is not None:
        inliers = _join_matches(_keep_near_lines(F, counted, keypoints, INLIER_PX), ratio_matches)
        refit = two_view.fit_fundamental(*points_of_matches(keypoints, inliers), INLIER_PX).model
        F = F if refit is None else refit
    return F, measure_evidence(F, counted, ratio_matches, keypoints)


def add_matches_near_lines(
    F: np.ndarray, network_matches: Matches, mutual_matches: Matches, keypoints: Points
) -> Matches:
    """Keep the matches near their epipolar lines, and add those that agree with the matches around.

    Args:
        F: (3, 3), the fundamental matrix.
        network_matches: matches of the network. A match that the ratio test finds, too, keeps the
            network's score.
        mutual_matches: mutual nearest neighbours of all keypoints. Their scores are one minus the
            ratio of distances.
        keypoints: (M, 2) and (N, 2) px, positions in the images that SIFT saw.
    """
    # Matches that the network or the ratio test is sure of need to be near their lines only.
    sure = _join_matches(network_matches, mutual_matches.above(1.0 - nearest.RATIO))
    sure = nearest.keep_one_to_one(_keep_near_lines(F, sure, keypoints, BAND_PX))
    # Other mutual nearest neighbours must also be where the matches around them say.
    unsure = nearest.keep_one_to_one(_keep_near_lines(F, mutual_matches, keypoints, BAND_PX))
    return _join_matches(sure, find_guided_matches(sure, unsure, keypoints))


def agree_with_one_geometry(
    points0: np.ndarray, points1: np.ndarray, sizes: Tuple[Size, Size]
) -> np.ndarray:
    """Say which matches of refined keypoints are near their epipolar lines.

    Args:
        points0, points1: (K, 2) px of the files, the keypoints of the matches.
        sizes: (width, height) of both files in px.

    Returns:
        (K,) bool. All entries are true if there is no geometry.
    """
    # Convert from pixels of the files to pixels of the reduced images.
    points0, points1 = (
        two_view.transform(points, two_view.map_to_reduced(size, RESIZE))
        for points, size in zip((points0, points1), sizes)
    )
    F = two_view.fit_fundamental(points0, points1, EXACT_PX).model
    if F is None:
        return np.ones(len(points0), bool)
    return two_view.epipolar_distances(F, points0, points1) <= EXACT_PX


def _join_matches(first: Matches, second: Matches) -> Matches:
    """Join two sets of matches, sorted. A match that is in both has the score of the first."""
    indices = np.concatenate([first.indices, second.indices])
    scores = np.concatenate([first.scores, second.scores])
    # `np.unique` returns the first of equal rows.
    distinct, rows = np.unique(indices, axis=0, return_index=True)
    return Matches(distinct, scores[rows])


def _keep_near_lines(
    F: np.ndarray, matches: Matches, keypoints: Points, limit_px: float
) -> Matches:
    """Keep the matches at most `limit_px` from their epipolar lines in both images."""
    distances = two_view.epipolar_distances(F, *points_of_matches(keypoints, matches))
    return matches.only(distances <= limit_px)


def _distinct_points(
    matches: Matches, keypoints: Points
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keep one match for each position, since two orientations of a point are two keypoints.

    Returns:
        Positions (k, 2) px in both images and scores (k,) float64, by falling score.
    """
    points0, points1 = points_of_matches(keypoints, matches)
    rows = nearest.find_one_to_one(points0, points1, matches.scores)
    return points0[rows], points1[rows], matches.scores[rows].astype(np.float64)


# --- evidence


def place_probability(evidence: np.ndarray) -> float:
    """Compute the probability, above 0, that a pair with this evidence (2,) shows one place."""
    return 1.0 / (1.0 + math.exp(-float(evidence @ WEIGHTS) - BIAS))


def measure_evidence(
    F: Optional[np.ndarray], network_matches: Matches, ratio_matches: Matches, keypoints: Points
) -> np.ndarray:
    """Measure lead and support of a geometry; return (2,).

    Args:
        F: (3, 3), the fundamental matrix, or None.
        network_matches: matches of the network with a score above COUNTED.
        ratio_matches: matches of the ratio test.
        keypoints: (M, 2) and (N, 2) px, positions in the images that SIFT saw.

    Returns:
        Zeros if there is no geometry, or if it is the geometry of a mirror image.
    """
    nothing = np.zeros(len(WEIGHTS))
    if F is None:
        return nothing
    points0, points1, _ = _distinct_points(_join_matches(network_matches, ratio_matches), keypoints)
    distances = two_view.epipolar_distances(F, points0, points1)
    is_near = distances <= BAND_PX
    maps, followers = _fit_to_neighbours(points0[is_near], points1[is_near])
    # Local maps that reverse orientation show a mirror image.
    if two_view.compute_mirrored_fraction(maps) > 0.5:
        return nothing
    # Fit another geometry to the matches that disagree with this one.
    is_far = distances > 2 * BAND_PX
    points0 = points0[is_far]
    points1 = points1[is_far]
    rivals = 0
    rival_F = two_view.fit_fundamental(points0, points1, INLIER_PX).model
    if rival_F is not None:
        is_near = two_view.epipolar_distances(rival_F, points0, points1) <= BAND_PX
        rivals = _fit_to_neighbours(points0[is_near], points1[is_near])[1]
    lead = math.log((followers + FEW) / (rivals + FEW))
    return np.array([lead, _measure_support(F, *_distinct_points(ratio_matches, keypoints))])


def _fit_to_neighbours(points0: np.ndarray, points1: np.ndarray) -> Tuple[np.ndarray, int]:
    """Fit affine maps from image 0 to image 1 to the neighbours of each match, (k, 2) px.

    Returns:
        The maps (k, 2, 2), none for too few matches, and the number of matches that are where their
        neighbours say, in both images.
    """
    if len(points0) <= NEIGHBOURS:
        return np.zeros((0, 2, 2)), 0
    forward = points0, points1
    backward = points1, points0
    maps, distance1, spread1 = fit_maps_around(forward, _find_neighbours(points0), forward)
    _, distance0, spread0 = fit_maps_around(backward, _find_neighbours(points1), backward)
    follows0 = distance0 <= AWAY * spread0 + AWAY_PX
    follows1 = distance1 <= AWAY * spread1 + AWAY_PX
    return maps, int((follows0 & follows1).sum())


def _measure_support(
    F: np.ndarray, points0: np.ndarray, points1: np.ndarray, scores: np.ndarray
) -> float:
    """Measure support: which part of the matches around the agreeing matches agrees, too.

    A match agrees if it is near its epipolar lines. Neighbours are searched in each image, and the
    lower part of both images is taken.

    Args:
        F: (3, 3), the fundamental matrix.
        points0, points1: (k, 2) px, the ratio test's matches.
        scores: (k,), their weights.
    """
    is_near = two_view.epipolar_distances(F, points0, points1) <= BAND_PX
    count = int(is_near.sum())
    if not count or len(scores) <= NEIGHBOURS:
        return USUAL_SUPPORT
    neighbours = (_find_neighbours(points)[is_near] for points in (points0, points1))
    agreeing = scores * is_near
    part = min(agreeing[index].sum() / scores[index].sum() for index in neighbours)
    return float((count * part + ADDED * USUAL_SUPPORT) / (count + ADDED))


def _find_neighbours(points: np.ndarray) -> np.ndarray:
    """Find the other points nearest to each of k points (k, 2); return (k, NEIGHBOURS) indices."""
    from scipy.spatial import KDTree

    return np.asarray(KDTree(points).query(points, NEIGHBOURS + 1)[1])[:, 1:]


# --- watermarks


def find_watermarks(pair: Sequence[Features], matches: Matches) -> np.ndarray:
    """Find the matches of date bars, logos and watermarks, which no geometry may use.

    A watermark lies at the same place in both images, so its matches share one translation, and any
    F = [e]x fits them. Two unrelated photographs with the same date bar would seem to show one
    place. COLMAP's watermark test looks for a translation among matches near the border. Here
    matches in the middle count too. Photographs that are identical, or taken from one tripod, also
    share one translation, but all over the picture. A watermark covers a small part of it.

    Args:
        pair: features of both images, in px of the files.
        matches: K matches of these features.

    Returns:
        (K,) bool, whether each match lies on a watermark.
    """
    is_marked = np.zeros(len(matches), bool)
    sizes = (pair[0].size, pair[1].size)
    keypoints = [features.keypoints for features in pair]
    points = [xy[index] for xy, index in zip(keypoints, matches.indices.T)]
    for mark in _find_translations(points[0], points[1], sizes):
        areas = [
            _relative_area(matched[mark], detected, size)
            for matched, detected, size in zip(points, keypoints, sizes)
        ]
        if min(areas) < SPREAD:
            # Wrong matches between two letters of a watermark also fit F, since both letters lie on
            # one line. So every match with both ends on the watermark belongs to it.
            on_mark0, on_mark1 = (_is_on_mark(matched, matched[mark], sizes) for matched in points)
            is_marked |= on_mark0 & on_mark1
    return is_marked


def _is_on_mark(points: np.ndarray, mark: np.ndarray, sizes: Sequence[Size]) -> np.ndarray:
    """Say which points (n, 2) lie on the watermark whose matches are at `mark` (k, 2).

    Returns:
        (n,) bool.
    """
    from scipy.spatial import KDTree

    if not len(mark):
        return np.zeros(len(points), bool)
    limit = AROUND_PX * max(map(two_view.reduction_factor, sizes))
    return KDTree(mark).query(points, distance_upper_bound=limit)[0] < np.inf


def _find_translations(
    points0: np.ndarray, points1: np.ndarray, sizes: Tuple[Size, Size]
) -> Iterator[np.ndarray]:
    """Yield the sets of matches, (K,) bool, that share a translation that a watermark may have.

    A watermark has a fixed place relative to two edges or to the centre. It is drawn in pixels, or
    grows with the image.

    Args:
        points0, points1: (K, 2) px of the files.
        sizes: (width, height) of both files in px.
    """
    size0, size1 = map(np.array, sizes)
    factor = max(map(two_view.reduction_factor, sizes))
    anchors = np.array(list(itertools.product((0, 0.5, 1), repeat=2)))
    # The size of a watermark is the same in pixels, or relative to the longer side.
    for scale in dict.fromkeys((1.0, max(size1) / max(size0))):
        shifts = points1 - scale * points0
        # A watermark is fixed to the first edge, the centre or the last edge, in x and in y. Each
        # gives one translation.
        for expected in np.unique(anchors * (size1 - scale * size0), axis=0):
            mark = _share_translation(shifts, expected, factor)
            if mark.any():
                yield mark


def _share_translation(shifts: np.ndarray, expected: np.ndarray, factor: float) -> np.ndarray:
    """Find the shifts that are like the most frequent one near an expected shift.

    None are found if they are few, or if many more shifts are similar, as they are where the motion
    is true.

    Args:
        shifts: (K, 2) px of the files, of all matches.
        expected: (2,) px, the shift of a watermark.
        factor: px of the files per px of the reduced image for which the limits were chosen.

    Returns:
        (K,) bool.
    """
    from scipy.spatial import KDTree

    none = np.zeros(len(shifts), bool)
    candidates = shifts[np.linalg.norm(shifts - expected, axis=1) <= EXPECTED_PX * factor]
    if not len(candidates):
        return none
    tree = KDTree(candidates)
    counts = tree.query_ball_point(candidates, SAME_PX * factor / 2, return_length=True)
    distances = np.linalg.norm(shifts - candidates[counts.argmax()], axis=1)
    is_same = distances <= SAME_PX * factor
    is_similar = distances <= SIMILAR * SAME_PX * factor  # Includes the same shifts
    alone = is_same.sum() >= ALONE * (is_similar.sum() - is_same.sum())
    return is_same if alone and is_same.sum() >= FEWEST else none


def _relative_area(mark: np.ndarray, keypoints: np.ndarray, size: Size) -> float:
    """Compare the area over which `mark` (k, 2) scatters with the area of all keypoints (n, 2).

    An area is the square root of the determinant of the covariance. Keypoints at the border do not
    count. The ratio is 0 if fewer than three matches are left.
    """
    border = BORDER * min(size)
    last = np.array(size) - 1 - border
    mark, keypoints = (
        points[((points >= border) & (points <= last)).all(1)] for points in (mark, keypoints)
    )
    if len(mark) < 3:
        return 0.0
    area = np.linalg.det(np.cov(mark.T))
    return float(np.sqrt(max(area, 0.0) / max(np.linalg.det(np.cov(keypoints.T)), 1e-12)))


# --- guided matching


def fit_maps_around(
    guides: Points, neighbours: np.ndarray, points: Points
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit an affine map to the neighbours of each of k matches.

    Args:
        guides: (m, 2) px each, positions in both images of the matches to which maps are fitted.
        neighbours: (k, n), the neighbours of each match, as indices of `guides`.
        points: (k, 2) px each, positions of the k matches in both images.

    Returns:
        Three arrays:
        - (k, 2, 2), the maps,
        - (k,), the distance in px of each match from where its map sends it,
        - (k,), the spread in px of its neighbours in image 1.
    """
    # (m, 2) -> (k, n, 2) neighbours -> (k, 2), their centres
    centre0, centre1 = (positions[neighbours].mean(1) for positions in guides)
    offsets0 = guides[0][neighbours] - centre0[:, None]
    offsets1 = guides[1][neighbours] - centre1[:, None]
    # Solve for each map by linear least squares. A prior keeps it small where neighbours are near.
    normal = np.einsum("kni,knj->kij", offsets0, offsets0) + MAP_PRIOR_PX**2 * np.eye(2)
    right = np.einsum("kni,knj->kij", offsets0, offsets1)
    maps = np.linalg.solve(normal, right).swapaxes(1, 2)
    # Apply each map to the keypoint of its match.
    predicted = centre1 + np.einsum("kij,kj->ki", maps, points[0] - centre0)
    spread = np.sqrt((offsets1**2).sum(2).mean(1))
    return maps, np.linalg.norm(predicted - points[1], axis=1), spread


def find_guided_matches(guides: Matches, candidates: Matches, keypoints: Points) -> Matches:
    """Find the candidates that are where the nearest GUIDES matches of `guides` say.

    A candidate that shares a keypoint with a guide is dropped. The score of each match that is kept
    is the mean score of the guides around it.

    Args:
        guides: matches that are trusted.
        candidates: matches to choose from.
        keypoints: (M, 2) and (N, 2) px, positions of all keypoints of both images.
    """
    from scipy.spatial import KDTree

    candidates = _drop_keypoints_of(guides, candidates)
    if len(guides) < GUIDES or not len(candidates):
        return Matches.none()
    guide_points = points_of_matches(keypoints, guides)
    points = points_of_matches(keypoints, candidates)
    neighbours = np.asarray(KDTree(guide_points[0]).query(points[0], GUIDES)[1])
    _, distances, spread = fit_maps_around(guide_points, neighbours, points)
    is_near = distances <= AWAY * spread + AWAY_PX
    return Matches(candidates.indices, guides.scores[neighbours].mean(1)).only(is_near)


def _drop_keypoints_of(taken: Matches, matches: Matches) -> Matches:
    """Drop those of `matches` that share a keypoint with a match of `taken`."""
    is_taken0, is_taken1 = map(np.isin, matches.indices.T, taken.indices.T)
    return matches.only(~(is_taken0 | is_taken1))


def add_guided_matches(
    network_matches: Matches,
    mutual_matches: Matches,
    selected: Tuple[np.ndarray, np.ndarray],
    keypoints: Points,
    threshold: float,
) -> Matches:
    """Add mutual nearest neighbours that the network did not get, where its matches lead to them.

    A match that is added replaces less confident matches of its keypoints.

    Args:
        network_matches: all matches of the network.
        mutual_matches: mutual nearest neighbours of all keypoints.
        selected: (m,) and (n,), indices of the keypoints that the network got.
        keypoints: (M, 2) and (N, 2) px, positions in the images that SIFT saw.
        threshold: the network's matches with a score above it guide.
    """
    # Where the network got both keypoints, its decision stands.
    is_selected0, is_selected1 = map(np.isin, mutual_matches.indices.T, selected)
    candidates = mutual_matches.only(~(is_selected0 & is_selected1))
    guided_matches = find_guided_matches(network_matches.above(threshold), candidates, keypoints)
    # A guided match wins, since more matches speak for it.
    return _join_matches(guided_matches, _drop_keypoints_of(guided_matches, network_matches))


def points_of_matches(keypoints: Points, matches: Matches) -> Points:
    """Return the positions of K matches in both images, (K, 2) float64 px each.

    Args:
        keypoints: (M, 2) and (N, 2) px, positions of all keypoints.
        matches: K matches of these keypoints.
    """
    index0, index1 = matches.indices.T
    return keypoints[0][index0].astype(np.float64), keypoints[1][index1].astype(np.float64)
