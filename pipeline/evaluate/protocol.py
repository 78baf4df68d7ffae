"""Run one evaluation from its source to its folder, or the variants of the SuperGlue paper's
protocol.

Threads load and score, the caller runs the networks. Results come in the order of the source.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from pipeline import bootstrap
from pipeline.errors import WorkError
from pipeline.evaluate import content, estimators, inputs, metrics, poses, scoring, zoomed
from pipeline.evaluate.heldout import HeldOutPairs, NegativePairs
from pipeline.evaluate.inputs import KnownPair, Results, Source
from pipeline.evaluate.matchers import OURS, Matchers
from pipeline.evaluate.scoring import Settings, score_pair
from pipeline.files import file_sha256, write_atomic
from pipeline.params import EvaluateParams
from pipeline.prefetch import prefetch
from pipeline.report import document, outputs, summary, tables
from pipeline.report.rows import Row
from superglue_sift.features import extractors
from superglue_sift.matches import Matches
from superglue_sift.progress import Progress

# Width, height, keypoints: 640x480 of the paper (section 5.1), for which most photographs of COCO
# must be scaled up, and 512x384, for which they need not.
VARIANTS = ((640, 480, 512), (640, 480, 1024), (512, 384, 512), (512, 384, 1024))
BATCH = 8  # pairs in one pass of a network
MAX_THREADS = 8

Named = Tuple[Source, str]  # with a description of its pairs
Score = Callable[[KnownPair, Mapping[str, Matches]], Any]


@dataclass(frozen=True)
class Evaluation:
    """Everything that all sources share. skipped: notes on what is left out."""

    matchers: Matchers
    settings: Settings
    skipped: Tuple[str, ...] = ()

    def run(self, named: Named, out: Path) -> document.Content:
        """Evaluate a source, and write the report into `out`. Raises WorkError."""
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
        compared = metrics.compare(results.pairs, self.matchers.thresholds)
        report = content.write_content(where, source, results, compared, disturbed, negatives)
        report = replace(
            report,
            pictures=content.draw_pictures(source, self.matchers, results.pairs, self.settings),
            protocol=self.describe(source, where),
            notes=[*report.notes, *self.skipped],
        )
        outputs.write(out, report)
        print(f"\n{summary.text(report)}\n\nwritten to {out}", flush=True)
        return report

    def evaluate(self, source: Source, title: str, score: Score) -> Results:
        """Match and score all pairs, with progress on stderr."""
        most = self.settings.params.max_keypoints
        extract = partial(
            inputs.extract, source, max_keypoints=most, extractor=self.settings.extractor
        )

        def match(found: Results) -> Tuple[Results, List[Dict[str, Matches]]]:
            return found, self.matchers.answers([known.pair for known in found.pairs], BATCH)

        def score_all(matched: Tuple[Results, List[Dict[str, Matches]]]) -> Results:
            found, answers = matched
            return Results(list(map(score, found.pairs, answers)), found.bad)

        results = Results([], [])
        counts = [count for _, count in source.scenes]
        # Threads suffice: decoding, warping, SIFT and robust estimators release the GIL
        threads = min(os.cpu_count() or 1, MAX_THREADS)
        matched = map(match, prefetch(extract, divide(counts, BATCH), threads, threads))
        with Progress(total=sum(counts), desc=title, unit="pair") as bar:
            for part in prefetch(score_all, matched, threads, threads):
                results.pairs.extend(part.pairs)
                results.bad.extend(part.bad)
                bar.update(len(part.pairs))
        return results

    def summarize_levels(self, source: HeldOutPairs, score: Score) -> List[document.Condition]:
        """Each disturbance at each level, on the first `settings.robustness` photographs."""
        count = self.settings.robustness
        if not count:
            return []
        found = []
        for name, level, variant in zoomed.levels(source, count):
            results = self.evaluate(variant, f"{name} {level:g}", score).pairs
            found += [metrics.summarize_condition(name, f"{level:g}", results)] if results else []
        return found

    def count_matches(self, _: KnownPair, answers: Mapping[str, Matches]) -> Dict[str, int]:
        """The number of matches by matcher."""
        above = self.matchers.above(answers)
        return {name: len(found) for name, found in above.items()}

    def describe(self, source: Source, where: str) -> Dict[str, object]:
        """protocol.json: everything that must be quoted with a metric."""
        params = self.settings.params
        resize = self.settings.resize
        extractor = self.settings.extractor
        views = f"shorter side {resize} px" if resize else "as they are"
        if isinstance(source, HeldOutPairs):
            views = f"{params.width}x{params.height}"
        words = {name: estimators.ESTIMATORS[name][1] for name in self.settings.estimators}
        rules = {
            "truth": (
                f"mutual nearest reprojections under {scoring.CORRECT_PX} px, the larger of both"
                " directions"
            ),
            "robust": f"inliers within {estimators.PX} px, {estimators.ITERATIONS} iterations",
            "estimators": words,
        }
        found_by = "SIFT" if extractor is extractors.DEFAULT else extractor.name
        few = self.matchers.network_keypoints
        seen = f", of which a network sees {few}" if few else ""
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
            "keypoints": f"{found_by}, at most {params.max_keypoints} in each view{seen}",
            **(poses.RULES if isinstance(source, poses.PosePairs) else rules),
            **({"aligned": scoring.ALIGNMENT} if self.settings.refine else {}),
            "params": params.model_dump(),
            "model": ours,
            **({"models beside it": models} if models else {}),
        }


def run_paper(
    work: Evaluation, source_of: Callable[[EvaluateParams], Named], out: Path
) -> Dict[str, document.Content]:
    """Evaluate all variants, each into its folder, and write report.txt of all of them."""
    contents: Dict[str, document.Content] = {}
    for width, height, keypoints in VARIANTS:
        asked = {"width": width, "height": height, "max_keypoints": keypoints}
        variant = work.settings.params.model_copy(update=asked)
        part = replace(work, settings=replace(work.settings, params=variant))
        name = f"{width}x{height}-{keypoints}"
        contents[name] = part.run(source_of(variant), out / name)
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
