"""One evaluation: pairs from a source, all matchers on the same keypoints, rows and means.

The work is cut into units of consecutive scenes, the same whatever the number of processes. Each process takes
every n-th unit, and after each round all of them hear the results of all: nothing is computed twice or padded,
and the figures have the same bits for any number of processes.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from pipeline.errors import RequestError
from pipeline.evaluation import confidence, matchers, pairs, scoring, summary
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


@dataclass
class Results:
    """What comes out, in the order of the source. rows: len(places) * len(matchers.MATCHERS)."""

    places: List[Tuple[int, int]] = field(default_factory=list)  # (scene, position in it) of each pair
    rows: List[scoring.Row] = field(default_factory=list)
    judged: List[confidence.Judged] = field(default_factory=list)  # of ours, one per pair
    bad: List[Tuple[str, str]] = field(default_factory=list)  # (scene, reason)

    def extend(self, other: Results) -> None:
        """Append another's results."""
        self.places += other.places
        self.rows += other.rows
        self.judged += other.judged
        self.bad += other.bad


def evaluate(
    source: pairs.Source,
    model: torch.nn.Module,
    device: str,
    settings: Settings,
    context: Optional[distributed.Context] = None,
    title: str = "evaluate",
) -> Results:
    """Run everything; progress goes to stderr. Every process of a group gets all results."""
    rank, world_size = (context.rank, context.world_size) if context else (0, 1)
    units = units_of(source, settings.batch)
    rounds = range(-(-len(units) // world_size))
    mine = [units[index] if index < len(units) else [] for index in (n * world_size + rank for n in rounds)]
    total = sum(source.pairs_in(index) for index in range(len(source)))
    everything = Results()
    work = results_of(source, mine, model, device, settings, world_size)
    bar = progress(total=total, desc=title, unit="pair", disable=rank > 0)
    for outcome in work:
        for part in distributed.all_gather(outcome):
            if isinstance(part, str):
                leave_together()
                raise RequestError(part)
            everything.extend(part)
            bar.update(len(part.places))
    bar.close()
    leave_together()
    return everything


def leave_together() -> None:
    """Wait until all processes have heard the last results: who leaves early takes the connection along.

    By then nothing can be lost any more, so a peer that has left this barrier first is no failure.
    """
    with contextlib.suppress(RuntimeError):
        distributed.barrier()


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


def results_of(
    source: pairs.Source,
    units: Sequence[Sequence[int]],
    model: torch.nn.Module,
    device: str,
    settings: Settings,
    processes: int,
) -> Iterator[object]:
    """Results of each unit in turn; a message in place of one whose request was wrong, for all to hear."""

    def extract(unit: Sequence[int]) -> Tuple[List[Pair], List[Tuple[str, str]]]:
        return pairs.extract(source, unit, settings.max_keypoints)

    workers = max(1, (os.cpu_count() or 1) // processes)
    for ready in ahead(extract, units, min(workers, 8)):
        try:
            found, bad = ready()
        except RequestError as error:
            yield str(error)
            return
        yield score_pairs(found, bad, model, device, settings)


def ahead(work: Callable, items: Sequence, workers: int) -> Iterator[Callable]:
    """A callable with the result of `work(item)` for each item, computed by threads a little before it is asked for.

    Threads, not processes: decoding, warping and SIFT all release Python's lock, and nothing need be copied.
    """
    with ThreadPoolExecutor(max_workers=workers) as pool:
        waiting: deque = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > workers:
                yield waiting.popleft().result
        while waiting:
            yield waiting.popleft().result


def score_pairs(
    found: Sequence[Pair],
    bad: List[Tuple[str, str]],
    model: torch.nn.Module,
    device: str,
    settings: Settings,
) -> Results:
    """Match and score the pairs of one unit."""
    results = Results(bad=bad)
    batches = matchers.batches_of(found, settings.batch)
    for pair, answer in matchers.match_superglue(model, batches, device):
        rows, verdict = score_pair(pair, answer, settings)
        results.places.append((pair.scene_index, pair.position))
        results.rows += rows
        results.judged.append(verdict)
    return results


def score_pair(
    pair: Pair, answer: PairMatches, settings: Settings
) -> Tuple[List[scoring.Row], confidence.Judged]:
    """Rows of all matchers on one pair, and the verdict on each match of ours whatever its score."""
    answers = {OURS: answer.above(settings.threshold), **matchers.match_baselines(pair, settings.ratio)}
    truth0 = scoring.true_matches(pair, settings.limits.correct_px)
    rows = [scoring.score(pair, name, found, truth0, settings.limits) for name, found in answers.items()]
    return rows, confidence.judge(pair, answer, truth0, settings.limits.correct_px)


def figures_of(results: Results) -> summary.Figures:
    """Flat names for metrics.json."""
    figures = summary.summarize(results.rows, matchers.MATCHERS)
    lines = confidence.calibration(results.judged)
    figures[f"{OURS}.calibration_error"] = summary.plain(confidence.calibration_error(lines))
    return figures


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
    ranks = [(row.errors["ransac"], -row.counts.correct, index) for index, row in enumerate(ours)]
    ranked = [index for _, _, index in sorted(ranks)]
    count = min(count, len(ranked))
    worst, best = (count + 2) // 3, (count + 1) // 3
    middle = count - worst - best
    start = max(best, min((len(ranked) - middle) // 2, len(ranked) - worst - middle))
    chosen = [("best", ranked[:best]), ("median", ranked[start : start + middle])]
    chosen.append(("worst", ranked[len(ranked) - worst :][::-1] if worst else []))
    return [(f"{kind}-{place}", index) for kind, group in chosen for place, index in enumerate(group, 1)]
