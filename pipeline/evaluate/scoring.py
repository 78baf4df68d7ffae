"""Scores of one pair: a row of metrics per matcher, and which matches of each network are
correct.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from pipeline.evaluate import poses
from pipeline.evaluate.conditions import conditions_of
from pipeline.evaluate.estimators import DEFAULT, ESTIMATORS, weights_of
from pipeline.evaluate.inputs import KnownPair, Pose
from pipeline.evaluate.matchers import BOUND
from pipeline.parameters.schema import EvaluateParams
from pipeline.report.tables import ALIGNED
from superglue_sift import extractors, geometry, refine, sift
from superglue_sift.batch import Pair, from_pairs
from superglue_sift.extractors import Extractor
from superglue_sift.matcher import PairMatches
from superglue_sift.truth import UNMATCHED, ground_truth

ALIGNMENT = (
    "positions in image 1 moved by superglue_sift.refine, of every matcher alike; truth as detected"
)

# A match is correct within CORRECT_PX, as in the SuperGlue paper and HPatches' protocols.
CORRECT_PX = 3.0
RANSAC_PX = 3.0
RANSAC_ITERATIONS = 3000


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation. params: section `evaluate`, with overrides from the command
    line.
    """

    params: EvaluateParams
    estimators: Tuple[str, ...] = DEFAULT
    batch: int = 8  # pairs in one pass of a network
    resize: int = 480  # shorter side of pairs of a folder, px; 0: as they are
    robustness: int = 0  # photographs for the disturbances of robustness.csv
    extractor: Extractor = extractors.DEFAULT
    bound: bool = False  # add a row of the true matches
    refine: bool = True  # also report matches aligned by the pixels
    pictures: int = 8  # of best, median and worst pairs; two more show the gain of ours


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
class Row:
    """Metrics of one matcher on one pair.

    errors: by estimator, in px (poses: degrees), inf without an estimate; of aligned matches under
    `aligned_name`.
    """

    pair: str
    scene: str
    matcher: str
    keypoints0: int
    keypoints1: int
    counts: MatchCounts
    errors: Dict[str, float]
    conditions: Dict[str, float]

    @property
    def error(self) -> float:
        """The error of the first estimator, which ranks the pairs."""
        return next(iter(self.errors.values()))

    @property
    def matching_score(self) -> float:
        """Fraction of the keypoints of view 0 with a correct match."""
        return self.counts.correct / max(self.keypoints0, 1)

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
    rows: Dict[str, Row]
    scored: Dict[str, ScoredMatches]


@dataclass
class Results:
    """Results in the order of the source. bad: (scene, reason)."""

    pairs: List[PairResult] = field(default_factory=list)
    bad: List[Tuple[str, str]] = field(default_factory=list)

    @property
    def rows(self) -> List[Row]:
        """Rows of all matchers, pair by pair."""
        return [row for pair in self.pairs for row in pair.rows.values()]


def true_matches(pair: Pair, H_0to1: np.ndarray, correct_px: float) -> np.ndarray:
    """(M,) index of the true match in image 1, negative without one: the ground truth of
    training.
    """
    batch = from_pairs([pair], np.asarray(H_0to1, np.float64)[None])
    return ground_truth(batch, correct_px, correct_px).matches0[0, : len(pair.records0)].numpy()


def matched_points(pair: Pair, matches: PairMatches) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points of the predicted matches, (K, 2) and (K, 2) float64, and their (K,) scores."""
    index0 = np.flatnonzero(matches.matches0 > UNMATCHED)
    points0 = sift.positions(pair.records0)[index0]
    points1 = sift.positions(pair.records1)[matches.matches0[index0]]
    return (
        points0.astype(np.float64),
        points1.astype(np.float64),
        matches.scores0[index0].astype(np.float64),
    )


def reprojection_errors(points0: np.ndarray, points1: np.ndarray, H_0to1: np.ndarray) -> np.ndarray:
    """(K,) float64 pixels, the larger of both directions; inf where a point maps to infinity.
    points: (K, 2).
    """
    points0, points1 = (
        np.asarray(points, np.float64).reshape(-1, 2) for points in (points0, points1)
    )
    H_0to1 = np.asarray(H_0to1, np.float64)
    with np.errstate(all="ignore"):
        forward = np.linalg.norm(geometry.transform(points0, H_0to1) - points1, axis=-1)
        back = geometry.transform(points1, geometry.inverse(H_0to1))
        backward = np.linalg.norm(back - points0, axis=-1)
        worst = np.maximum(forward, backward)
    return np.where(np.isfinite(worst), worst, np.inf)


def correct_matches(known: KnownPair, matches: PairMatches, correct_px: float) -> np.ndarray:
    """(K,) bool: which of the predicted matches are correct."""
    points0, points1, _ = matched_points(known.pair, matches)
    if isinstance(known.truth, Pose):
        return poses.correct_matches(points0, points1, known.truth)
    return reprojection_errors(points0, points1, known.truth) < correct_px


def aligned_name(estimator: str) -> str:
    """Name of the errors of an estimator from aligned matches."""
    return f"{estimator}{ALIGNED}"


def estimate_errors(
    known: KnownPair, matcher: str, matches: PairMatches, settings: Settings
) -> Dict[str, float]:
    """The error of each estimator from the matches of a matcher.

    With `settings.refine` also from matches aligned as `Matcher.match` does.
    """
    points0, points1, scores = matched_points(known.pair, matches)
    errors = errors_of_points(known, matcher, points0, points1, scores, settings)
    if settings.refine and known.images is not None:
        index0 = np.flatnonzero(matches.matches0 > UNMATCHED)
        records = known.pair.records0[index0], known.pair.records1[matches.matches0[index0]]
        moved = refine.align(*known.images, *records)
        points0 = moved.aligned0.astype(np.float64)
        points1 = moved.aligned1.astype(np.float64)
        aligned = errors_of_points(
            known, matcher, points0, points1, scores, settings, moved.deviations
        )
        errors.update({aligned_name(name): error for name, error in aligned.items()})
    return errors


def errors_of_points(
    known: KnownPair,
    matcher: str,
    points0: np.ndarray,
    points1: np.ndarray,
    scores: np.ndarray,
    settings: Settings,
    deviations: Optional[np.ndarray] = None,
) -> Dict[str, float]:
    """Error of each estimator on matched points. The seed depends on the pair alone."""
    seed = zlib.crc32(known.name.encode()) & 0x7FFFFFFF
    if isinstance(known.truth, Pose):
        estimates = {
            poses.NAME: poses.estimate(points0, points1, known.truth, seed),
            poses.REFINED: poses.estimate_refined(points0, points1, known.truth, deviations),
        }
        return {name: poses.pose_error(pose, known.truth) for name, pose in estimates.items()}
    errors = {}
    for name in settings.estimators:
        H = None
        if len(points0) >= geometry.MIN_POINTS:
            weights = weights_of(name, matcher, scores)
            limits = (RANSAC_PX, RANSAC_ITERATIONS, seed, deviations)
            H = ESTIMATORS[name](points0, points1, weights, *limits)
        errors[name] = geometry.corner_error(H, known.truth, known.pair.size0)
    return errors


def score_matches(
    known: KnownPair, matches: PairMatches, truth0: np.ndarray, correct_px: float
) -> ScoredMatches:
    """Check each match by the keypoints' positions. truth0: (M,) from `true_matches`, unused for a
    `Pose`.
    """
    index0 = np.flatnonzero(matches.matches0 > UNMATCHED)
    scores = matches.scores0[index0].astype(np.float64)
    correct = correct_matches(known, matches, correct_px)
    if isinstance(known.truth, Pose):
        return ScoredMatches(scores, correct, correct, max(len(known.pair.records0), 1))
    return ScoredMatches(
        scores, correct, truth0[index0] == matches.matches0[index0], int((truth0 > UNMATCHED).sum())
    )


def score_pair(
    known: KnownPair,
    answers: Mapping[str, PairMatches],
    thresholds: Mapping[str, float],
    settings: Settings,
) -> PairResult:
    """Score all matchers on one pair. thresholds: of those whose answers contain every match."""
    pair = known.pair
    px = CORRECT_PX
    truth0 = np.full(len(pair.records0), -1)
    conditions = {}
    if not isinstance(known.truth, Pose):
        truth0 = true_matches(pair, known.truth, px)
        conditions = conditions_of(known.truth, pair.size0, pair.size1)
        if settings.bound:
            answers = {
                **answers,
                BOUND: PairMatches(truth0, (truth0 > UNMATCHED).astype(np.float32)),
            }
    rows = {}
    scored = {}
    for name, matches in answers.items():
        checked = score_matches(known, matches, truth0, px)
        if name in thresholds:
            scored[name] = checked
            checked = checked.above(thresholds[name])
            matches = matches.above(thresholds[name])
        errors = estimate_errors(known, name, matches, settings)
        sizes = len(pair.records0), len(pair.records1)
        rows[name] = Row(known.name, known.scene, name, *sizes, checked.counts, errors, conditions)
    return PairResult(known.place, rows, scored)


def matchers_of(rows: Sequence[Row]) -> Tuple[str, ...]:
    """Names of the matchers of the rows, in the order of every table."""
    return tuple(dict.fromkeys(row.matcher for row in rows))


def estimators_of(rows: Sequence[Row]) -> Tuple[str, ...]:
    """Names of the estimators in the rows."""
    return tuple(rows[0].errors) if rows else DEFAULT
