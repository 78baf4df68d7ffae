"""One evaluation: pairs from a source, all matchers on the same keypoints, a result per pair.

The work is cut into units of consecutive scenes, the same whatever the number of processes. Each process takes every
n-th unit, and after each round all of them hear the results of all: nothing is computed twice or padded, and the
figures have the same bits for any number of processes.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar

from pipeline.errors import RequestError
from pipeline.evaluation import metrics, pairs
from pipeline.evaluation.figures import Line, condition_line
from pipeline.evaluation.heldout import LEVELS, HeldOutPairs, UnrelatedPairs, disturbed
from pipeline.evaluation.matchers import Matchers
from pipeline.evaluation.pairs import KnownPair
from pipeline.evaluation.scoring import PairResult, Row, Settings, score_pair
from pipeline.runtime import distributed
from pipeline.runtime.progress import progress
from superglue_sift.matcher import PairMatches

Unit = TypeVar("Unit")
Judge = Callable[[KnownPair, Mapping[str, PairMatches]], PairResult]
MOST_THREADS = 8


@dataclass
class Results:
    """What comes out, in the order of the source. bad: (scene, reason)."""

    pairs: List[PairResult] = field(default_factory=list)
    bad: List[Tuple[str, str]] = field(default_factory=list)

    @property
    def rows(self) -> List[Row]:
        """Those of all matchers on all pairs, pair by pair."""
        return [row for one in self.pairs for row in one.rows.values()]


def evaluate(
    source: pairs.Source,
    matchers: Matchers,
    settings: Settings,
    context: Optional[distributed.Context] = None,
    title: str = "evaluate",
    judge: Optional[Judge] = None,
) -> Results:
    """Run everything; progress goes to stderr. Every process of a group gets all results. judge: else `score_pair`."""
    total = sum(source.pairs_in(index) for index in range(len(source)))
    everything = Results()
    with progress(total=total, desc=title, unit="pair", disable=bool(context and context.rank)) as bar:
        for part in results_by_unit(source, matchers, settings, context, judge):
            everything.pairs += part.pairs
            everything.bad += part.bad
            bar.update(len(part.pairs))
    return everything


def results_by_unit(
    source: pairs.Source,
    matchers: Matchers,
    settings: Settings,
    context: Optional[distributed.Context] = None,
    judge: Optional[Judge] = None,
) -> Iterator[Results]:
    """The results, unit by unit."""
    thresholds = {name: network.threshold for name, network in matchers.networks.items()}

    def extract(unit: Sequence[int]) -> Tuple[List[KnownPair], List[Tuple[str, str]]]:
        return pairs.extract(source, unit, settings.params.max_keypoints, settings.extractor)

    def match(extracted):
        known, bad = extracted
        return known, matchers.answers([one.pair for one in known], settings.batch), bad

    def score(matched: Tuple[List[KnownPair], List[Dict[str, PairMatches]], list]) -> Results:
        known, answers, bad = matched
        if judge:
            return Results([judge(*one) for one in zip(known, answers)], bad)
        return Results([score_pair(*one, thresholds, settings) for one in zip(known, answers)], bad)

    return map_over_ranks(units_of(source, settings.batch), [], extract, match, score, context)


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


def disturbed_lines(
    source: HeldOutPairs, matchers: Matchers, settings: Settings, context: distributed.Context
) -> List[Line]:
    """Lines of robustness.csv: each disturbance at each level, on the first `settings.robustness` photographs."""
    lines = []
    for name, (disturb, levels) in LEVELS.items():
        for level in levels:
            weakened = disturbed(source, settings.robustness, disturb, level)
            results = evaluate(weakened, matchers, settings, context, f"{name} {level:g}")
            if results.rows:
                lines.append(condition_line(name, f"{level:g}", results.rows))
    return lines


def unrelated_rows(
    source: HeldOutPairs, matchers: Matchers, settings: Settings, context: distributed.Context
) -> List[Row]:
    """Rows of pairs of photographs with nothing in common, with the number of matches: each is wrong."""

    def judge(known: KnownPair, answers: Mapping[str, PairMatches]) -> PairResult:
        sizes = len(known.pair.records0), len(known.pair.records1)
        counts = {name: int((found.matches0 >= 0).sum()) for name, found in matchers.above(answers).items()}
        rows = {
            name: Row(known.name, known.scene, name, *sizes, metrics.MatchCounts(count, 0, 0, 0), {}, {})
            for name, count in counts.items()
        }
        return PairResult(known.place, rows, {})

    return evaluate(UnrelatedPairs(source), matchers, settings, context, "unrelated", judge).rows


def map_over_ranks(
    units: Sequence[Unit],
    nothing: Unit,
    prepare: Callable[[Unit], Any],
    match: Callable[[Any], Any],
    score: Callable[[Any], Any],
    context: Optional[distributed.Context] = None,
) -> Iterator[Any]:
    """`score(match(prepare(unit)))` of every unit, in their order, on every process of the group.

    prepare and score run in threads, a little ahead and behind; match in turn. nothing: the unit of a process that has
    none left in the last round. Raises RequestError on all processes when `prepare` raises one on any.
    """
    rank, world_size = (context.rank, context.world_size) if context else (0, 1)
    rounds = range(-(-len(units) // world_size))
    mine = [
        units[index] if index < len(units) else nothing for index in (n * world_size + rank for n in rounds)
    ]
    workers = max(1, min((os.cpu_count() or 1) // world_size, MOST_THREADS))
    matched = map_serial(mine, prepare, match, workers)
    for scored in prefetch_map(
        lambda found: found if isinstance(found, str) else score(found), matched, workers
    ):
        for part in distributed.all_gather(scored()):
            if isinstance(part, str):
                final_barrier()
                raise RequestError(part)
            yield part
    final_barrier()


def map_serial(
    units: Sequence[Unit], prepare: Callable[[Unit], Any], match: Callable[[Any], Any], workers: int
) -> Iterator[Any]:
    """`match(prepare(unit))` of each; a message in place of one whose request was wrong, for all to hear."""
    for ready in prefetch_map(prepare, units, workers):
        try:
            prepared = ready()
        except RequestError as error:
            yield str(error)
            return
        yield match(prepared)


def prefetch_map(work: Callable, items: Iterable, workers: int) -> Iterator[Callable]:
    """A callable with the result of `work(item)` for each item, computed by threads a little before it is asked for.

    Threads, not processes: decoding, warping, SIFT and robust estimators all release Python's lock, and nothing need
    be copied.
    """
    with ThreadPoolExecutor(max_workers=workers) as pool:
        waiting: deque = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > workers:
                yield waiting.popleft().result
        while waiting:
            yield waiting.popleft().result


def final_barrier() -> None:
    """Wait until all processes have heard the last results: who leaves early takes the connection along.

    By then nothing can be lost any more, so a peer that has left this barrier first is no failure.
    """
    with contextlib.suppress(RuntimeError):
        distributed.barrier()
