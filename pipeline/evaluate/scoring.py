"""Scores of one pair: the rows of the evaluation's table, and which matches are correct.

A row is (pair, scene, matcher, estimator, refined, metric, value). Metrics of the matches have no
estimator. An `error` has one, in px of the corners or, between two cameras, in degrees; it is
infinite without an estimate.
"""

from __future__ import annotations

import zlib
from typing import Dict, Iterator, List, Mapping, NamedTuple, Tuple

import numpy as np

from pipeline.evaluate import estimators
from pipeline.evaluate.estimators import Points
from pipeline.evaluate.matchers import BOUND
from pipeline.evaluate.pairs import KnownPair, Pose
from pipeline.params import EvaluateParams
from superglue_sift.features import extractors, sift
from superglue_sift.features.extractors import Extractor
from superglue_sift.geometry import refinement, two_view
from superglue_sift.geometry.guided_matching import positions_of
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair, from_pairs
from superglue_sift.network.ground_truth import UNMATCHED, ground_truth

# A match is correct within CORRECT_PX, as in the SuperGlue paper and HPatches' protocols.
CORRECT_PX = 3.0
REFINEMENT = (
    "positions in image 1 moved by superglue_sift.geometry.refinement, of every matcher alike;"
    " truth as detected"
)

Row = Tuple[str, str, str, str, bool, str, float]
# All matches of a network on a pair, whatever their scores: scores, and which are correct and found
Scored = Tuple[np.ndarray, np.ndarray, np.ndarray]


class Settings(NamedTuple):
    """Settings of an evaluation. params: section `evaluate`, with overrides from the command
    line.
    """

    params: EvaluateParams
    estimators: Tuple[str, ...] = estimators.DEFAULT
    resize: int = 480  # shorter side of pairs that are read from files, px; 0 keeps the size
    robustness: int = 0  # number of photographs for robustness.csv
    extractor: Extractor = extractors.DEFAULT
    bound: bool = False  # add a row of the true matches
    refine: bool = True  # also estimate from refined matches


def true_matches(pair: Pair, H_0to1: np.ndarray) -> np.ndarray:
    """(M,) index of the true match in image 1, negative without one, as in training."""
    batch = from_pairs([pair], H_0to1[None])
    return ground_truth(batch, CORRECT_PX, CORRECT_PX).matches0[0, : len(pair.records0)].numpy()


def matched_points(pair: Pair, matches: Matches) -> Tuple[np.ndarray, np.ndarray]:
    """The points of the matches in both images, (K, 2) float64 px each."""
    return positions_of((sift.positions(pair.records0), sift.positions(pair.records1)), matches)


def reprojection_errors(points0: np.ndarray, points1: np.ndarray, H_0to1: np.ndarray) -> np.ndarray:
    """(K,) float64 pixels, the larger of both directions, infinite where a point maps to infinity.

    points0, points1: (K, 2) float64.
    """
    forward = two_view.transform(points0, H_0to1) - points1
    backward = two_view.transform(points1, two_view.inverse(H_0to1)) - points0
    worst = np.linalg.norm([forward, backward], axis=-1).max(axis=0)
    return np.where(np.isfinite(worst), worst, np.inf)


def correct_matches(known: KnownPair, matches: Matches) -> np.ndarray:
    """(K,) bool: which of the matches are correct."""
    points = matched_points(known.pair, matches)
    if isinstance(known.truth, Pose):
        return estimators.epipolar_correct(*points, known.truth)
    return reprojection_errors(*points, known.truth) < CORRECT_PX


def difficulty(H_0to1: np.ndarray, size0: two_view.Size) -> Dict[str, float]:
    """How much the views differ at the centre of image 0 of (width, height) `size0`.

    rotation_deg: 0..180, without sign. scale: 1 or more, the larger over the smaller.
    """
    centre = (np.array([size0]) - 1) / 2
    left, stretches, right = np.linalg.svd(two_view.jacobians(H_0to1, centre)[0])
    rotation = left @ right  # the nearest orthogonal map
    scale = np.sqrt(stretches.prod())
    degrees = np.degrees(abs(np.arctan2(rotation[1, 0], rotation[0, 0])))
    return {"rotation_deg": float(degrees), "scale": float(max(scale, 1 / scale))}


def estimate_errors(
    known: KnownPair, matcher: str, matches: Matches, settings: Settings
) -> Iterator[Tuple[str, bool, float]]:
    """Yield the error of each estimator from the matches as detected, then from refined ones.

    Matches are refined as `Matcher.match` does, if `settings.refine`.
    """
    scores = matches.scores.astype(np.float64)
    enough = len(scores) >= two_view.MIN_POINTS
    weights = estimators.weights_of(matcher, scores) if enough else scores
    confident = estimators.most_confident(matcher, scores) if enough else scores > 0
    seed = zlib.crc32(known.name.encode()) & 0x7FFFFFFF  # depends on the pair alone
    detected = Points(*matched_points(known.pair, matches), weights, confident, seed)
    variants = {False: detected}  # by whether they are refined
    if settings.refine and known.images is not None:
        index0, index1 = matches.indices.T
        records = known.pair.records0[index0], known.pair.records1[index1]
        refined1, deviations, _ = refinement.refine(*known.images, *records)
        moved = refined1.astype(np.float64)
        variants[True] = detected._replace(points1=moved, deviations=deviations)
    for refined, points in variants.items():
        if isinstance(known.truth, Pose):
            for name, (estimate, _) in estimators.POSE_ESTIMATORS.items():
                pose = estimate(points, known.truth)
                yield name, refined, estimators.pose_error(pose, known.truth)
            continue
        for name in settings.estimators:
            H = estimators.ESTIMATORS[name][0](points) if enough else None
            yield name, refined, two_view.corner_error(H, known.truth, known.pair.size0)


def count_matches(
    known: KnownPair, matches: Matches, truth0: np.ndarray
) -> Tuple[np.ndarray, np.ndarray, int]:
    """Which matches are correct and which are found, (K,) bool each, and the number of true ones.

    A match is found if it is the true match itself. The true matches between two cameras are
    unknown: there found is correct, and the number is that of the keypoints of image 0, so that
    the recall is the matching score. truth0: (M,) from `true_matches`, unused for cameras.
    """
    correct = correct_matches(known, matches)
    if isinstance(known.truth, Pose):
        return correct, correct, max(len(known.pair.records0), 1)
    index0, index1 = matches.indices.T
    return correct, truth0[index0] == index1, int((truth0 > UNMATCHED).sum())


def score_pair(
    known: KnownPair,
    answers: Mapping[str, Matches],
    thresholds: Mapping[str, float],
    settings: Settings,
) -> Tuple[List[Row], Dict[str, Scored]]:
    """Score all matchers on one pair: rows, and all scored matches of those with a threshold.

    thresholds: of those whose answers contain every match.
    """
    pair = known.pair
    posed = isinstance(known.truth, Pose)
    truth0 = np.full(len(pair.records0), UNMATCHED)
    hard = {}
    if not isinstance(known.truth, Pose):
        truth0 = true_matches(pair, known.truth)
        hard = difficulty(known.truth, pair.size0)
        if settings.bound:
            ones = np.ones(len(truth0), np.float32)
            answers = {**answers, BOUND: Matches.from_dense(truth0, ones)}
    rows: List[Row] = []
    scored = {}
    for name, matches in answers.items():
        correct, found, truth = count_matches(known, matches, truth0)
        if name in thresholds:
            scored[name] = matches.scores.astype(np.float64), correct, found
            kept = matches.scores > thresholds[name]
            matches = matches.only(kept)
            correct = correct[kept]
            found = found[kept]
        count = len(matches)
        hits = int(found.sum())
        # No match is a failure: precision 0. No true match: recall is undefined, NaN.
        values = {
            "keypoints0": len(pair.records0),
            "keypoints1": len(pair.records1),
            "matches": count,
            "correct": int(correct.sum()),
            **({} if posed else {"true_matches": truth, "found": hits}),
            "precision": correct.sum() / count if count else 0.0,
            "matching_score" if posed else "recall": hits / truth if truth else np.nan,
            **hard,
        }
        start = (known.name, known.scene, name)
        rows += [(*start, "", False, metric, float(value)) for metric, value in values.items()]
        for estimator, refined, error in estimate_errors(known, name, matches, settings):
            rows.append((*start, estimator, refined, "error", error))
    return rows, scored
