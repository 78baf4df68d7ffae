"""One evaluation from its source to its folder, and the SuperGlue paper's: several of them side by side.

The work is cut into units of consecutive scenes. Each process takes every n-th unit, and after each round all of them
hear the results of all, so the figures have the same bits for any number of processes.
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
from pipeline.evaluate import acceptance, content, estimators, inputs, magnified, metrics, poses, scoring
from pipeline.evaluate.heldout import LEVELS, SEED, HeldOutPairs, UnrelatedPairs, disturbed
from pipeline.evaluate.hpatches import HPatchesPairs
from pipeline.evaluate.inputs import KnownPair, Source
from pipeline.evaluate.matchers import OURS, Matchers, match_batches
from pipeline.evaluate.rendered import RenderedScenes
from pipeline.evaluate.scoring import MatchCounts, PairResult, Results, Row, Settings, score_pair
from pipeline.files import file_sha256
from pipeline.parameters.schema import EvaluateParams
from pipeline.processes import distributed
from pipeline.processes.prefetch import prefetched
from pipeline.report import document, outputs, page, summary, tables
from superglue_sift import drawing, extractors
from superglue_sift.matcher import PairMatches
from superglue_sift.progress import Progress
from superglue_sift.scenes import NETWORK_KEYPOINTS

# The paper's (section 5.1), 640x480, for which most photographs of COCO must be magnified, and beside it 512x384, for
# which they need not: width, height, keypoints.
VARIANTS = ((640, 480, 512), (640, 480, 1024), (512, 384, 512), (512, 384, 1024))
MOST_THREADS = 8

Named = Tuple[Source, str]  # and where its pairs come from, as text
Unit = TypeVar("Unit")
Judge = Callable[[KnownPair, Mapping[str, PairMatches]], PairResult]


@dataclass(frozen=True)
class Evaluation:
    """What stays the same from source to source.

    skipped: a line for each thing that was asked for and is not here; training: folder of its curves, for the page.
    """

    matchers: Matchers
    settings: Settings
    context: distributed.Context
    skipped: Tuple[str, ...] = ()
    training: Optional[Path] = None

    def run(self, named: Named, out: Path) -> Optional[document.Content]:
        """Evaluate a source; the first process writes all into `out` and returns the content. Raises WorkError."""
        source, where = named
        results = self.evaluate(source)
        if not results.pairs:
            first = ": ".join(results.bad[0])
            raise WorkError(f"none of the {len(source)} images could be read; the first: {first}")
        disturbed, unrelated, scored = [], [], []
        if isinstance(source, HeldOutPairs):
            disturbed, unrelated = self.disturbed_lines(source), self.unrelated_rows(source)
            scored = self.scene_scores(source)
        if not self.context.is_main:
            return None
        compared = metrics.compare(results.pairs, self.matchers.thresholds)
        compared.figures.update(metrics.unrelated(unrelated))
        compared.figures.update(acceptance.figures(scored))
        drawn = content.draw_pictures(source, self.matchers, results, self.settings)
        shown = [small for small, _ in drawn]
        about = self.describe(source, where)
        found = content.content(where, results, compared, disturbed, shown, about, source.unit)
        found.notes.extend([*self.skipped, *tables.acceptance(found.figures)])
        if scored:
            found = replace(found, curves={**found.curves, "acceptance": acceptance.curve(scored)})
        outputs.write(out, found, self.training)
        for small, picture in drawn:
            drawing.write(out / "pictures" / f"{small.name}.png", picture)
        scenes = tables.by_scene(found.scenes) + "\n\n" if isinstance(source, HPatchesPairs) else ""
        print("\n".join(["", f"{where}, {len(results.pairs)} pairs", "", *summary.verdict(found), ""]))
        print(f"{scenes}{tables.comparison(found.figures)}\n")
        print(tables.differences(found.differences))
        print("\n".join([*tables.unrelated(found.figures), "", *tables.acceptance(found.figures)]))
        bad = f"; {len(results.bad)} unreadable images left out, see bad_images.csv" if results.bad else ""
        print("\n".join([*self.skipped, "", f"written to {out}{bad}"]), flush=True)
        return found

    def evaluate(self, source: Source, title: str = "evaluate", judge: Optional[Judge] = None) -> Results:
        """Run everything; progress goes to stderr. Every process of a group gets all results."""
        everything = Results()
        total = sum(source.pairs_in(index) for index in range(len(source)))
        with Progress(total=total, desc=title, unit="pair", disable=not self.context.is_main) as bar:
            for part in results_by_unit(source, self.matchers, self.settings, self.context, judge):
                everything.pairs += part.pairs
                everything.bad += part.bad
                bar.update(len(part.pairs))
        return everything

    def disturbed_lines(self, source: HeldOutPairs) -> List[metrics.Line]:
        """Lines of robustness.csv: each disturbance at each level, on the first `settings.robustness` photographs."""
        count = self.settings.robustness
        if not count:
            return []
        tried = [
            (name, f"{level:g}", disturbed(source, count, how, level))
            for name, (how, own) in LEVELS.items()
            for level in own
        ]
        lines = []
        for name, level, changed in [*tried, *magnified.levels(source, count)]:
            found = self.evaluate(changed, f"{name} {level}").pairs
            lines += [metrics.condition_line(name, level, found)] if found else []
        return lines

    def unrelated_rows(self, source: HeldOutPairs) -> List[Row]:
        """Rows of pairs of photographs with nothing in common, with the number of matches: each is wrong."""

        def judge(known: KnownPair, answers: Mapping[str, PairMatches]) -> PairResult:
            sizes = len(known.pair.records0), len(known.pair.records1)
            rows = {}
            for name, found in self.matchers.above(answers).items():
                counts = MatchCounts(int((found.matches0 >= 0).sum()), 0, 0, 0)
                rows[name] = Row(known.name, known.scene, name, *sizes, counts, {}, {})
            return PairResult(known.place, rows, {})

        return self.evaluate(UnrelatedPairs(source), "unrelated", judge).rows

    def scene_scores(self, source: HeldOutPairs) -> List[acceptance.Scores]:
        """Those of ours on pairs of rendered scenes, as many scenes as are asked for.

        Textures are cut from validation photographs, where there are some: limits are no figure of the test.
        """
        count, batch, params = self.settings.scenes, self.settings.batch, self.settings.params
        if not count:
            return []
        entries = source.images.entries("val") or source.entries
        rendered = RenderedScenes(source.images, entries, count, params.views.photometric, SEED)
        network, dense = self.matchers.networks[OURS].model, self.settings.extractor is extractors.DEFAULT
        extractor = extractors.DENSE if dense else self.settings.extractor

        def extract(unit: Sequence[int]) -> List[KnownPair]:
            return inputs.extract(rendered, unit, NETWORK_KEYPOINTS, extractor)[0]

        def match(known: List[KnownPair]) -> List[Tuple[KnownPair, PairMatches]]:
            device = self.matchers.device
            return list(zip(known, match_batches(network, [one.pair for one in known], batch, device)))

        def score(matched: List[Tuple[KnownPair, PairMatches]]) -> List[acceptance.Scores]:
            return [acceptance.scores_of(*one) for one in matched]

        scored: List[acceptance.Scores] = []
        units = units_of(rendered, batch)
        with Progress(total=count, desc="scenes", unit="scene", disable=not self.context.is_main) as bar:
            for part in map_over_ranks(units, [], extract, match, score, self.context):
                scored += part
                bar.update(1 if part else 0)
        return scored

    def describe(self, source: Source, where: str) -> Dict[str, object]:
        """Everything a figure must be quoted with: protocol.json."""
        params, resize, extractor = self.settings.params, self.settings.resize, self.settings.extractor
        judged = {
            "truth": f"mutual nearest reprojections under {scoring.CORRECT_PX} px, the larger of both directions",
            "robust": f"inliers within {scoring.RANSAC_PX} px, {scoring.RANSAC_ITERATIONS} iterations",
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
                "validation_f1": bootstrap.plain(network.info.get("validation", {}).get("f1", math.nan)),
                "threshold": network.threshold,
            }
            for name, network in self.matchers.networks.items()
        }
        ours = models.pop(OURS)
        return {
            "pairs_from": where,
            "views": f"{params.width}x{params.height}" if isinstance(source, HeldOutPairs) else resized,
            "keypoints": f"{found_by}, at most {params.max_keypoints} in each view",
            **(poses.RULES if isinstance(source, poses.PosePairs) else judged),
            **({"aligned": scoring.ALIGNMENT} if self.settings.refine else {}),
            "params": params.model_dump(),
            "model": ours,
            **({"models beside it": models} if models else {}),
        }


def run_paper(work: Evaluation, source_of: Callable[[EvaluateParams], Named], out: Path) -> Dict[str, document.Content]:
    """Each variant in a folder of its own; one table, metrics.json (`<variant>.<matcher>.<figure>`), protocols.csv and
    page of all.

    Returns the report of each on the first process, nothing on the others.
    """
    contents: Dict[str, document.Content] = {}
    for width, height, keypoints in VARIANTS:
        asked = {"width": width, "height": height, "max_keypoints": keypoints}
        variant = work.settings.params.model_copy(update=asked)
        source, where = source_of(variant)
        title = f"{where}, {width}x{height}, {keypoints} keypoints"
        name = f"{width}x{height}-{keypoints}"
        part = replace(work, settings=replace(work.settings, params=variant))
        found = part.run((source, title), out / name)
        if found is not None:
            contents[name] = found
    if not contents:
        return {}
    by_variant = {name: found.figures for name, found in contents.items()}
    flat = {f"{name}.{figure}": value for name, own in by_variant.items() for figure, value in own.items()}
    outputs.write_json(out / "metrics.json", flat)
    lines = [{"protocol": name, **line} for name, own in by_variant.items() for line in tables.lines_by_matcher(own)]
    outputs.write_lines(out / "protocols.csv", lines)
    overview = page.template().render(title="Evaluation: the paper's protocol and its variants", parts=contents)
    (out / "index.html").write_text(overview, encoding="utf-8")
    print(f"\nAll variants side by side\n\n{tables.side_by_side(by_variant)}\n\nwritten to {out}", flush=True)
    return contents


def results_by_unit(
    source: Source,
    matchers: Matchers,
    settings: Settings,
    context: Optional[distributed.Context] = None,
    judge: Optional[Judge] = None,
) -> Iterator[Results]:
    """The results, unit by unit. judge: of one pair; default `score_pair`."""
    judge = judge or partial(score_pair, thresholds=matchers.thresholds, settings=settings)

    def extract(unit: Sequence[int]) -> Tuple[List[KnownPair], List[Tuple[str, str]]]:
        return inputs.extract(source, unit, settings.params.max_keypoints, settings.extractor)

    def match(extracted):
        known, bad = extracted
        return zip(known, matchers.answers([one.pair for one in known], settings.batch)), bad

    def score(matched) -> Results:
        answered, bad = matched
        return Results([judge(*one) for one in answered], bad)

    return map_over_ranks(units_of(source, settings.batch), [], extract, match, score, context)


def units_of(source: Source, batch: int) -> List[List[int]]:
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


def map_over_ranks(
    units: Sequence[Unit],
    nothing: Unit,
    prepare: Callable[[Unit], Any],
    match: Callable[[Any], Any],
    score: Callable[[Any], Any],
    context: Optional[distributed.Context] = None,
) -> Iterator[Any]:
    """`score(match(prepare(unit)))` of every unit, in their order, on every process of the group.

    prepare and score run in threads, a little ahead and behind; match in turn. Threads do: decoding, warping, SIFT and
    robust estimators all release Python's lock, and nothing need be copied. nothing: the unit of a process that has
    none left in the last round. Raises RequestError on all processes when `prepare` raises one on any.
    """
    rank, world_size = (context.rank, context.world_size) if context else (0, 1)
    rounds = range(-(-len(units) // world_size))
    mine = [units[i] if i < len(units) else nothing for i in (n * world_size + rank for n in rounds)]
    workers = max(1, min((os.cpu_count() or 1) // world_size, MOST_THREADS))

    def matched() -> Iterator[Any]:
        try:
            yield from map(match, prefetched(prepare, mine, workers, workers))
        except RequestError as error:
            yield str(error)  # in place of a result, for all to hear

    wrong = ""
    for scored in prefetched(lambda one: one if isinstance(one, str) else score(one), matched(), workers, workers):
        for part in distributed.all_gather(scored):
            if isinstance(part, str) or wrong:
                wrong = wrong or part
            else:
                yield part
        if wrong:
            break
    with contextlib.suppress(RuntimeError):  # a peer may have left first: by now nothing can be lost any more
        distributed.barrier()  # until all have heard the last results: who leaves early takes the connection along
    if wrong:
        raise RequestError(wrong)
