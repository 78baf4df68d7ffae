"""Score one pair: decide which matches are correct, and make the rows of the evaluation's table.

A row is (pair, scene, matcher, estimator, refined, metric, value). Metrics of the matches have no
estimator. An `error` has an estimator. The error of a homography is that of the corners, in px. The
error of a relative pose is in degrees. An error is infinite if there is no estimate.
"""

from __future__ import annotations

import zlib
from typing import Iterator, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
import torch

from pipeline.evaluate import estimators
from pipeline.evaluate.estimators import MatchedPoints
from pipeline.evaluate.matchers import BOUND, NO_THRESHOLD, OURS, RATIO_TEST
from pipeline.evaluate.pairs import CameraPair, ImagePair, LabeledPair, TrueGeometry
from pipeline.params import EvaluateParams
from superglue_sift import drawing
from superglue_sift.geometry import two_view
from superglue_sift.match_result import MatchResult
from superglue_sift.matches import Matches
from superglue_sift.network.batch import FeaturePair, make_batch
from superglue_sift.network.ground_truth import UNMATCHED, find_true_matches

# A match is correct within CORRECT_PX, as in the SuperGlue paper and HPatches' protocols.
CORRECT_PX = 3.0

Row = Tuple[str, str, str, str, bool, str, float]
# All K matches of a matcher on a pair, whatever their scores. Three arrays (K,) have the score of
# each match, whether it is correct, and whether it is a true match. The number is the count of all
# true matches of the pair.
MatchOutcomes = Tuple[np.ndarray, np.ndarray, np.ndarray, int]
PICTURED = (OURS, RATIO_TEST)  # The matchers whose matches are drawn


class PairScores(NamedTuple):
    """What is kept of a pair after it was scored.

    Attributes:
        images: the pair of images.
        scene_index: index of its scene in the source.
        rows: the rows of the table.
        outcomes: the outcomes of all matches of each matcher with a threshold.
        panels: the matches above the threshold of the matchers PICTURED, for a picture.
    """

    images: ImagePair
    scene_index: int
    rows: List[Row]
    outcomes: Mapping[str, MatchOutcomes] = {}
    panels: Sequence[drawing.Panel] = ()


class ScoringSettings(NamedTuple):
    """What is computed for each pair.

    Attributes:
        params: the section `evaluate` of params.yaml.
        estimators: names in `estimators.ESTIMATORS`.
        bound: whether the true matches are scored, too, as an upper bound.
        refine: whether homographies and poses are estimated from refined matches, too.
    """

    params: EvaluateParams
    estimators: Tuple[str, ...] = estimators.DEFAULT
    bound: bool = False
    refine: bool = True


def find_true_matches0(pair: FeaturePair, H_0to1: np.ndarray) -> np.ndarray:
    """Return the index of the true match in image 1 of each of the M keypoints of image 0, (M,).

    The index is negative for a keypoint without a true match. The rule is that of the training's
    loss. `H_0to1` is (3, 3), in px.
    """
    # Call the function of the training's loss on a batch of one pair.
    images0, images1 = (make_batch([features]) for features in pair)
    H = torch.from_numpy(np.array(H_0to1))[None]
    truth = find_true_matches(images0, images1, H, positive_px=CORRECT_PX, negative_px=CORRECT_PX)
    return truth.matches0[0, : len(pair[0].keypoints)].numpy()


def get_matched_points(pair: FeaturePair, matches: Matches) -> Tuple[np.ndarray, np.ndarray]:
    """Return the positions of the matched keypoints in both images, (K, 2) float64 px each."""
    return matches.get_points((pair[0].keypoints, pair[1].keypoints))


def compute_reprojection_errors(
    points0: np.ndarray, points1: np.ndarray, H_0to1: np.ndarray
) -> np.ndarray:
    """Return the reprojection error of each match, (K,) float64 px.

    It is the larger error of both directions, and infinite if a point maps to infinity.

    Args:
        points0, points1: the matched points, (K, 2) float64 px.
        H_0to1: (3, 3) float64.
    """
    # The differences in both images are (2, K, 2), and the larger distance is (K,).
    forward = two_view.transform(points0, H_0to1) - points1
    backward = two_view.transform(points1, two_view.inverse(H_0to1)) - points0
    errors = np.linalg.norm([forward, backward], axis=-1).max(axis=0)
    return np.where(np.isfinite(errors), errors, np.inf)


def find_correct_matches(
    points0: np.ndarray, points1: np.ndarray, truth: TrueGeometry
) -> np.ndarray:
    """Return whether each match is correct, (K,) bool.

    A match is correct if its reprojection error is below CORRECT_PX or, between two cameras, if its
    epipolar error is below `estimators.EPIPOLAR_LIMIT`. Between two photographs with nothing in
    common, no match is.

    Args:
        points0, points1: the matched points, (K, 2) float64 px.
        truth: the ground truth.
    """
    if truth is None:
        return np.zeros(len(points0), bool)
    if isinstance(truth, CameraPair):
        errors = estimators.compute_epipolar_errors(points0, points1, truth)
        return errors < estimators.EPIPOLAR_LIMIT
    return compute_reprojection_errors(points0, points1, truth) < CORRECT_PX


def compute_errors(
    labeled_pair: LabeledPair, matcher: str, matches: Matches, settings: ScoringSettings
) -> Iterator[Tuple[str, bool, float]]:
    """Estimate the homography or the pose of a pair by each estimator, and yield the errors.

    The errors of the matches as detected come first. With `settings.refine`, the errors of the
    matches refined as in `Matcher.match` follow.

    Args:
        labeled_pair: the pair and its ground truth.
        matcher: the name of the matcher.
        matches: its matches above the threshold.
        settings: the estimators, and whether matches are refined.

    Yields:
        The name of the estimator, whether the matches are refined, and the error in px or degrees.
    """
    truth = labeled_pair.images.truth
    scores = matches.scores.astype(np.float64)
    # The seed depends on the pair alone, so that every matcher and every run has the same one.
    seed = zlib.crc32(labeled_pair.images.name.encode()) & 0x7FFFFFFF
    detected = MatchedPoints(
        *get_matched_points(labeled_pair.oriented, matches), matcher, scores, seed
    )
    variants = {False: detected}  # Whether the matches are refined, and their points
    if settings.refine:
        # Keypoints of image 1 move to where the pixels around both agree best.
        features = labeled_pair.features
        result = MatchResult.of(*features, matches).refine(*features)
        if result.deviations is not None:
            refined_points1 = result.points1.astype(np.float64)
            variants[True] = detected._replace(
                points1=refined_points1, deviations=result.deviations
            )
    # Every estimator gets the same matches, in the same order.
    for is_refined, points in variants.items():
        if isinstance(truth, CameraPair):
            for name, estimate in estimators.POSE_ESTIMATORS.items():
                pose = estimate(points, truth)
                yield name, is_refined, estimators.compute_pose_error(pose, truth)
            continue
        for name in settings.estimators:
            is_enough = len(scores) >= two_view.MIN_POINTS
            H = estimators.ESTIMATORS[name](points) if is_enough else None
            size = labeled_pair.oriented[0].image_size
            yield name, is_refined, two_view.compute_corner_error(H, truth, size)  # pyright: ignore


def score_pair(
    labeled_pair: LabeledPair,
    matches_by_matcher: Mapping[str, Matches],
    thresholds: Mapping[str, float],
    settings: ScoringSettings,
) -> PairScores:
    """Score all matchers on one pair.

    Args:
        labeled_pair: the pair and its ground truth. Of a pair with nothing in common, only the
            matches are counted.
        matches_by_matcher: the matches of each matcher by its name.
        thresholds: the confidence above which a match counts, for each matcher of which
            `matches_by_matcher` has all matches. All matches of the other matchers count.
        settings: what is computed.
    """
    images = labeled_pair.images
    pair = labeled_pair.oriented
    truth = images.truth
    has_pose = isinstance(truth, CameraPair)
    count0 = len(pair[0].keypoints)
    # Between two cameras the true matches are unknown. There every correct match counts as a true
    # match, out of all keypoints of image 0. The recall is then the matching score.
    true_matches0 = np.full(count0, UNMATCHED)
    true_count = max(count0, 1)
    if isinstance(truth, np.ndarray):
        true_matches0 = find_true_matches0(pair, truth)
        true_count = int((true_matches0 > UNMATCHED).sum())
        if settings.bound:
            bound = Matches.from_dense(true_matches0, np.ones(count0))
            matches_by_matcher = {**matches_by_matcher, BOUND: bound}
    rows: List[Row] = []
    outcomes = {}
    panels = {}
    for matcher, matches in matches_by_matcher.items():
        start = (images.name, labeled_pair.scene, matcher)
        is_counted = matches.scores > thresholds.get(matcher, NO_THRESHOLD)
        match_count = is_counted.sum()
        if truth is None:
            rows.append((*start, "", False, "matches", float(match_count)))
            continue
        index0, index1 = matches.indices.T
        points0, points1 = get_matched_points(pair, matches)
        is_correct = find_correct_matches(points0, points1, truth)
        is_true = is_correct if has_pose else true_matches0[index0] == index1
        # The curves over the confidence need all matches, but the rows need those that count.
        if matcher in thresholds:
            outcomes[matcher] = matches.scores.astype(np.float64), is_correct, is_true, true_count
        if matcher in PICTURED:
            drawn = points0[is_counted], points1[is_counted], matches.scores[is_counted]
            panels[matcher] = drawing.Panel(matcher, *drawn, ~is_correct[is_counted])
        correct_count = (is_correct & is_counted).sum()
        recalled_count = (is_true & is_counted).sum()
        # A pair without a match is a failure, so its precision is 0. Without a true match the
        # recall is undefined.
        recall = recalled_count / true_count if true_count else np.nan
        values = {
            "keypoints0": count0,
            "keypoints1": len(pair[1].keypoints),
            "matches": match_count,
            "correct": correct_count,
            **({} if has_pose else {"true_matches": true_count, "found": recalled_count}),
            "precision": correct_count / max(match_count, 1),
            "matching_score" if has_pose else "recall": recall,
        }
        # Make one row for each value, and for each error of an estimate.
        rows += [(*start, "", False, metric, float(value)) for metric, value in values.items()]
        errors = compute_errors(labeled_pair, matcher, matches.select(is_counted), settings)
        for estimator, is_refined, error in errors:
            rows.append((*start, estimator, is_refined, "error", error))
    pictured = [panels[matcher] for matcher in PICTURED if matcher in panels]
    return PairScores(images, labeled_pair.scene_index, rows, outcomes, pictured)
