"""One evaluation: pairs from a source, all matchers on the same keypoints, rows and means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

import torch

from pipeline.evaluation import confidence, matchers, pairs, scoring, summary
from pipeline.evaluation.matchers import OURS, PairMatches
from pipeline.evaluation.pairs import Pair
from pipeline.runtime.progress import progress

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))  # of confidence, for the curve


@dataclass(frozen=True)
class Settings:
    """What is asked of an evaluation, whatever its source. Units as in params.yaml."""

    max_keypoints: int
    threshold: float  # matches of ours need a higher score
    ratio: float  # of the ratio test
    limits: scoring.Limits
    batch: int = 8  # pairs in one pass of the network; fixed, so that the same pairs give the same bits
    pictures: int = 8


@dataclass(frozen=True)
class Evaluation:
    """What came out. rows: len(pairs) * len(matchers.MATCHERS), pair by pair."""

    pairs: List[Pair]
    bad: List[Tuple[str, str]]
    rows: List[scoring.Row]
    answers: List[PairMatches]  # ours, with every mutual match whatever its score
    judged: List[confidence.Judged]
    figures: summary.Figures


def evaluate(source: pairs.Source, model: torch.nn.Module, device: str, settings: Settings) -> Evaluation:
    """Run everything; progress goes to stderr."""
    found, bad = pairs.extract(source, settings.max_keypoints)
    rows: List[scoring.Row] = []
    judged: List[confidence.Judged] = []
    kept: List[PairMatches] = []
    batches = matchers.batches_of(found, settings.batch)
    answers = matchers.match_superglue(model, batches, device)
    for pair, answer in progress(answers, total=len(found), desc="match and score", unit="pair"):
        pair_rows, verdict = score_pair(pair, answer, settings)
        rows += pair_rows
        judged.append(verdict)
        kept.append(answer)
    figures = summary.summarize(rows, matchers.MATCHERS)
    lines = confidence.calibration(judged)
    figures[f"{OURS}.calibration_error"] = summary.plain(confidence.calibration_error(lines))
    return Evaluation(found, bad, rows, kept, judged, figures)


def score_pair(
    pair: Pair, answer: PairMatches, settings: Settings
) -> Tuple[List[scoring.Row], confidence.Judged]:
    """Rows of all matchers on one pair, and the verdict on each match of ours whatever its score."""
    answers = {OURS: answer.above(settings.threshold), **matchers.match_baselines(pair, settings.ratio)}
    truth0 = scoring.true_matches(pair, settings.limits.correct_px)
    rows = [scoring.score(pair, name, found, truth0, settings.limits) for name, found in answers.items()]
    return rows, confidence.judge(pair, answer, truth0, settings.limits.correct_px)


def errors_by_matcher(rows: Sequence[scoring.Row], estimator: str) -> Dict[str, List[float]]:
    """Corner errors in pixels of all pairs, by matcher."""
    return {
        matcher: [row.errors[estimator] for row in rows if row.matcher == matcher]
        for matcher in matchers.MATCHERS
    }


def picture_choice(rows: Sequence[scoring.Row], count: int) -> List[Tuple[str, int]]:
    """Which pairs to draw: `count` of the best, the median and the worst by our RANSAC error.

    Returns [("best-1", index of the pair), ...]; no pair twice.
    """
    ours = [row for row in rows if row.matcher == OURS]
    ranked = sorted(
        range(len(ours)), key=lambda index: (ours[index].errors["ransac"], -ours[index].counts.correct)
    )
    count = min(count, len(ranked))
    worst, best = (count + 2) // 3, (count + 1) // 3
    middle = count - worst - best
    start = max(best, min((len(ranked) - middle) // 2, len(ranked) - worst - middle))
    chosen = [("best", ranked[:best]), ("median", ranked[start : start + middle])]
    chosen.append(("worst", ranked[len(ranked) - worst :][::-1] if worst else []))
    return [(f"{kind}-{place}", index) for kind, group in chosen for place, index in enumerate(group, 1)]
