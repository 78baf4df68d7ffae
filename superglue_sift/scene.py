"""Match photographs of one place: accept or reject each pair, and add all matches of its geometry.

With `scene=True`, a pair goes through four steps (`Matcher.match`):

1. `verify_ratio_matches`: the ratio test matches the first keypoints, in a thirtieth of the
   network's time. Keypoints on a watermark are left out. The pair is skipped if very few of the
   matches agree with one fundamental matrix.
2. The network matches the selected keypoints, and the ratio test all keypoints.
3. `fit_geometry` fits a fundamental matrix to the matches of both (MAGSAC++), and measures how well
   they agree with it (`geometry.verification`). This gives the probability that both photographs
   show one place.
4. If they do, `select_epipolar_matches` keeps all matches near their epipolar lines. Mutual nearest
   neighbors that fail the ratio test must also be where the matches around them predict them.

Positions are in pixels of the files. Limits are in pixels of the images that SIFT saw, so `factors`
multiply them, one for each image: px of the file per px of that image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

import numpy as np

from superglue_sift.errors import check_range
from superglue_sift.features import nearest
from superglue_sift.features.features import Features
from superglue_sift.features.sift import rank_keypoints
from superglue_sift.geometry import two_view, verification
from superglue_sift.geometry.local_maps import Points
from superglue_sift.geometry.verification import BAND_PX, INLIER_PX, Factors
from superglue_sift.geometry.watermarks import find_watermarks, lie_on_mark
from superglue_sift.guided import find_guided_matches
from superglue_sift.matches import Matches

# Minimum probability of an accepted pair. With 0.9, a pair that is wrongly accepted counts as much
# as nine pairs that are wrongly rejected.
ACCEPT = 0.9
# The network runs if at least this many ratio matches agree on one geometry. Any eight may agree by
# chance.
MIN_MATCHES = 9
SKIPPED = 0.0  # Score of a pair for which the network was not run; all other scores are higher
FIRST_KEYPOINTS = 2048  # How many keypoints of an image `verify_ratio_matches` matches
MAX_KEYPOINTS = 8192
NETWORK_KEYPOINTS = 512  # Results are as good as with 1,024, in two thirds of the time
RESIZE = 1600  # Longer side in px to which photographs are reduced
SIZES = {  # Settings of a matcher of scenes
    "max_keypoints": MAX_KEYPOINTS,
    "network_keypoints": NETWORK_KEYPOINTS,
    "resize": RESIZE,
}
MIN_CONFIDENCE = 0.2  # Matches of the network above this confidence are verified


@dataclass(frozen=True)
class Rules:
    """How the pairs of a scene are matched.

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


def verify_ratio_matches(
    pair: Sequence[Features], factors: Factors
) -> Tuple[int, Tuple[np.ndarray, np.ndarray]]:
    """Match two photographs by the ratio test alone, to decide whether the network shall run.

    Args:
        pair: the features of both photographs.
        factors: multiply the limits, one for each image.

    Returns:
        The number of inliers among the ratio matches, and for each photograph the indices (m,) of
        the keypoints that lie on no watermark, by descending rank.
    """
    # Match the first keypoints by the ratio test.
    orders = [np.argsort(-rank_keypoints(features), kind="stable") for features in pair]
    first = [features.select(order[:FIRST_KEYPOINTS]) for features, order in zip(pair, orders)]
    keypoints = first[0].keypoints, first[1].keypoints
    sizes = pair[0].image_size, pair[1].image_size
    matches = nearest.match_by_ratio(first[0], first[1])
    # Count the inliers of one geometry that lie on no watermark.
    is_marked = find_watermarks(keypoints, matches.indices, sizes)
    points = matches.select(~is_marked).get_points(keypoints)
    inliers = two_view.fit_fundamental(*points, INLIER_PX, factors)[1]
    # Drop all keypoints near the watermarks, also those that the ratio test did not match.
    unmarked0, unmarked1 = (
        order[~lie_on_mark(features.keypoints[order], mark, sizes)]
        for features, order, mark in zip(
            pair, orders, matches.select(is_marked).get_points(keypoints)
        )
    )
    return int(inliers.sum()), (unmarked0, unmarked1)


def verify_pair(
    pair: Sequence[Features],
    network_matches: Matches,
    mutual_matches: Matches,
    factors: Factors,
    threshold: float,
    accept: float,
) -> Tuple[Matches, float]:
    """Verify a pair, and find all matches of its geometry.

    Args:
        pair: features of both photographs, without the keypoints of watermarks.
        network_matches: all matches of the network, whatever their scores.
        mutual_matches: mutual nearest neighbors of all keypoints. Their scores are one minus the
            ratio of distances.
        factors: multiply the limits, one for each image.
        threshold: the network's matches with a score above it are kept if they agree with the
            geometry.
        accept: minimum probability of an accepted pair.

    Returns:
        The matches, none for a rejected pair, and the probability of one place.
    """
    keypoints = pair[0].keypoints, pair[1].keypoints
    # A watermark may lie on keypoints that `verify_ratio_matches` did not match.
    sizes = pair[0].image_size, pair[1].image_size
    is_marked = find_watermarks(keypoints, network_matches.indices, sizes)
    network_matches = network_matches.select(~is_marked)
    F, evidence = fit_geometry(network_matches, mutual_matches, keypoints, factors)
    probability = verification.compute_probability(evidence)
    if F is None or probability < accept:
        return Matches.none(), probability
    confident = network_matches.keep_above(threshold)
    return select_epipolar_matches(F, confident, mutual_matches, keypoints, factors), probability


def fit_geometry(
    network_matches: Matches, mutual_matches: Matches, keypoints: Points, factors: Factors
) -> Tuple[Optional[np.ndarray], np.ndarray]:
    """Fit a fundamental matrix to the matches of a pair, and measure how well they agree with it.

    Args:
        network_matches: all matches of the network, whatever their scores.
        mutual_matches: mutual nearest neighbors of all keypoints. Their scores are one minus the
            ratio of distances.
        keypoints: (M, 2) and (N, 2) px, positions of all keypoints of both images.
        factors: multiply the limits, one for each image.

    Returns:
        F (3, 3) with x1^T F x0 = 0, or None if there is no geometry, and its evidence (2,) from
        `verification.measure_evidence`.
    """
    network_matches = network_matches.keep_above(MIN_CONFIDENCE)
    ratio_matches = mutual_matches.keep_above(1.0 - nearest.RATIO)
    # The network's matches tell which of several geometries is right. But they may be few if the
    # views are far apart, or lie along one row of windows. So the ratio test's matches help to
    # place the lines.
    points, _ = _get_distinct_points(network_matches, keypoints)
    F = two_view.fit_fundamental(*points, INLIER_PX, factors)[0]
    if F is not None:
        near = _keep_near_lines(F, network_matches, keypoints, INLIER_PX, factors)
        points = near.join(ratio_matches).get_points(keypoints)
        refit = two_view.fit_fundamental(*points, INLIER_PX, factors)[0]
        F = F if refit is None else refit
    points, _ = _get_distinct_points(network_matches.join(ratio_matches), keypoints)
    ratio_points, ratio_scores = _get_distinct_points(ratio_matches, keypoints)
    return F, verification.measure_evidence(F, points, ratio_points, ratio_scores, factors)


def select_epipolar_matches(
    F: np.ndarray,
    network_matches: Matches,
    mutual_matches: Matches,
    keypoints: Points,
    factors: Factors,
) -> Matches:
    """Select the matches of both that lie near their epipolar lines.

    Mutual nearest neighbors that fail the ratio test must also be where the matches around them
    predict them.

    Args:
        F: (3, 3), the fundamental matrix.
        network_matches: matches of the network. A match that the ratio test finds, too, keeps the
            network's score.
        mutual_matches: mutual nearest neighbors of all keypoints. Their scores are one minus the
            ratio of distances.
        keypoints: (M, 2) and (N, 2) px, positions of all keypoints of both images.
        factors: multiply the limits, one for each image.
    """
    # A confident match only has to lie near its epipolar line.
    confident = network_matches.join(mutual_matches.keep_above(1.0 - nearest.RATIO))
    confident = _keep_near_lines(F, confident, keypoints, BAND_PX, factors)
    confident = nearest.keep_one_to_one(confident)
    # Other mutual nearest neighbors must also be where the matches around them predict them.
    others = _keep_near_lines(F, mutual_matches, keypoints, BAND_PX, factors)
    others = nearest.keep_one_to_one(others)
    return confident.join(find_guided_matches(confident, others, keypoints, factors))


def _keep_near_lines(
    F: np.ndarray, matches: Matches, keypoints: Points, limit_px: float, factors: Factors
) -> Matches:
    """Keep the matches at most `limit_px` from their epipolar lines in both images."""
    distances = two_view.compute_epipolar_distances(F, *matches.get_points(keypoints), factors)
    return matches.select(distances <= limit_px)


def _get_distinct_points(matches: Matches, keypoints: Points) -> Tuple[Points, np.ndarray]:
    """Keep one match for each position, since two orientations of a point may be two keypoints.

    Returns:
        Positions (k, 2) px in both images and scores (k,) float64, by descending score.
    """
    points0, points1 = matches.get_points(keypoints)
    rows = nearest.find_one_to_one(points0, points1, matches.scores)
    return (points0[rows], points1[rows]), matches.scores[rows].astype(np.float64)
