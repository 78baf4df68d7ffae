"""One row of figures per pair and matcher."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Dict, Sequence, Tuple

import numpy as np
import torch

from pipeline.evaluation import metrics
from pipeline.evaluation.estimators import DEFAULT, ESTIMATORS
from pipeline.evaluation.matchers import PairMatches
from pipeline.evaluation.pairs import Pair
from superglue_sift import geometry
from superglue_sift.truth import pair_truth


@dataclass(frozen=True)
class Limits:
    """What counts. correct_px: a match is correct below this reprojection error; the rest are RANSAC's."""

    correct_px: float = 3.0
    ransac_px: float = 3.0
    ransac_iterations: int = 3000
    estimators: Tuple[str, ...] = DEFAULT


@dataclass(frozen=True)
class Row:
    """Figures of one matcher on one pair: a line of pairs.csv. Errors in pixels, inf without an estimate."""

    pair: str
    scene: str
    matcher: str
    keypoints0: int
    keypoints1: int
    counts: metrics.MatchCounts
    errors: Dict[str, float]
    conditions: Dict[str, float]

    @property
    def error(self) -> float:
        """That of the first estimator, by which pairs are called good or bad."""
        return next(iter(self.errors.values()))


def points_of(records: np.ndarray) -> np.ndarray:
    """(N, 2) float64 pixels of KEYPOINT records."""
    return np.stack([records["x"], records["y"]], axis=-1).astype(np.float64).reshape(-1, 2)


def true_matches(pair: Pair, correct_px: float) -> np.ndarray:
    """(M,) index of the true partner in image 1, negative without one: the truth that training uses."""
    truth = pair_truth(
        torch.from_numpy(points_of(pair.keypoints0)),
        torch.from_numpy(points_of(pair.keypoints1)),
        torch.from_numpy(np.asarray(pair.H_0to1, np.float64)),
        torch.tensor(pair.size0),
        torch.tensor(pair.size1),
        correct_px,
        correct_px,
    )
    return truth.matches0.numpy()


def matched_points(pair: Pair, found: PairMatches):
    """Points of the predicted matches, (K, 2) and (K, 2) float64, and their (K,) scores."""
    index0 = np.flatnonzero(found.matches0 > metrics.UNMATCHED)
    points0 = points_of(pair.keypoints0)[index0]
    points1 = points_of(pair.keypoints1)[found.matches0[index0]]
    return points0, points1, found.scores0[index0].astype(np.float64)


def estimates(pair: Pair, found: PairMatches, limits: Limits) -> dict:
    """Homography or None by estimator. The seed of RANSAC depends on the pair alone."""
    points0, points1, weights = matched_points(pair, found)
    seed = zlib.crc32(pair.name.encode()) & 0x7FFFFFFF
    settings = (limits.ransac_px, limits.ransac_iterations, seed)
    return {name: ESTIMATORS[name](points0, points1, weights, *settings) for name in limits.estimators}


def score(pair: Pair, matcher: str, found: PairMatches, truth0: np.ndarray, limits: Limits) -> Row:
    """The row of one matcher on one pair; truth0 from `true_matches`."""
    points0, points1, _ = matched_points(pair, found)
    errors = metrics.reprojection_errors(points0, points1, pair.H_0to1)
    return Row(
        pair=pair.name,
        scene=pair.scene,
        matcher=matcher,
        keypoints0=len(pair.keypoints0),
        keypoints1=len(pair.keypoints1),
        counts=metrics.count_matches(found.matches0, truth0, errors, limits.correct_px),
        errors={
            name: geometry.corner_error(H, pair.H_0to1, pair.size0)
            for name, H in estimates(pair, found, limits).items()
        },
        conditions=pair.conditions,
    )


def matchers_of(rows: Sequence[Row]) -> Tuple[str, ...]:
    """Names of the matchers the rows belong to, in their order: that of every table."""
    return tuple(dict.fromkeys(row.matcher for row in rows))


def estimators_of(rows: Sequence[Row]) -> Tuple[str, ...]:
    """Names of the estimators the rows hold errors of."""
    return tuple(rows[0].errors) if rows else DEFAULT
