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
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar

from pipeline import bootstrap
from pipeline.errors import RequestError, WorkError
from pipeline.evaluate import content, estimators, inputs, magnified, metrics, poses, scoring
from pipeline.evaluate.heldout import LEVELS, HeldOutPairs, NegativePairs, disturbed
from pipeline.evaluate.hpatches import HPatchesPairs
from pipeline.evaluate.inputs import KnownPair, Source
from pipeline.evaluate.matchers import OURS, Matchers
from pipeline.evaluate.scoring import MatchCounts, PairResult, Results, Row, Settings, score_pair
from pipeline.files import file_sha256
from pipeline.parameters.schema import EvaluateParams
from pipeline.processes import distributed
from pipeline.processes.prefetch import prefetched
from pipeline.report import document, outputs, page, summary, tables
from superglue_sift import drawing, extractors
from superglue_sift.matcher import PairMatches
from superglue_sift.progress import Progress

# Width, height, keypoints: 640x480 of the paper (section 5.1), for which most photographs of COCO
# must be scaled up, and 512x384, for which they need not.
VARIANTS = ((640, 480, 512), (640, 480, 1024), (512, 384, 512), (512, 384, 1024))
MAX_THREADS = 8

Named = Tuple[Source, str]  # with a description of its pairs
Unit = TypeVar("Unit")
Scorer = Callable[[KnownPair, Mapping[str, PairMatches]], PairResult]


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
        results = self.evaluate(source)
        if not results.pairs:
            first = ": ".join(results.bad[0])
            raise WorkError(f"none of the {len(source)} images could be read; the first: {first}")
        disturbed = []
        negatives = []
        if isinstance(source, HeldOutPairs):
            disturbed = self.disturbed_lines(source)
            negatives = self.negative_rows(source)
        if not self.context.is_main:
            return None
        compared = metrics.compare(results.pairs, self.matchers.thresholds)
        compared.metrics.update(metrics.negative_pairs(negatives))
        drawn = content.draw_pictures(source, self.matchers, results, self.settings)
        pictures = [picture for picture, _ in drawn]
        about = self.describe(source, where)
        report = content.content(where, results, compared, disturbed, pictures, about, source.unit)
        report.notes.extend(self.skipped)
        outputs.write(out, report, self.training)
        for picture, canvas in drawn:
            drawing.write(out / "pictures" / f"{picture.name}.png", canvas)
        scenes = (
            tables.by_scene(report.scenes) + "\n\n" if isinstance(source, HPatchesPairs) else ""
        )
        print(
            "\n".join(
                ["", f"{where}, {len(results.pairs)} pairs", "", *summary.verdict(report), ""]
            )
        )
        print(f"{scenes}{tables.comparison(report.metrics)}\n")
        print(tables.differences(report.differences))
        print("\n".join([*tables.negative_pairs(report.metrics), ""]))
        bad = (
            f"; {len(results.bad)} unreadable images left out, see bad_images.csv"
            if results.bad
            else ""
        )
        print("\n".join([*self.skipped, "", f"written to {out}{bad}"]), flush=True)
        return report

    def evaluate(
        self, source: Source, title: str = "evaluate", scorer: Optional[Scorer] = None
    ) -> Results:
        """Match and score all pairs, with progress on stderr. Every process of a group gets all
        results.
        """
        results = Results()
        total = sum(source.pairs_in(index) for index in range(len(source)))
        with Progress(
            total=total, desc=title, unit="pair", disable=not self.context.is_main
        ) as bar:
            for part in results_by_unit(source, self.matchers, self.settings, self.context, scorer):
                results.pairs += part.pairs
                results.bad += part.bad
                bar.update(len(part.pairs))
        return results

    def disturbed_lines(self, source: HeldOutPairs) -> List[metrics.Line]:
        """Lines of robustness.csv: each disturbance at each level, on the first
        `settings.robustness` photographs.
        """
        count = self.settings.robustness
        if not count:
            return []
        variants = [
            (name, f"{level:g}", disturbed(source, count, disturb, level))
            for name, (disturb, levels) in LEVELS.items()
            for level in levels
        ]
        lines = []
        for name, level, variant in [*variants, *magnified.levels(source, count)]:
            results = self.evaluate(variant, f"{name} {level}").pairs
            lines += [metrics.condition_line(name, level, results)] if results else []
        return lines

    def negative_rows(self, source: HeldOutPairs) -> List[Row]:
        """Rows of negative pairs (of different photographs), with the number of matches: each is
        wrong.
        """

        def scorer(known: KnownPair, answers: Mapping[str, PairMatches]) -> PairResult:
            sizes = len(known.pair.records0), len(known.pair.records1)
            rows = {}
            for name, matches in self.matchers.above(answers).items():
                counts = MatchCounts(int((matches.matches0 >= 0).sum()), 0, 0, 0)
                rows[name] = Row(known.name, known.scene, name, *sizes, counts, {}, {})
            return PairResult(known.place, rows, {})

        return self.evaluate(NegativePairs(source), "negative pairs", scorer).rows

    def describe(self, source: Source, where: str) -> Dict[str, object]:
        """protocol.json: everything that must be quoted with a metric."""
        params = self.settings.params
        resize = self.settings.resize
        extractor = self.settings.extractor
        rules = {
            "truth": (
                f"mutual nearest reprojections under {scoring.CORRECT_PX} px, the larger of both"
                " directions"
            ),
            "robust": (
                f"inliers within {scoring.RANSAC_PX} px, {scoring.RANSAC_ITERATIONS} iterations"
            ),
            "estimators": {name: estimators.WORDS[name] for name in self.settings.estimators},
        }
        resized = f"shorter side {resize} px" if resize else "as they are"
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
            "views": (
                f"{params.width}x{params.height}" if isinstance(source, HeldOutPairs) else resized
            ),
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
    """Evaluate all variants, each into its folder, and write metrics.json, protocols.csv and a page
    of all of them.

    Names in metrics.json are `<variant>.<matcher>.<metric>`. Returns the content of each variant on
    the first process, nothing on the others.
    """
    contents: Dict[str, document.Content] = {}
    for width, height, keypoints in VARIANTS:
        asked = {"width": width, "height": height, "max_keypoints": keypoints}
        variant = work.settings.params.model_copy(update=asked)
        named = source_of(variant)
        name = f"{width}x{height}-{keypoints}"
        part = replace(work, settings=replace(work.settings, params=variant))
        report = part.run(named, out / name)
        if report is not None:
            contents[name] = report
    if not contents:
        return {}
    by_variant = {name: report.metrics for name, report in contents.items()}
    flat = {
        f"{name}.{metric}": value
        for name, values in by_variant.items()
        for metric, value in values.items()
    }
    outputs.write_json(out / "metrics.json", flat)
    lines = [
        {"protocol": name, **line}
        for name in by_variant
        for line in tables.lines_by_matcher(by_variant[name])
    ]
    outputs.write_lines(out / "protocols.csv", lines)
    overview = page.template().render(
        title="Evaluation: the paper's protocol and its variants", parts=contents
    )
    (out / "index.html").write_text(overview, encoding="utf-8")
    print(
        f"\nAll variants side by side\n\n{tables.side_by_side(by_variant)}\n\nwritten to {out}",
        flush=True,
    )
    return contents


def results_by_unit(
    source: Source,
    matchers: Matchers,
    settings: Settings,
    context: Optional[distributed.Context] = None,
    scorer: Optional[Scorer] = None,
) -> Iterator[Results]:
    """The results, unit by unit. scorer: of one pair; default `score_pair`."""
    scorer = scorer or partial(score_pair, thresholds=matchers.thresholds, settings=settings)

    def extract(unit: Sequence[int]) -> Tuple[List[KnownPair], List[Tuple[str, str]]]:
        return inputs.extract(source, unit, settings.params.max_keypoints, settings.extractor)

    def match(extracted):
        known, bad = extracted
        return zip(known, matchers.answers([entry.pair for entry in known], settings.batch)), bad

    def score(matched) -> Results:
        answered, bad = matched
        return Results([scorer(known, answers) for known, answers in answered], bad)

    return map_over_ranks(units_of(source, settings.batch), [], extract, match, score, context)


def units_of(source: Source, batch: int) -> List[List[int]]:
    """Group consecutive scenes into units of at most `batch` pairs, at least one scene each."""
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


def map_over_ranks(
    units: Sequence[Unit],
    nothing: Unit,
    prepare: Callable[[Unit], Any],
    match: Callable[[Any], Any],
    score: Callable[[Any], Any],
    context: Optional[distributed.Context] = None,
) -> Iterator[Any]:
    """Yield `score(match(prepare(unit)))` of every unit, in order, on every process of the group.

    prepare and score run in threads, match in the caller. Threads suffice: decoding, warping, SIFT
    and robust estimators release the GIL. nothing: the unit of a process without one in the last
    round. Raises RequestError on all processes when `prepare` raises one on any.
    """
    rank, world_size = (context.rank, context.world_size) if context else (0, 1)
    rounds = range(-(-len(units) // world_size))
    mine = [
        units[i] if i < len(units) else nothing for i in (n * world_size + rank for n in rounds)
    ]
    workers = max(1, min((os.cpu_count() or 1) // world_size, MAX_THREADS))

    def matched() -> Iterator[Any]:
        try:
            yield from map(match, prefetched(prepare, mine, workers, workers))
        except RequestError as error:
            yield str(error)  # in place of a result, so that all processes raise it

    failure = ""
    for result in prefetched(
        lambda item: item if isinstance(item, str) else score(item), matched(), workers, workers
    ):
        for part in distributed.all_gather(result):
            if isinstance(part, str) or failure:
                failure = failure or part
            else:
                yield part
        if failure:
            break
    # A peer may have left already; all results are gathered by now
    with contextlib.suppress(RuntimeError):
        # A process that leaves early would close the connection before others have the results
        distributed.barrier()
    if failure:
        raise RequestError(failure)
