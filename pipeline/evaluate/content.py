"""The content of the report, and its pictures, from the results of all pairs."""

from __future__ import annotations

from functools import lru_cache
from typing import Dict, List, Mapping, Sequence, Tuple

import numpy as np

from pipeline import bootstrap
from pipeline.evaluate import confidence, metrics
from pipeline.evaluate.inputs import Results, Source, pairs_of_scene
from pipeline.evaluate.matchers import OURS, Matchers
from pipeline.evaluate.metrics import Comparison, Line
from pipeline.evaluate.scoring import PairResult, PairRow, Settings, correct_matches, matched_points
from pipeline.report import document, summary
from pipeline.report.rows import Measure, Row, table_of, title
from superglue_sift import drawing

PICTURED = (OURS, metrics.RATIO_TEST)  # one above the other
# 0 .. 10 px, the range of the widest AUC
LIMITS_PX = tuple(round(0.1 * step, 1) for step in range(101))
# 0 .. 20 degrees, of the pose error
LIMITS_DEG = tuple(round(0.2 * step, 1) for step in range(101))


def write_content(
    where: str,
    source: Source,
    results: Results,
    compared: Comparison,
    disturbed: Sequence[document.Condition],
    negatives: Sequence[Row],
) -> document.Content:
    """All that the report shows but pictures and protocol. where: its title."""
    pairs = results.pairs
    first = pairs[0].rows
    of = f"{compared.clusters} {source.unit}"
    notes = [f"{len(pairs)} pairs of {of}, {len(first)} matchers on the same keypoints."]
    bad = len(results.bad)
    if bad:
        notes.append(f"{bad} images could not be read and were left out: see bad_images.csv.")
    return document.Content(
        title=where,
        rows=[*compared.rows, *negatives],
        differences=compared.differences,
        errors=[(error, error_curve(pairs, error)) for error in first[OURS].errors],
        curves={} if first[OURS].has_pose else confidence_curves(compared),
        robustness=[*metrics.by_condition(pairs), *disturbed],
        pairs=[metrics.pair_line(row) for pair in pairs for row in pair.rows.values()],
        scenes=metrics.by_scene(pairs),
        bad=[{"file": name, "reason": reason} for name, reason in results.bad],
        pictures=[],
        protocol={},
        notes=notes,
        unit=source.unit,
        clusters=compared.clusters,
    )


def confidence_curves(compared: Comparison) -> Dict[str, List[Line]]:
    """Lines of the files in curves/ on confidences, by name."""
    points = Measure("recall"), Measure("precision")
    threshold_curve = confidence.threshold_curve(compared.sweeps[OURS])
    return {
        "precision_recall": [bootstrap.round_all(line) for line in threshold_curve],
        "precision_at_recall": precision_at_recall(compared.sweeps),
        "operating_points": [
            {"matcher": name, **{measure.name: values[measure] for measure in points}}
            for name, values in table_of(compared.rows).items()
        ],
        "calibration": compared.calibration,
    }


def error_curve(results: Sequence[PairResult], error: Measure) -> List[Line]:
    """Fraction of pairs with an error of at most each limit, by matcher; the area below it is the
    AUC.
    """
    posed = results[0].rows[OURS].has_pose
    limits, unit = (LIMITS_DEG, "error_deg") if posed else (LIMITS_PX, "error_px")
    fractions = {
        name: metrics.recall_curve([pair.rows[name].errors[error] for pair in results], limits)
        for name in results[0].rows
    }
    return [
        {unit: limit, **bootstrap.round_all({name: curve[at] for name, curve in fractions.items()})}
        for at, limit in enumerate(limits)
    ]


def precision_at_recall(sweeps: Mapping[str, confidence.Sweep]) -> List[Line]:
    """The highest precision of each matcher with a confidence at each recall that ours reaches."""
    lines = []
    for recall in confidence.RECALLS:
        best = {
            name: confidence.recall_at_precision(swept.recall, swept.precision, recall)
            for name, swept in sweeps.items()
        }
        if best[OURS] > 0:
            reached = {name: value if value > 0 else np.nan for name, value in best.items()}
            lines.append({"recall": recall, **bootstrap.round_all(reached)})
    return lines


def draw_pictures(
    source: Source, matchers: Matchers, results: Sequence[PairResult], settings: Settings
) -> List[document.Picture]:
    """Draw gain-median, gain-most, best-1, ..., median-1, ..., worst-1, ..."""
    load = lru_cache(None)(source.load)  # rendered again: the results keep no images
    rows = [result.rows for result in results]
    drawn = []
    for name, index in [*choose_gains(rows), *choose_pictures([row[OURS] for row in rows])]:
        number, position = results[index].place
        scene = load(number)
        (known,) = pairs_of_scene(
            scene, number, settings.params.max_keypoints, settings.extractor, position
        )
        view = scene.pairs[position]
        left = source.in_color(number, view.first, scene.images[view.first])
        right = source.in_color(number, view.second, scene.images[view.second])
        shown = matchers.above(matchers.answers([known.pair], 1)[0])
        panels = []
        captions = [known.name]
        for matcher in PICTURED:
            caption = f"{title(matcher)}: {describe(rows[index][matcher])}"
            captions.append(caption)
            points = matched_points(known.pair, shown[matcher])
            wrong = ~correct_matches(known, shown[matcher])
            panels.append(drawing.Panel(f"{caption}   ({known.name})", *points, wrong))
        caption = " ".join(f"{words}." for words in captions)
        drawn.append(document.Picture(name, caption, drawing.draw(left, right, panels)))
    return drawn


def describe(row: PairRow) -> str:
    """Counts and error of a row as text."""
    kind, unit = ("pose", "degrees") if row.has_pose else ("corner", "px")
    right = f"{row.counts.correct} of {row.counts.matches} matches right"
    return f"{right}, {kind} error {row.error:.2f} {unit}"


def choose_gains(rows: Sequence[Mapping[str, PairRow]]) -> List[Tuple[str, int]]:
    """The pairs of the median and of the largest gain over the ratio test.

    The gain is the difference of the errors, clipped at the limit of the widest AUC; then that of
    the correct matches.
    """

    def gain(index: int) -> Tuple[float, int, int]:
        ours, other = (rows[index][name] for name in PICTURED)
        limit = LIMITS_DEG[-1] if ours.has_pose else LIMITS_PX[-1]
        right = ours.counts.correct - other.counts.correct
        return min(other.error, limit) - min(ours.error, limit), right, -index

    ranked = sorted(range(len(rows)), key=gain)
    return [(summary.GAIN_MEDIAN, ranked[len(ranked) // 2]), (summary.GAIN_MOST, ranked[-1])]


def choose_pictures(ours: Sequence[PairRow]) -> List[Tuple[str, int]]:
    """The pairs of the best, median and worst errors of ours, each once: [("best-1", 7), ...]."""
    ranked = sorted(range(len(ours)), key=lambda i: (ours[i].error, -ours[i].counts.correct, i))
    middle = max(len(ranked) // 2 - 1, 0)
    chosen = {"best": ranked[:2], "worst": ranked[::-1][:3], "median": ranked[middle : middle + 3]}
    names: Dict[int, str] = {}
    for kind, group in chosen.items():
        for place, index in enumerate(group, 1):
            names.setdefault(index, f"{kind}-{place}")
    return [(name, index) for index, name in names.items()]
