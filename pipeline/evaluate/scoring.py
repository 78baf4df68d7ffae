"""One row of figures per pair and matcher, and the verdict on every match of a network: docs/evaluation.md."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from pipeline.evaluate import poses
from pipeline.evaluate.conditions import conditions_of
from pipeline.evaluate.estimators import DEFAULT, ESTIMATORS
from pipeline.evaluate.inputs import KnownPair, Pose
from pipeline.evaluate.matchers import BOUND
from pipeline.parameters.schema import EvaluateParams
from pipeline.report.tables import ALIGNED
from superglue_sift import extractors, geometry, refine, sift
from superglue_sift.batch import Pair
from superglue_sift.extractors import Extractor
from superglue_sift.matcher import PairMatches
from superglue_sift.truth import UNMATCHED, pair_truth

ALIGNMENT = "positions in image 1 moved by superglue_sift.refine, of every matcher alike; truth as detected"

# As in the SuperGlue paper and in HPatches' protocols: a match is correct within CORRECT_PX.
CORRECT_PX, RANSAC_PX, RANSAC_ITERATIONS = 3.0, 3.0, 3000


@dataclass(frozen=True)
class Settings:
    """All that is asked of an evaluation. params: section `evaluate`, with what the command line says instead."""

    params: EvaluateParams
    estimators: Tuple[str, ...] = DEFAULT
    batch: int = 8  # pairs in one pass of a network
    resize: int = 480  # shorter side of pairs that are not rendered, px; 0: as they are
    robustness: int = 0  # photographs tried under growing disturbances
    extractor: Extractor = extractors.DEFAULT
    bound: bool = False  # a row of the true matches too
    refine: bool = True  # align the matches by the pixels too, and report both
    pictures: int = 8  # drawn of best, median and worst pairs; two more show what ours gains
    scenes: int = 0  # rendered ones, on which the limits of scenes are chosen


@dataclass(frozen=True)
class MatchCounts:
    """Counts of one pair, from which precision and recall follow.

    matches: predicted matches; correct: those whose reprojection error is under the limit;
    truth: pairs of keypoints that truly belong together; found: those of them predicted exactly.
    """

    matches: int
    correct: int
    truth: int
    found: int

    @property
    def precision(self) -> float:
        """correct / matches; 0 when nothing was matched: a matcher that says nothing has failed."""
        return self.correct / self.matches if self.matches else 0.0

    @property
    def recall(self) -> float:
        """found / truth; NaN when the pair has no true match: then every matcher's mean leaves it out."""
        return self.found / self.truth if self.truth else float("nan")


@dataclass(frozen=True)
class Row:
    """Figures of one matcher on one pair.

    errors: by estimator, in px (of a pose degrees), inf without an estimate; of the keypoints' positions first, then
    under `aligned_name` of the aligned ones.
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
        """That of the first estimator, by which pairs are called good or bad."""
        return next(iter(self.errors.values()))

    @property
    def matching_score(self) -> float:
        """Share of the keypoints of view 0 that are matched rightly."""
        return self.counts.correct / max(self.keypoints0, 1)

    @property
    def difficulty(self) -> Dict[str, float]:
        """What makes the pair hard: its conditions, and the keypoints of the poorer view."""
        return {**self.conditions, "keypoints": min(self.keypoints0, self.keypoints1)}


@dataclass(frozen=True)
class Judged:
    """All K matches of a network on one pair, whatever their scores. correct, found: (K,) bool; truth: a count.

    Of two cameras the true partners are not known: found is correct, and truth the number of keypoints of view 0, so
    that the recall is the matching score.
    """

    scores: np.ndarray
    correct: np.ndarray
    found: np.ndarray
    truth: int

    def above(self, threshold: float) -> Judged:
        """The same without matches whose score is not above `threshold`."""
        keep = self.scores > threshold
        return Judged(self.scores[keep], self.correct[keep], self.found[keep], self.truth)

    @property
    def counts(self) -> MatchCounts:
        """How many they are."""
        right, found = int(self.correct.sum()), int(self.found.sum())
        return MatchCounts(len(self.scores), right, self.truth, found)


@dataclass(frozen=True)
class PairResult:
    """One pair: rows of all matchers, and of each network all its matches judged."""

    place: Tuple[int, int]
    rows: Dict[str, Row]
    judged: Dict[str, Judged]


@dataclass
class Results:
    """What comes out, in the order of the source. bad: (scene, reason)."""

    pairs: List[PairResult] = field(default_factory=list)
    bad: List[Tuple[str, str]] = field(default_factory=list)

    @property
    def rows(self) -> List[Row]:
        """Those of all matchers on all pairs, pair by pair."""
        return [row for one in self.pairs for row in one.rows.values()]


def true_matches(pair: Pair, H_0to1: np.ndarray, correct_px: float) -> np.ndarray:
    """(M,) index of the true partner in image 1, negative without one: the truth that training uses."""
    records = (pair.records0, pair.records1)
    points0, points1 = (torch.as_tensor(sift.positions(each), dtype=torch.float64) for each in records)
    size0, size1 = torch.as_tensor(pair.size0), torch.as_tensor(pair.size1)
    H = torch.as_tensor(H_0to1, dtype=torch.float64)
    return pair_truth(points0, points1, H, size0, size1, correct_px, correct_px).matches0.numpy()


def matched_points(pair: Pair, found: PairMatches) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points of the predicted matches, (K, 2) and (K, 2) float64, and their (K,) scores."""
    index0 = np.flatnonzero(found.matches0 > UNMATCHED)
    points0 = sift.positions(pair.records0)[index0]
    points1 = sift.positions(pair.records1)[found.matches0[index0]]
    return points0.astype(np.float64), points1.astype(np.float64), found.scores0[index0].astype(np.float64)


def reprojection_errors(points0: np.ndarray, points1: np.ndarray, H_0to1: np.ndarray) -> np.ndarray:
    """(K,) float64 pixels between matched points (K, 2), the larger of both directions as in the ground truth.

    inf where a point maps to infinity.
    """
    points0, points1 = (np.asarray(points, np.float64).reshape(-1, 2) for points in (points0, points1))
    H_0to1 = np.asarray(H_0to1, np.float64)
    with np.errstate(all="ignore"):
        forward = np.linalg.norm(geometry.transform(points0, H_0to1) - points1, axis=-1)
        backward = np.linalg.norm(geometry.transform(points1, np.linalg.inv(H_0to1)) - points0, axis=-1)
        worst = np.maximum(forward, backward)
    return np.where(np.isfinite(worst), worst, np.inf)


def correct_matches(known: KnownPair, found: PairMatches, correct_px: float) -> np.ndarray:
    """(K,) bool: which of the predicted matches are right."""
    points0, points1, _ = matched_points(known.pair, found)
    if isinstance(known.truth, Pose):
        return poses.correct_matches(points0, points1, known.truth)
    return reprojection_errors(points0, points1, known.truth) < correct_px


def aligned_name(estimator: str) -> str:
    """What the errors of an estimator are called whose matches were aligned."""
    return f"{estimator}{ALIGNED}"


def align(known: KnownPair, found: PairMatches) -> refine.Aligned:
    """The matches aligned by the pixels of both images, as `Matcher.match` does."""
    assert known.images is not None
    index0 = np.flatnonzero(found.matches0 > UNMATCHED)
    records = known.pair.records0[index0], known.pair.records1[found.matches0[index0]]
    return refine.align(*known.images, *records)


def estimate_errors(known: KnownPair, found: PairMatches, settings: Settings) -> Dict[str, float]:
    """Error of each estimate made from the matches, by estimator, then of each made from the aligned ones."""
    points0, points1, weights = matched_points(known.pair, found)
    errors = errors_of_points(known, points0, points1, weights, settings)
    if settings.refine and known.images is not None:
        moved = align(known, found)
        points0, points1 = moved.aligned0.astype(np.float64), moved.aligned1.astype(np.float64)
        aligned = errors_of_points(known, points0, points1, weights, settings, moved.deviations)
        errors.update({aligned_name(name): error for name, error in aligned.items()})
    return errors


def errors_of_points(
    known: KnownPair,
    points0: np.ndarray,
    points1: np.ndarray,
    weights: np.ndarray,
    settings: Settings,
    deviations: Optional[np.ndarray] = None,
) -> Dict[str, float]:
    """Error of each estimate made from matched points, by estimator. The seed depends on the pair alone."""
    seed = zlib.crc32(known.name.encode()) & 0x7FFFFFFF
    if isinstance(known.truth, Pose):
        found = {
            poses.NAME: poses.estimate(points0, points1, known.truth, seed),
            poses.REFINED: poses.estimate_refined(points0, points1, known.truth, deviations),
        }
        return {name: poses.pose_error(pose, known.truth) for name, pose in found.items()}
    given = (points0, points1, weights, RANSAC_PX, RANSAC_ITERATIONS, seed, deviations)
    enough = len(points0) >= geometry.MIN_POINTS
    estimates = {name: ESTIMATORS[name](*given) if enough else None for name in settings.estimators}
    return {name: geometry.corner_error(H, known.truth, known.pair.size0) for name, H in estimates.items()}


def judge(known: KnownPair, found: PairMatches, truth0: np.ndarray, correct_px: float) -> Judged:
    """Right or wrong for each match, by the keypoints' positions; truth0 (M,) from `true_matches`, of a homography."""
    index0 = np.flatnonzero(found.matches0 > UNMATCHED)
    scores, correct = found.scores0[index0].astype(np.float64), correct_matches(known, found, correct_px)
    if isinstance(known.truth, Pose):
        return Judged(scores, correct, correct, max(len(known.pair.records0), 1))
    return Judged(scores, correct, truth0[index0] == found.matches0[index0], int((truth0 > UNMATCHED).sum()))


def score_pair(
    known: KnownPair, answers: Mapping[str, PairMatches], thresholds: Mapping[str, float], settings: Settings
) -> PairResult:
    """Everything about one pair. answers: of all matchers; thresholds: of the networks, whose answers hold all."""
    pair, px = known.pair, CORRECT_PX
    truth0, conditions = np.full(len(pair.records0), -1), {}
    if not isinstance(known.truth, Pose):
        truth0 = true_matches(pair, known.truth, px)
        conditions = conditions_of(known.truth, pair.size0, pair.size1)
        if settings.bound:
            answers = {**answers, BOUND: PairMatches(truth0, (truth0 > UNMATCHED).astype(np.float32))}
    rows, judged = {}, {}
    for name, answer in answers.items():
        verdict, found = judge(known, answer, truth0, px), answer
        if name in thresholds:
            judged[name] = verdict
            verdict, found = verdict.above(thresholds[name]), found.above(thresholds[name])
        errors = estimate_errors(known, found, settings)
        sizes = len(pair.records0), len(pair.records1)
        rows[name] = Row(known.name, known.scene, name, *sizes, verdict.counts, errors, conditions)
    return PairResult(known.place, rows, judged)


def matchers_of(rows: Sequence[Row]) -> Tuple[str, ...]:
    """Names of the matchers the rows belong to, in their order: that of every table."""
    return tuple(dict.fromkeys(row.matcher for row in rows))


def estimators_of(rows: Sequence[Row]) -> Tuple[str, ...]:
    """Names of the estimators the rows hold errors of."""
    return tuple(rows[0].errors) if rows else DEFAULT
