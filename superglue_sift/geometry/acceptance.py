"""The probability that two photographs show one place, from the network's matches of them.

Matches of two places may agree with one fundamental matrix by chance, or because windows repeat.
Four numbers tell this from one place, and a logistic regression weighs them:

- significance: log(1 + s). Wrong matches give as many inliers, for any choice of seven matches,
  once in 10^s pairs (a contrario; Moisan and Stival 2004).
- order: part of the neighbours of an inlier that are near it in the other image, too.
- orientation: how many fewer of the maps around inliers are those of a mirror image than of wrong
  matches, times the square root of their number, as the certainty of a share grows. Matches of a
  photograph and its mirror image fit one fundamental matrix, too.
- agreement: part of the confidence of all matches that the inliers have. Where nothing is in both
  photographs, the network finds few matches; so this is high, too, if they share little.

`python -m benchmarks.dev.acceptance` learns the weights from made pairs.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Tuple

import numpy as np

from superglue_sift.features import nearest
from superglue_sift.geometry import two_view
from superglue_sift.geometry.local_maps import AROUND, maps_around

COUNTED = 0.2  # confidence above which a match counts
INLIER_PX = 1.5  # distance from the epipolar lines, in both images
SEVEN = 7  # matches give a fundamental matrix
# Neighbours of an inlier, among the inliers
FOLLOWED = 5  # the nearest, which are looked for
NEAR = 10  # the nearest in the other image, among which they are looked for
MIRRORED_BY_CHANCE = 0.5  # part of wrong matches that have maps of a mirror image

FEATURES = ("significance", "order", "orientation", "agreement")
WEIGHTS = np.array([0.35, 2.34, 0.91, 3.92])
BIAS = -6.33


class Matched(NamedTuple):
    """Matches of two images: points (K, 2) float64 px, confidences (K,), sizes (width, height)."""

    points0: np.ndarray
    points1: np.ndarray
    scores: np.ndarray
    sizes: Tuple[Tuple[float, float], Tuple[float, float]]

    def only(self, chosen: np.ndarray) -> Matched:
        """The chosen matches. chosen: (K,) bool, or indices."""
        points = self.points0[chosen], self.points1[chosen]
        return Matched(*points, self.scores[chosen], self.sizes)

    def distinct(self) -> Matched:
        """The surest match of each position: two orientations of a point may be two keypoints."""
        return self.only(nearest.most_confident_each(self.points0, self.points1, self.scores))


class Judgement(NamedTuple):
    """F: (3, 3), None without a geometry. inliers: (K,) bool. features: (4,) FEATURES."""

    F: Optional[np.ndarray]
    inliers: np.ndarray
    features: np.ndarray

    @property
    def probability(self) -> float:
        """Probability that the pair shows one place."""
        return probability(self.features)


def judge(matched: Matched, F: Optional[np.ndarray] = None) -> Judgement:
    """Judge the network's matches of a pair by F (3, 3), or else by the one that fits them best."""
    sure = matched.scores > COUNTED
    counted = matched.only(sure).distinct()
    if F is None:
        F = two_view.fit_fundamental(counted.points0, counted.points1, INLIER_PX).model
    return Judgement(F, sure & _near(F, matched), features_of(counted, _near(F, counted)))


def _near(F: Optional[np.ndarray], matched: Matched) -> np.ndarray:
    """(K,) bool: matches near their epipolar lines; none without F."""
    if F is None:
        return np.zeros(len(matched.scores), bool)
    return two_view.epipolar_distances(F, matched.points0, matched.points1) <= INLIER_PX


def probability(features: np.ndarray) -> float:
    """Probability, above 0, that a pair of these features (4,) shows one place."""
    return 1.0 / (1.0 + math.exp(-float(features @ WEIGHTS) - BIAS))


def features_of(matched: Matched, inliers: np.ndarray) -> np.ndarray:
    """(4,) FEATURES of distinct matches; inliers: (K,) bool. Zeros for at most seven inliers."""
    agreeing = matched.only(inliers)
    count = len(agreeing.scores)
    if count <= SEVEN:
        return np.zeros(len(FEATURES))
    near0 = _neighbours(agreeing.points0)
    near1 = _neighbours(agreeing.points1)
    points = agreeing.points0, agreeing.points1
    maps = maps_around(points, near0[:, :AROUND], points).maps
    digits = significance(len(matched.scores), count, _chance(matched.sizes))
    return np.array(
        [
            math.log1p(digits),
            min(_kept(near0, near1), _kept(near1, near0)),
            (MIRRORED_BY_CHANCE - two_view.mirrored_part(maps)) * math.sqrt(count),
            agreeing.scores.sum() / matched.scores.sum(),
        ]
    )


def significance(count: int, inliers: int, chance: float) -> float:
    """Decimal digits by which `inliers` of `count` matches are too many for chance, at least 0.

    chance: that a wrong match is an inlier. The tail of the binomial distribution is bounded by
    Chernoff's inequality, times the number of choices of seven matches.
    """
    rest = count - SEVEN
    part = (inliers - SEVEN) / max(rest, 1)
    if part <= chance:
        return 0.0
    nats = part * math.log(part / chance)
    if part < 1:
        nats += (1 - part) * math.log((1 - part) / (1 - chance))
    choices = math.lgamma(count + 1) - math.lgamma(SEVEN + 1) - math.lgamma(rest + 1)
    return max(0.0, rest * nats - choices) / math.log(10)


def _chance(sizes: Tuple[Tuple[float, float], Tuple[float, float]]) -> float:
    """Chance that a wrong match is an inlier: the part of an image near its longest line."""
    strips = (2 * INLIER_PX * math.hypot(*size) / (size[0] * size[1]) for size in sizes)
    return min(max(strips), 0.5)


def _neighbours(points: np.ndarray) -> np.ndarray:
    """(k, NEAR) the others nearest to each of k > 1 points (k, 2), nearest first; or all."""
    from scipy.spatial import KDTree

    _, nearest = KDTree(points).query(points, min(NEAR + 1, len(points)))
    return np.asarray(nearest)[:, 1:]


def _kept(near: np.ndarray, there: np.ndarray) -> float:
    """Part of the nearest neighbours in one image that are neighbours in the other, too."""
    followed = near[:, :FOLLOWED, None] == there[:, None, :]
    return float(followed.any(2).mean())
