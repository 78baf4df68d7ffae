"""Score one pair: decide which matches are correct, and make the rows of the evaluation's table.

A row is (pair, scene, matcher, estimator, refined, metric, value). Metrics of the matches have no
estimator. An `error` has an estimator. It is in px of the corners or, between two cameras, in
degrees. It is infinite if there is no estimate.
"""

from __future__ import annotations

import zlib
from typing import Dict, Iterator, List, Mapping, NamedTuple, Tuple

import numpy as np

from pipeline.evaluate import estimators
from pipeline.evaluate.estimators import Points
from pipeline.evaluate.matchers import BOUND
from pipeline.evaluate.pairs import CameraPair, KnownPair
from pipeline.params import EvaluateParams
from superglue_sift.features import sift
from superglue_sift.geometry import two_view
from superglue_sift.geometry.verification import points_of_matches
from superglue_sift.match_result import MatchResult
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair, from_pairs
from superglue_sift.network.ground_truth import UNMATCHED, find_true_matches

# A match is correct within CORRECT_PX, as in the SuperGlue paper and HPatches' protocols.
CORRECT_PX = 3.0

Row = Tuple[str, str, str, str, bool, str, float]
# All matches of a network on a pair, whatever their scores. Three arrays (K,) hold their scores,
# whether they are correct and whether they are found. The number is the count of true matches.
Scored = Tuple[np.ndarray, np.ndarray, np.ndarray, int]


class Settings(NamedTuple):
    """Settings of an evaluation.

    `params` is the section `evaluate`, changed by options of the command line.
    """

    params: EvaluateParams
    estimators: Tuple[str, ...] = estimators.DEFAULT
    bound: bool = False  # whether to add a row of the true matches
    refine: bool = True  # whether to estimate from refined matches, too


def true_matches(pair: Pair, H_0to1: np.ndarray) -> np.ndarray:
    """Return the index of each keypoint's true match in image 1, (M,), as in training.

    The index is negative for a keypoint without a true match.
    """
    # Call the function of the training's loss on a batch of one pair.
    batch = from_pairs([pair], H_0to1[None])
    return (
        find_true_matches(batch, CORRECT_PX, CORRECT_PX).matches0[0, : len(pair.records0)].numpy()
    )


def matched_points(pair: Pair, matches: Matches) -> Tuple[np.ndarray, np.ndarray]:
    """Return the points of the matches in both images, (K, 2) float64 px each."""
    return points_of_matches(
        (sift.positions(pair.records0), sift.positions(pair.records1)), matches
    )


def reprojection_errors(points0: np.ndarray, points1: np.ndarray, H_0to1: np.ndarray) -> np.ndarray:
    """Return the reprojection error of each match, (K,) float64 px.

    It is the larger error of both directions, and infinite if a point maps to infinity. points0 and
    points1 are (K, 2) float64 px.
    """
    # Differences in both images are (2, K, 2), and the larger distance is (K,).
    forward = two_view.transform(points0, H_0to1) - points1
    backward = two_view.transform(points1, two_view.inverse(H_0to1)) - points0
    worst = np.linalg.norm([forward, backward], axis=-1).max(axis=0)
    return np.where(np.isfinite(worst), worst, np.inf)


def correct_matches(known: KnownPair, matches: Matches) -> np.ndarray:
    """Return which of the matches are correct, (K,) bool."""
    points = matched_points(known.pair, matches)
    if isinstance(known.truth, CameraPair):
        return estimators.epipolar_errors(*points, known.truth) < estimators.EPIPOLAR_LIMIT
    return reprojection_errors(*points, known.truth) < CORRECT_PX


def estimate_errors(
    known: KnownPair, matcher: str, matches: Matches, settings: Settings
) -> Iterator[Tuple[str, bool, float]]:
    """Yield the error of each estimator: its name, whether matches are refined, and the error.

    First come the matches as they were detected. If `settings.refine`, the matches refined as in
    `Matcher.match` follow.
    """
    scores = matches.scores.astype(np.float64)
    seed = zlib.crc32(known.name.encode()) & 0x7FFFFFFF  # the seed depends on the pair alone
    detected = Points(*matched_points(known.pair, matches), matcher, scores, seed)
    variants = {False: detected}  # whether the matches are refined, and their points
    if settings.refine:
        # Keypoints of image 1 move to where the pixels around both agree best.
        result = MatchResult.of(*known.features, matches).refine(*known.features)
        if result.deviations is not None:
            moved = result.points1.astype(np.float64)
            variants[True] = detected._replace(points1=moved, deviations=result.deviations)
    # Every estimator gets the same matches, in the same order.
    for refined, points in variants.items():
        if isinstance(known.truth, CameraPair):
            for name, estimate in estimators.POSE_ESTIMATORS.items():
                pose = estimate(points, known.truth)
                yield name, refined, estimators.pose_error(pose, known.truth)
            continue
        for name in settings.estimators:
            enough = len(scores) >= two_view.MIN_POINTS
            H = estimators.ESTIMATORS[name](points) if enough else None
            yield name, refined, two_view.corner_error(H, known.truth, known.pair.size0)


def score_pair(
    known: KnownPair,
    by_name: Mapping[str, Matches],
    thresholds: Mapping[str, float],
    settings: Settings,
) -> Tuple[List[Row], Dict[str, Scored]]:
    """Score all matchers on one pair.

    `thresholds` are the thresholds of the matchers of which `by_name` has every match.

    Returns:
        The rows of the table, and all scored matches of each matcher with a threshold.
    """
    posed = isinstance(known.truth, CameraPair)
    count0 = len(known.pair.records0)
    # Between two cameras the true matches are unknown. There every correct match is found, and the
    # keypoints of image 0 stand for the true matches, so that the recall is the matching score.
    truth0 = np.full(count0, UNMATCHED)
    truth = max(count0, 1)
    if not isinstance(known.truth, CameraPair):
        truth0 = true_matches(known.pair, known.truth)
        truth = int((truth0 > UNMATCHED).sum())
    if settings.bound:
        by_name = {**by_name, BOUND: Matches.from_dense(truth0, np.ones(count0))}
    rows: List[Row] = []
    scored = {}
    for name, matches in by_name.items():
        index0, index1 = matches.indices.T
        correct = correct_matches(known, matches)
        found = correct if posed else truth0[index0] == index1
        # The curves over the confidence need all matches, but the rows need those that count.
        if name in thresholds:
            scored[name] = matches.scores.astype(np.float64), correct, found, truth
        kept = matches.scores > thresholds.get(name, -1.0)
        count, right, hits = (each.sum() for each in (kept, correct & kept, found & kept))
        # A pair without a match is a failure, so its precision is 0. Without a true match the
        # recall is undefined.
        values = {
            "keypoints0": count0,
            "keypoints1": len(known.pair.records1),
            "matches": count,
            "correct": right,
            **({} if posed else {"true_matches": truth, "found": hits}),
            "precision": right / max(count, 1),
            "matching_score" if posed else "recall": hits / truth if truth else np.nan,
        }
        # Make one row for each value, and for each error of an estimate.
        start = (known.name, known.scene, name)
        rows += [(*start, "", False, metric, float(value)) for metric, value in values.items()]
        counted = matches.only(kept)
        for estimator, refined, error in estimate_errors(known, name, counted, settings):
            rows.append((*start, estimator, refined, "error", error))
    return rows, scored
