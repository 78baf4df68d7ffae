"""Run one evaluation from its source to its folder, or the variants of the SuperGlue paper's
protocol.

The work is cut into units of consecutive scenes. Each process takes every n-th unit and gathers the
results of all after each round, so metrics have the same bits for any number of processes.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from pipeline import bootstrap
from pipeline.errors import RequestError, WorkError
from pipeline.evaluate import content, estimators, inputs, metrics, poses, scoring, zoomed
from pipeline.evaluate.content import Results
from pipeline.evaluate.heldout import LEVELS, HeldOutPairs, NegativePairs, disturb
from pipeline.evaluate.inputs import KnownPair, Source
from pipeline.evaluate.matchers import OURS, Matchers
from pipeline.evaluate.scoring import Settings, score_pair
from pipeline.files import file_sha256, write_atomic
from pipeline.parameters.schema import EvaluateParams
from pipeline.processes import distributed
from pipeline.processes.prefetch import prefetch
from pipeline.report import document, outputs, summary, tables
from pipeline.report.rows import Row
from superglue_sift import drawing, extractors
from superglue_sift.matcher import PairMatches
from superglue_sift.progress import Progress

# Width, height, keypoints: 640x480 of the paper (section 5.1), for which most photographs of COCO
# must be scaled up, and 512x384, for which they need not.
VARIANTS = ((640, 480, 512), (640, 480, 1024), (512, 384, 512), (512, 384, 1024))
BATCH = 8  # pairs in one pass of a network
MAX_THREADS = 8

Named = Tuple[Source, str]  # with a description of its pairs
Score = Callable[[KnownPair, Mapping[str, PairMatches]], Any]


@dataclass(frozen=True)
class Evaluation:
    """Everything that all sources share. skipped: notes on what is left out; training: folder of
    its curves.
    """

    matchers: Matchers
    settings: Settings
    context: distributed.Context
    skipped: Tuple[str, ...] = ()
    training: Optional[Path] = None

    def run(self, named: Named, out: Path) -> Optional[document.Content]:
        """Evaluate a source; the first process writes the report into `out` and returns it. Raises
        WorkError.
        """
        source, where = named
        score = partial(score_pair, thresholds=self.matchers.thresholds, settings=self.settings)
        results = self.evaluate(source, "evaluate", score)
        if not results.pairs:
            first = ": ".join(results.bad[0])
            raise WorkError(f"none of the {len(source)} images could be read; the first: {first}")
        disturbed: List[document.Condition] = []
        negatives: List[Row] = []
        if isinstance(source, HeldOutPairs):
            disturbed = self.summarize_levels(source, score)
            found = self.evaluate(NegativePairs(source), "negative pairs", self.count_matches)
            negatives = metrics.count_negatives(found.pairs)
        if not self.context.is_main:
            return None
        compared = metrics.compare(results.pairs, self.matchers.thresholds)
        report = content.write_content(where, source, results, compared, disturbed, negatives)
        drawn = content.draw_pictures(source, self.matchers, results.pairs, self.settings)
        report = replace(
            report,
            pictures=[picture for picture, _ in drawn],
            protocol=self.describe(source, where),
            notes=[*report.notes, *self.skipped],
        )
        outputs.write(out, report, self.training)
        for picture, canvas in drawn:
            drawing.write(out / "pictures" / f"{picture.name}.png", canvas)
        print(f"\n{summary.text(report)}\n\nwritten to {out}", flush=True)
        return report

    def evaluate(self, source: Source, title: str, score: Score) -> Results:
        """Match and score all pairs, with progress on stderr. Every process of a group gets all
        results.
        """
        params = self.settings.params
        extractor = self.settings.extractor

        def extract(unit: Sequence[int]) -> Results:
            return Results(*inputs.extract(source, unit, params.max_keypoints, extractor))

        def match(found: Results) -> Tuple[Results, List[Dict[str, PairMatches]]]:
            return found, self.matchers.answers([known.pair for known in found.pairs], BATCH)

        def score_all(matched: Tuple[Results, List[Dict[str, PairMatches]]]) -> Results:
            found, answers = matched
            return Results(list(map(score, found.pairs, answers)), found.bad)

        results = Results([], [])
        total = sum(count for _, count in source.scenes)
        quiet = not self.context.is_main
        units = divide([count for _, count in source.scenes], BATCH)
        with Progress(total=total, desc=title, unit="pair", disable=quiet) as bar:
            for part in map_over_ranks(units, extract, match, score_all, self.context):
                results.pairs.extend(part.pairs)
                results.bad.extend(part.bad)
                bar.update(len(part.pairs))
        return results

    def summarize_levels(self, source: HeldOutPairs, score: Score) -> List[document.Condition]:
        """Each disturbance at each level, on the first `settings.robustness` photographs."""
        count = self.settings.robustness
        if not count:
            return []
        variants = [
            (name, level, disturb(source, count, function, level))
            for name, (function, levels) in LEVELS.items()
            for level in levels
        ]
        found = []
        for name, level, variant in [*variants, *zoomed.levels(source, count)]:
            results = self.evaluate(variant, f"{name} {level:g}", score).pairs
            found += [metrics.summarize_condition(name, f"{level:g}", results)] if results else []
        return found

    def count_matches(self, _: KnownPair, answers: Mapping[str, PairMatches]) -> Dict[str, int]:
        """The number of matches by matcher."""
        above = self.matchers.above(answers)
        return {name: int((found.matches0 >= 0).sum()) for name, found in above.items()}

    def describe(self, source: Source, where: str) -> Dict[str, object]:
        """protocol.json: everything that must be quoted with a metric."""
        params = self.settings.params
        resize = self.settings.resize
        extractor = self.settings.extractor
        views = f"shorter side {resize} px" if resize else "as they are"
        if isinstance(source, HeldOutPairs):
            views = f"{params.width}x{params.height}"
        chosen = self.settings.estimators
        words = {name: estimators.ESTIMATORS[name][1] for name in chosen}
        rules = {
            "truth": (
                f"mutual nearest reprojections under {scoring.CORRECT_PX} px, the larger of both"
                " directions"
            ),
            "robust": (f"inliers within {estimators.PX} px, {estimators.ITERATIONS} iterations"),
            "estimators": words,
        }
        found_by = "SIFT" if extractor is extractors.DEFAULT else extractor.name
        models = {
            name: {
                "file": network.file.name,
                "sha256": file_sha256(network.file),
                "network": network.info["model"],
                "step": network.info.get("step"),
                "validation_f1": bootstrap.plain(
                    network.info.get("validation", {}).get("f1", math.nan)
                ),
                "threshold": network.threshold,
            }
            for name, network in self.matchers.networks.items()
        }
        ours = models.pop(OURS)
        return {
            "pairs_from": where,
            "views": views,
            "keypoints": f"{found_by}, at most {params.max_keypoints} in each view",
            **(poses.RULES if isinstance(source, poses.PosePairs) else rules),
            **({"aligned": scoring.ALIGNMENT} if self.settings.refine else {}),
            "params": params.model_dump(),
            "model": ours,
            **({"models beside it": models} if models else {}),
        }


def run_paper(
    work: Evaluation, source_of: Callable[[EvaluateParams], Named], out: Path
) -> Dict[str, document.Content]:
    """Evaluate all variants, each into its folder, and write report.txt of all of them.

    Returns the content of each variant on the first process, nothing on the others.
    """
    contents: Dict[str, document.Content] = {}
    for width, height, keypoints in VARIANTS:
        asked = {"width": width, "height": height, "max_keypoints": keypoints}
        variant = work.settings.params.model_copy(update=asked)
        part = replace(work, settings=replace(work.settings, params=variant))
        name = f"{width}x{height}-{keypoints}"
        report = part.run(source_of(variant), out / name)
        if report is not None:
            contents[name] = report
    if contents:
        table = tables.side_by_side({name: report.table for name, report in contents.items()})
        write_atomic(out / document.TEXT, f"{table}\n")
        print(f"\nAll variants side by side\n\n{table}\n\nwritten to {out}", flush=True)
    return contents


def divide(counts: Sequence[int], most: int) -> List[List[int]]:
    """Group consecutive scenes, given by their numbers of pairs, into units of at most `most`
    pairs, but of one scene at least.
    """
    units: List[List[int]] = []
    held = most
    for index, count in enumerate(counts):
        if held + count > most:
            units.append([])
            held = 0
        units[-1].append(index)
        held += count
    return units


def map_over_ranks(
    units: Sequence[Sequence[int]],
    prepare: Callable[[Sequence[int]], Any],
    match: Callable[[Any], Any],
    score: Callable[[Any], Any],
    context: distributed.Context,
) -> Iterator[Any]:
    """Yield `score(match(prepare(unit)))` of every unit, in order, on every process of the group.

    prepare and score run in threads, match in the caller. Threads suffice: decoding, warping, SIFT
    and robust estimators release the GIL. In the last round some processes have an empty unit.
    Raises RequestError on all processes when `prepare` raises one on any.
    """
    world_size = context.world_size
    missing = -len(units) % world_size
    mine = [*units, *([[]] * missing)][context.rank :: world_size]
    workers = max(1, min((os.cpu_count() or 1) // world_size, MAX_THREADS))

    def answer() -> Iterator[Any]:
        try:
            yield from map(match, prefetch(prepare, mine, workers, workers))
        except RequestError as error:
            yield error  # in place of a result, so that all processes raise it

    def finish(item: Any) -> Any:
        return item if isinstance(item, RequestError) else score(item)

    failure = None
    for result in prefetch(finish, answer(), workers, workers):
        parts = distributed.all_gather(result)
        failure = next((part for part in parts if isinstance(part, RequestError)), None)
        if failure:
            break
        yield from parts
    # a process that leaves early would close the connection before others have the results
    with contextlib.suppress(RuntimeError):
        distributed.barrier()
    if failure:
        raise failure
