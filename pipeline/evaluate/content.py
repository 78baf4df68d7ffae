"""The content of the report, and its pictures, from the results of all pairs."""

from __future__ import annotations

import base64
from typing import Dict, List, Mapping, Sequence, Tuple

import cv2
import numpy as np

from pipeline import bootstrap
from pipeline.bootstrap import MIN_CLUSTERS
from pipeline.evaluate import confidence, metrics, poses, scoring
from pipeline.evaluate.inputs import Scene, Source, pairs_of_scene
from pipeline.evaluate.matchers import OURS, Matchers
from pipeline.evaluate.metrics import Comparison, Line
from pipeline.evaluate.scoring import Results, Row, Settings, correct_matches, matched_points
from pipeline.report import document, summary, tables
from superglue_sift import drawing

PICTURED = (OURS, metrics.RATIO_TEST)  # one above the other
# 0 .. 10 px, the range of the widest AUC
LIMITS_PX = tuple(round(0.1 * step, 1) for step in range(101))
# 0 .. 20 degrees, of the pose error
LIMITS_DEG = tuple(round(0.2 * step, 1) for step in range(101))
QUALITY = 80  # JPEG, of the pictures in the page


def content(
    title: str,
    results: Results,
    compared: Comparison,
    disturbed: Sequence[Line],
    drawn: Sequence[document.Picture],
    protocol: Dict[str, object],
    unit: str = Source.unit,
) -> document.Content:
    """All that the report shows. disturbed: further lines of robustness.csv; unit: word for
    scenes.
    """
    rows = results.rows
    scenes = compared.clusters
    matchers = len(results.pairs[0].rows)
    notes = [
        f"{len(results.pairs)} pairs of {scenes} {unit}, {matchers} matchers on the same keypoints."
    ]
    if results.bad:
        notes.append(
            f"{len(results.bad)} images could not be read and were left out: see bad_images.csv."
        )
    if scenes < MIN_CLUSTERS:
        notes.append(
            f"Intervals resample {unit}, with all their pairs: {scenes} decide nothing,"
            f" {MIN_CLUSTERS} are needed."
        )
    return document.Content(
        title=title,
        metrics=compared.metrics,
        intervals=compared.intervals,
        differences=compared.differences,
        curves=curves(rows, compared),
        robustness=[*metrics.by_condition(results.pairs), *disturbed],
        pairs=[metrics.pair_line(row) for row in rows],
        scenes=metrics.by_scene(rows),
        bad=[{"file": name, "reason": reason} for name, reason in results.bad],
        pictures=drawn,
        protocol=protocol,
        notes=notes,
        unit=unit,
    )


def curves(rows: Sequence[Row], compared: Comparison) -> Dict[str, List[Line]]:
    """Lines of the files in curves/, by name."""
    lines = {f"error_{name}": error_curve(rows, name) for name in scoring.estimators_of(rows)}
    if f"{OURS}.recall" in compared.metrics and OURS in compared.sweeps:
        lines["precision_recall"] = [
            bootstrap.rounded(line) for line in confidence.threshold_curve(compared.sweeps[OURS])
        ]
        lines["precision_at_recall"] = precision_at_recall(compared.sweeps)
        lines["operating_points"] = [
            {
                "matcher": name,
                **{
                    metric: compared.metrics[f"{name}.{metric}"]
                    for metric in ("recall", "precision")
                },
            }
            for name in tables.matchers_in(compared.metrics)
        ]
        lines["calibration"] = compared.calibration
    return lines


def error_curve(rows: Sequence[Row], estimator: str) -> List[Line]:
    """Fraction of pairs with an error of at most each limit, by matcher; the area below it is the
    AUC.
    """
    limits, unit = (
        (LIMITS_DEG, "error_deg") if poses.is_pose(estimator) else (LIMITS_PX, "error_px")
    )
    fractions = {
        matcher: metrics.recall_curve(
            [row.errors[estimator] for row in rows if row.matcher == matcher], limits
        )
        for matcher in scoring.matchers_of(rows)
    }
    return [
        {
            unit: limit,
            **{matcher: bootstrap.plain(curve[index]) for matcher, curve in fractions.items()},
        }
        for index, limit in enumerate(limits)
    ]


def precision_at_recall(sweeps: Mapping[str, confidence.Sweep]) -> List[Line]:
    """The highest precision of each matcher with a confidence at each recall that ours reaches."""
    lines = []
    for recall in confidence.RECALLS:
        best = {
            name: float(
                confidence.recall_at_precision(swept.recall, swept.precision, np.array(recall))
            )
            for name, swept in sweeps.items()
        }
        if best[OURS] > 0:
            reached = {name: value if value > 0 else np.nan for name, value in best.items()}
            lines.append({"recall": recall, **bootstrap.rounded(reached)})
    return lines


def draw_pictures(
    source: Source, matchers: Matchers, results: Results, settings: Settings
) -> List[Tuple[document.Picture, np.ndarray]]:
    """Draw gain-median, gain-most, best-1, ..., median-1, ..., worst-1, ...: for the page, and as
    (H, W, 3) BGR.
    """
    drawn = []
    scenes: Dict[int, Scene] = {}  # rendered again: the results keep no images
    count = settings.pictures
    rows = [result.rows for result in results.pairs]
    chosen = [
        *(gain_choice(rows) if count else []),
        *picture_choice([by_name[OURS] for by_name in rows], count),
    ]
    for name, index in chosen:
        result = results.pairs[index]
        number, position = result.place
        if number not in scenes:
            scenes[number] = source.load(number)
        scene = scenes[number]
        max_keypoints = settings.params.max_keypoints
        (known,) = pairs_of_scene(scene, number, max_keypoints, settings.extractor, position)
        numbers = scene.pairs[position].first, scene.pairs[position].second
        image0, image1 = (source.in_color(number, image, scene.images[image]) for image in numbers)
        answers = matchers.answers([known.pair], 1)[0]
        shown = matchers.above(answers)
        panels = []
        captions = [f"{known.name}."]
        lines = {}
        for matcher in PICTURED:
            caption = f"{tables.title(matcher)}: {counted(result.rows[matcher])}"
            captions.append(f"{caption}.")
            points = matched_points(known.pair, shown[matcher])
            correct = correct_matches(known, shown[matcher], scoring.CORRECT_PX)
            panels.append(drawing.Panel(f"{caption}   ({known.name})", *points, ~correct))
            # in pixels of the two images side by side; all of ours, for the slider of the page
            every = answers[matcher] if matcher in matchers.networks else shown[matcher]
            points0, points1, scores = matched_points(known.pair, every)
            correct = correct_matches(known, every, scoring.CORRECT_PX)
            points1 = points1.round(1) + np.array([known.pair.size0[0] + drawing.GAP, 0])
            lines[matcher] = np.column_stack(
                [points0.round(1), points1, scores.round(3), correct]
            ).tolist()
        canvas = drawing.side_by_side(image0, image1)
        _, data = cv2.imencode(".jpg", canvas, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
        jpeg = base64.b64encode(data.tobytes()).decode("ascii")
        height, width = canvas.shape[:2]
        small = document.Picture(name, " ".join(captions), jpeg, width, height, lines)
        drawn.append((small, drawing.draw(image0, image1, panels)))
    return drawn


def counted(row: Row) -> str:
    """Counts and error of a row as text."""
    error = "pose error {:.2f} degrees" if poses.NAME in row.errors else "corner error {:.2f} px"
    return f"{row.counts.correct} of {row.counts.matches} matches right, {error.format(row.error)}"


def gain_choice(rows: Sequence[Mapping[str, Row]]) -> List[Tuple[str, int]]:
    """The pairs of the median and of the largest gain over the ratio test.

    The gain is the difference of the errors, clipped at the limit of the widest AUC; then that of
    the correct matches.
    """

    def gain(index: int) -> Tuple[float, int, int]:
        ours, other = (rows[index][name] for name in PICTURED)
        limit = LIMITS_DEG[-1] if poses.NAME in ours.errors else LIMITS_PX[-1]
        right = ours.counts.correct - other.counts.correct
        return min(other.error, limit) - min(ours.error, limit), right, -index

    ranked = sorted(range(len(rows)), key=gain)
    return [(summary.GAIN_MEDIAN, ranked[len(ranked) // 2]), (summary.GAIN_MOST, ranked[-1])]


def picture_choice(ours: Sequence[Row], count: int) -> List[Tuple[str, int]]:
    """`count` pairs of the best, median and worst by our error: [("best-1", index), ...]."""
    ranked = sorted(range(len(ours)), key=lambda i: (ours[i].error, -ours[i].counts.correct, i))
    count = min(count, len(ranked))
    worst = (count + 2) // 3
    best = (count + 1) // 3
    middle = count - worst - best
    start = max(best, min((len(ranked) - middle) // 2, len(ranked) - worst - middle))
    chosen = {
        "best": ranked[:best],
        "median": ranked[start : start + middle],
        "worst": ranked[::-1][:worst],
    }
    return [
        (f"{kind}-{place}", index)
        for kind, group in chosen.items()
        for place, index in enumerate(group, 1)
    ]
