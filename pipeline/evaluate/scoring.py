"""Scores of one pair: a row of metrics per matcher, and which matches of each network are
correct.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Dict, Mapping, Tuple

import numpy as np

from pipeline.evaluate import poses
from pipeline.evaluate.conditions import conditions_of
from pipeline.evaluate.estimators import DEFAULT, ESTIMATORS, Points, surest_of, weights_of
from pipeline.evaluate.inputs import KnownPair, Pose
from pipeline.evaluate.matchers import BOUND
from pipeline.params import EvaluateParams
from pipeline.report.rows import Measure
from superglue_sift.features import extractors, sift
from superglue_sift.features.extractors import Extractor
from superglue_sift.geometry import refinement, two_view
from superglue_sift.geometry.guided_matching import positions_of
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair, from_pairs
from superglue_sift.network.ground_truth import UNMATCHED, ground_truth

ALIGNMENT = (
    "positions in image 1 moved by superglue_sift.geometry.refinement, of every matcher alike;"
    " truth as detected"
)

# A match is correct within CORRECT_PX, as in the SuperGlue paper and HPatches' protocols.
CORRECT_PX = 3.0


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation. params: section `evaluate`, with overrides from the command
    line.
    """

    params: EvaluateParams
    estimators: Tuple[str, ...] = DEFAULT
    resize: int = 480  # shorter side of pairs of a folder, px; 0: as they are
    robustness: int = 0  # photographs for the disturbances of robustness.csv
    extractor: Extractor = extractors.DEFAULT
    bound: bool = False  # add a row of the true matches
    refine: bool = True  # also report matches aligned by the pixels


@dataclass(frozen=True)
class MatchCounts:
    """Counts of one pair, for precision and recall.

    matches: predicted; correct: of these, reprojection error below the limit; truth: true matches;
    found: of these, predicted exactly.
    """

    matches: int
    correct: int
    truth: int
    found: int

    @property
    def precision(self) -> float:
        """correct / matches; 0 without matches, which is a failure."""
        return self.correct / self.matches if self.matches else 0.0

    @property
    def recall(self) -> float:
        """found / truth; NaN without true matches: every matcher's mean leaves such a pair out."""
        return self.found / self.truth if self.truth else float("nan")


@dataclass(frozen=True)
class PairRow:
    """Metrics of one matcher on one pair.

    errors: of each estimator, as detected and aligned, in px (poses: degrees), inf without an
    estimate. Poses have no true matches: the recall of their counts is the matching score.
    """

    pair: str
    scene: str
    matcher: str
    keypoints0: int
    keypoints1: int
    counts: MatchCounts
    errors: Dict[Measure, float]
    conditions: Dict[str, float]

    @property
    def error(self) -> float:
        """The error of the first estimator, which ranks the pairs."""
        return next(iter(self.errors.values()))

    @property
    def has_pose(self) -> bool:
        return next(iter(self.errors)).estimator in poses.ESTIMATORS

    @property
    def shares(self) -> Dict[str, float]:
        """Precision, and recall or matching score."""
        recall = "matching_score" if self.has_pose else "recall"
        return {"precision": self.counts.precision, recall: self.counts.recall}

    @property
    def difficulty(self) -> Dict[str, float]:
        """The conditions of the pair, and the keypoints of the view with fewer."""
        return {**self.conditions, "keypoints": min(self.keypoints0, self.keypoints1)}


@dataclass(frozen=True)
class ScoredMatches:
    """All K matches of a network on one pair, whatever their scores. correct, found: (K,) bool;
    truth: a count.

    True matches between two cameras are unknown. There found is correct, and truth the number of
    keypoints of view 0, so the recall is the matching score.
    """

    scores: np.ndarray
    correct: np.ndarray
    found: np.ndarray
    truth: int

    def above(self, threshold: float) -> ScoredMatches:
        """The matches with a score above `threshold`."""
        keep = self.scores > threshold
        return ScoredMatches(self.scores[keep], self.correct[keep], self.found[keep], self.truth)

    @property
    def counts(self) -> MatchCounts:
        return MatchCounts(
            len(self.scores), int(self.correct.sum()), self.truth, int(self.found.sum())
        )


@dataclass(frozen=True)
class PairResult:
    """One pair: the row of each matcher, and all matches of each network, scored."""

    place: Tuple[int, int]
    rows: Dict[str, PairRow]
    scored: Dict[str, ScoredMatches]


def true_matches(pair: Pair, H_0to1: np.ndarray) -> np.ndarray:
    """(M,) index of the true match in image 1, negative without one, as in training."""
    batch = from_pairs([pair], H_0to1[None])
    return ground_truth(batch, CORRECT_PX, CORRECT_PX).matches0[0, : len(pair.records0)].numpy()


def matched_points(pair: Pair, matches: Matches) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points of the predicted matches, (K, 2) and (K, 2) float64, and their (K,) scores."""
    points = sift.positions(pair.records0), sift.positions(pair.records1)
    return (*positions_of(points, matches), matches.scores.astype(np.float64))


def reprojection_errors(points0: np.ndarray, points1: np.ndarray, H_0to1: np.ndarray) -> np.ndarray:
    """(K,) float64 pixels, the larger of both directions; inf where a point maps to infinity.

    points: (K, 2) float64.
    """
    forward = two_view.transform(points0, H_0to1) - points1
    backward = two_view.transform(points1, two_view.inverse(H_0to1)) - points0
    worst = np.linalg.norm([forward, backward], axis=-1).max(axis=0)
    return np.where(np.isfinite(worst), worst, np.inf)


def correct_matches(known: KnownPair, matches: Matches) -> np.ndarray:
    """(K,) bool: which of the predicted matches are correct."""
    points0, points1, _ = matched_points(known.pair, matches)
    if isinstance(known.truth, Pose):
        return poses.correct_matches(points0, points1, known.truth)
    return reprojection_errors(points0, points1, known.truth) < CORRECT_PX


def estimate_errors(
    known: KnownPair, matcher: str, matches: Matches, settings: Settings
) -> Dict[Measure, float]:
    """The error of each estimator from the matches of a matcher.

    With `settings.refine` also from matches aligned as `Matcher.match` does.
    """
    points0, points1, scores = matched_points(known.pair, matches)
    enough = len(scores) >= two_view.MIN_POINTS
    weights = weights_of(matcher, scores) if enough else scores
    sure = surest_of(matcher, scores) if enough else scores > 0
    seed = zlib.crc32(known.name.encode()) & 0x7FFFFFFF  # depends on the pair alone
    detected = Points(points0, points1, weights, sure, seed)
    variants = {False: detected}  # by whether they are aligned
    if settings.refine and known.images is not None:
        index0, index1 = matches.indices.T
        records = known.pair.records0[index0], known.pair.records1[index1]
        refined1, deviations, _ = refinement.refine(*known.images, *records)
        variants[True] = detected._replace(
            points1=refined1.astype(np.float64), deviations=deviations
        )
    errors = {}
    for aligned, found in variants.items():
        if isinstance(known.truth, Pose):
            for name, estimate in poses.ESTIMATORS.items():
                error = poses.pose_error(estimate(found, known.truth), known.truth)
                errors[Measure("error", name, aligned)] = error
            continue
        for name in settings.estimators:
            H = ESTIMATORS[name][0](found) if enough else None
            error = two_view.corner_error(H, known.truth, known.pair.size0)
            errors[Measure("error", name, aligned)] = error
    return errors


def score_matches(known: KnownPair, matches: Matches, truth0: np.ndarray) -> ScoredMatches:
    """Check each match by the keypoints' positions.

    truth0: (M,) from `true_matches`, unused for a `Pose`.
    """
    scores = matches.scores.astype(np.float64)
    correct = correct_matches(known, matches)
    if isinstance(known.truth, Pose):
        return ScoredMatches(scores, correct, correct, max(len(known.pair.records0), 1))
    index0, index1 = matches.indices.T
    found = truth0[index0] == index1
    return ScoredMatches(scores, correct, found, int((truth0 > UNMATCHED).sum()))


def score_pair(
    known: KnownPair,
    answers: Mapping[str, Matches],
    thresholds: Mapping[str, float],
    settings: Settings,
) -> PairResult:
    """Score all matchers on one pair. thresholds: of those whose answers contain every match."""
    pair = known.pair
    truth0 = np.full(len(pair.records0), UNMATCHED)
    conditions = {}
    if not isinstance(known.truth, Pose):
        truth0 = true_matches(pair, known.truth)
        conditions = conditions_of(known.truth, pair.size0, pair.size1)
        if settings.bound:
            bound = Matches.from_dense(truth0, np.ones(len(truth0), np.float32))
            answers = {**answers, BOUND: bound}
    rows = {}
    scored = {}
    for name, matches in answers.items():
        checked = score_matches(known, matches, truth0)
        if name in thresholds:
            scored[name] = checked
            checked = checked.above(thresholds[name])
            matches = matches.above(thresholds[name])
        rows[name] = PairRow(
            known.name,
            known.scene,
            name,
            len(pair.records0),
            len(pair.records1),
            checked.counts,
            estimate_errors(known, name, matches, settings),
            conditions,
        )
    return PairResult(known.place, rows, scored)
