"""One evaluation: pairs from a source, all matchers on the same keypoints, rows and means.

The work is cut into units of consecutive scenes, the same whatever the number of processes, and `sharing` shares them
out: the figures have the same bits for any number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from pipeline.evaluation import confidence, matchers, pairs, scoring, sharing, summary
from pipeline.evaluation.matchers import OURS, PairMatches
from pipeline.evaluation.pairs import Pair
from pipeline.runtime import distributed
from pipeline.runtime.progress import progress

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))  # of confidence, for the curve


@dataclass(frozen=True)
class Settings:
    """What is asked of an evaluation, whatever its source. Units as in params.yaml."""

    max_keypoints: int
    threshold: float  # matches of ours need a higher score
    ratio: float  # of the ratio test
    limits: scoring.Limits
    batch: int = 8  # pairs in one pass of the network
    pictures: int = 8
    further: Mapping[str, Callable[[Pair], PairMatches]] = field(default_factory=dict)  # baselines by name


@dataclass
class Results:
    """What comes out, in the order of the source. rows: as many for each place as there are matchers."""

    places: List[Tuple[int, int]] = field(default_factory=list)  # (scene, position in it) of each pair
    rows: List[scoring.Row] = field(default_factory=list)
    judged: List[confidence.Judged] = field(default_factory=list)  # of ours, one per pair
    bad: List[Tuple[str, str]] = field(default_factory=list)  # (scene, reason)

    @property
    def matchers(self) -> Tuple[str, ...]:
        """Who was compared: the rows of a pair stand in this order."""
        return scoring.matchers_of(self.rows)

    def rows_of(self, index: int) -> Dict[str, scoring.Row]:
        """The rows of pair `index`, by matcher."""
        count = len(self.rows) // len(self.places)
        return {row.matcher: row for row in self.rows[index * count : (index + 1) * count]}

    def extend(self, other: Results) -> None:
        """Append another's results."""
        self.places += other.places
        self.rows += other.rows
        self.judged += other.judged
        self.bad += other.bad


@dataclass(frozen=True)
class Matched:
    """What all matchers say of a pair, and what is right. ours: whatever its scores; truth0: see `true_matches`."""

    pair: Pair
    ours: PairMatches
    others: Dict[str, PairMatches]
    truth0: np.ndarray


def evaluate(
    source: pairs.Source,
    model: torch.nn.Module,
    device: str,
    settings: Settings,
    context: Optional[distributed.Context] = None,
    title: str = "evaluate",
) -> Results:
    """Run everything; progress goes to stderr. Every process of a group gets all results."""
    total = sum(source.pairs_in(index) for index in range(len(source)))
    everything = Results()
    with progress(total=total, desc=title, unit="pair", disable=bool(context and context.rank)) as bar:
        for part in parts_of(source, model, device, settings, context):
            everything.extend(part)
            bar.update(len(part.places))
    return everything


def parts_of(
    source: pairs.Source,
    model: torch.nn.Module,
    device: str,
    settings: Settings,
    context: Optional[distributed.Context] = None,
) -> Iterator[Results]:
    """The results, unit by unit."""

    def extract(unit: Sequence[int]) -> Tuple[List[Pair], List[Tuple[str, str]]]:
        return pairs.extract(source, unit, settings.max_keypoints)

    def match(extracted: Tuple[List[Pair], List[Tuple[str, str]]]) -> Tuple[List[Matched], Results]:
        found, bad = extracted
        return match_pairs(found, model, device, settings), Results(bad=bad)

    def score(work: Tuple[List[Matched], Results]) -> Results:
        matched, results = work
        for one in matched:
            rows, verdict = score_pair(one, settings)
            results.places.append((one.pair.scene_index, one.pair.position))
            results.rows += rows
            results.judged.append(verdict)
        return results

    units = units_of(source, settings.batch)
    return sharing.share_out(units, [], extract, match, score, context)


def units_of(source: pairs.Source, batch: int) -> List[List[int]]:
    """Consecutive scenes grouped so that a unit fills a batch: at least one scene, else at most `batch` pairs."""
    units: List[List[int]] = []
    filled = batch
    for index in range(len(source)):
        count = source.pairs_in(index)
        if filled + count > batch:
            units.append([])
            filled = 0
        units[-1].append(index)
        filled += count
    return units


def match_pairs(
    found: Sequence[Pair], model: torch.nn.Module, device: str, settings: Settings
) -> List[Matched]:
    """All matchers on the pairs of one unit."""
    batches = matchers.batches_of(found, settings.batch)
    return [
        Matched(
            pair, ours, match_others(pair, settings), scoring.true_matches(pair, settings.limits.correct_px)
        )
        for pair, ours in matchers.match_superglue(model, batches, device)
    ]


def score_pair(matched: Matched, settings: Settings) -> Tuple[List[scoring.Row], confidence.Judged]:
    """Rows of all matchers on one pair, and the verdict on each match of ours whatever its score."""
    pair, ours, truth0 = matched.pair, matched.ours, matched.truth0
    answers = {OURS: ours.above(settings.threshold), **matched.others}
    rows = [scoring.score(pair, name, found, truth0, settings.limits) for name, found in answers.items()]
    return rows, confidence.judge(pair, ours, truth0, settings.limits.correct_px)


def match_others(pair: Pair, settings: Settings) -> Dict[str, PairMatches]:
    """Every baseline on one pair, by name."""
    answers = matchers.match_baselines(pair, settings.ratio)
    answers.update({name: match(pair) for name, match in settings.further.items()})
    return answers


def figures_of(results: Results) -> summary.Figures:
    """Flat names for metrics.json."""
    figures = summary.summarize(results.rows, results.matchers)
    lines = confidence.calibration(results.judged)
    figures[f"{OURS}.calibration_error"] = summary.plain(confidence.calibration_error(lines))
    return figures


def errors_by_matcher(rows: Sequence[scoring.Row], estimator: str) -> Dict[str, List[float]]:
    """Corner errors in pixels of all pairs, by matcher."""
    return {
        matcher: [row.errors[estimator] for row in rows if row.matcher == matcher]
        for matcher in scoring.matchers_of(rows)
    }


def picture_choice(rows: Sequence[scoring.Row], count: int) -> List[Tuple[str, int]]:
    """Which pairs to draw: `count` of the best, the median and the worst by our error.

    Returns [("best-1", index of the pair), ...]; no pair twice.
    """
    ours = [row for row in rows if row.matcher == OURS]
    ranks = [(row.error, -row.counts.correct, index) for index, row in enumerate(ours)]
    return best_median_worst([index for _, _, index in sorted(ranks)], count)


def best_median_worst(ranked: Sequence[int], count: int) -> List[Tuple[str, int]]:
    """`count` of the pairs in `ranked`, the best first: [("best-1", index), ..., ("worst-1", index)]."""
    count = min(count, len(ranked))
    worst, best = (count + 2) // 3, (count + 1) // 3
    middle = count - worst - best
    start = max(best, min((len(ranked) - middle) // 2, len(ranked) - worst - middle))
    chosen = [("best", ranked[:best]), ("median", ranked[start : start + middle])]
    chosen.append(("worst", ranked[len(ranked) - worst :][::-1] if worst else []))
    return [(f"{kind}-{place}", index) for kind, group in chosen for place, index in enumerate(group, 1)]
