"""From results to what is shown: the content of the report, and the pictures in it."""

from __future__ import annotations

import base64
from typing import Dict, List, Mapping, Sequence, Tuple

import cv2
import numpy as np

from pipeline import bootstrap
from pipeline.bootstrap import LEAST_CLUSTERS
from pipeline.evaluate import confidence, metrics, poses, scoring
from pipeline.evaluate.inputs import Scene, Source, pairs_of_scene
from pipeline.evaluate.matchers import OURS, Matchers
from pipeline.evaluate.metrics import Comparison, Line
from pipeline.evaluate.scoring import Results, Row, Settings, correct_matches, matched_points
from pipeline.report import document, summary, tables
from superglue_sift import drawing

PICTURED = (OURS, metrics.RATIO_TEST)  # one above the other
LIMITS_PX = tuple(round(0.1 * step, 1) for step in range(101))  # 0 .. 10 px, the range of the widest AUC
LIMITS_DEG = tuple(round(0.2 * step, 1) for step in range(101))  # 0 .. 20 degrees, of the pose error
QUALITY = 80  # of the pictures in the page


def content(
    title: str,
    results: Results,
    compared: Comparison,
    disturbed: Sequence[Line],
    drawn: Sequence[document.Picture],
    protocol: Dict[str, object],
    unit: str = Source.unit,
) -> document.Content:
    """Everything the report shows and writes. disturbed: further lines of the table by how hard the pairs are; unit:
    what the scenes are called."""
    rows = results.rows
    scenes, matchers = compared.clusters, len(results.pairs[0].rows)
    notes = [f"{len(results.pairs)} pairs of {scenes} {unit}, {matchers} matchers on the same keypoints."]
    if results.bad:
        notes.append(f"{len(results.bad)} images could not be read and were left out: see bad_images.csv.")
    if scenes < LEAST_CLUSTERS:
        notes.append(
            f"Intervals resample {unit}, with all their pairs: {scenes} decide nothing, {LEAST_CLUSTERS} are needed."
        )
    return document.Content(
        title=title,
        figures=compared.figures,
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
    found = {f"error_{name}": error_curve(rows, name) for name in scoring.estimators_of(rows)}
    if f"{OURS}.recall" in compared.figures and OURS in compared.sweeps:
        found["precision_recall"] = [
            bootstrap.rounded(line) for line in confidence.threshold_curve(compared.sweeps[OURS])
        ]
        found["precision_at_recall"] = precision_at_recall(compared.sweeps)
        found["operating_points"] = [
            {"matcher": name, **{figure: compared.figures[f"{name}.{figure}"] for figure in ("recall", "precision")}}
            for name in tables.matchers_in(compared.figures)
        ]
        found["calibration"] = compared.calibration
    return found


def error_curve(rows: Sequence[Row], estimator: str) -> List[Line]:
    """Share of pairs with an error of at most each limit (`error_px`, `error_deg`), by matcher; its area is the AUC."""
    limits, unit = (LIMITS_DEG, "error_deg") if poses.is_pose(estimator) else (LIMITS_PX, "error_px")
    shares = {
        matcher: metrics.recall_curve([row.errors[estimator] for row in rows if row.matcher == matcher], limits)
        for matcher in scoring.matchers_of(rows)
    }
    return [
        {unit: limit, **{matcher: bootstrap.plain(share[index]) for matcher, share in shares.items()}}
        for index, limit in enumerate(limits)
    ]


def precision_at_recall(sweeps: Mapping[str, confidence.Sweep]) -> List[Line]:
    """The highest precision of each network with at least a recall, as far as ours reaches."""
    recalls = np.array(confidence.RECALLS)
    columns = {}
    for name, found in sweeps.items():
        best_beyond = np.append(np.maximum.accumulate(found.precision[::-1])[::-1], 0.0)  # recall only grows
        place = np.searchsorted(found.recall, recalls - 1e-12)
        columns[name] = best_beyond[place] if found.recall_pairs else np.zeros(len(recalls))
    reached = np.flatnonzero(columns[OURS] > 0)
    return [
        {"recall": confidence.RECALLS[row], **{name: bootstrap.plain(own[row]) for name, own in columns.items()}}
        for row in reached
    ]


def draw_pictures(
    source: Source, matchers: Matchers, results: Results, settings: Settings
) -> List[Tuple[document.Picture, np.ndarray]]:
    """gain-median, gain-most, best-1, ..., median-1, ..., worst-1, ...: for the page, and (H, W, 3) BGR."""
    drawn = []
    scenes: Dict[int, Scene] = {}  # made again, not remembered
    count, rows = settings.pictures, [one.rows for one in results.pairs]
    chosen = [*(gain_choice(rows) if count else []), *picture_choice([own[OURS] for own in rows], count)]
    for name, index in chosen:
        found = results.pairs[index]
        number, position = found.place
        if number not in scenes:
            scenes[number] = source.load(number)
        scene, most = scenes[number], settings.params.max_keypoints
        (known,) = pairs_of_scene(scene, number, most, settings.extractor, position)
        image0, image1 = scene.images[scene.pairs[position].first], scene.images[scene.pairs[position].second]
        answers = matchers.answers([known.pair], 1)[0]
        shown = matchers.above(answers)
        panels, captions, lines = [], [f"{known.name}."], {}
        for matcher in PICTURED:
            said = f"{tables.title(matcher)}: {counted(found.rows[matcher])}"
            captions.append(f"{said}.")
            points = matched_points(known.pair, shown[matcher])
            correct = correct_matches(known, shown[matcher], scoring.CORRECT_PX)
            panels.append(drawing.Panel(f"{said}   ({known.name})", *points, ~correct))
            # all that the page shows where its threshold is moved, in pixels of the two images side by side
            points0, points1, scores = matched_points(known.pair, answers[matcher])
            correct = correct_matches(known, answers[matcher], scoring.CORRECT_PX)
            points1 = points1.round(1) + np.array([known.pair.size0[0] + drawing.GAP, 0])
            lines[matcher] = np.column_stack([points0.round(1), points1, scores.round(3), correct]).tolist()
        canvas = drawing.side_by_side(image0, image1)
        _, data = cv2.imencode(".jpg", canvas, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
        jpeg, (height, width) = base64.b64encode(data.tobytes()).decode("ascii"), canvas.shape[:2]
        small = document.Picture(name, " ".join(captions), jpeg, width, height, lines)
        drawn.append((small, drawing.draw(image0, image1, panels)))
    return drawn


def counted(row: Row) -> str:
    """A row's counts and error as text."""
    error = "pose error {:.2f} degrees" if poses.NAME in row.errors else "corner error {:.2f} px"
    return f"{row.counts.correct} of {row.counts.matches} matches right, {error.format(row.error)}"


def gain_choice(rows: Sequence[Mapping[str, Row]]) -> List[Tuple[str, int]]:
    """Two pairs by what ours gains over the ratio test: at the median of that, and the one where it gains most.

    The gain is the difference of the errors, of which all above the widest AUC's limit are one failure; then that of
    the right matches.
    """

    def gain(index: int) -> Tuple[float, int, int]:
        ours, other = (rows[index][name] for name in PICTURED)
        limit = LIMITS_DEG[-1] if poses.NAME in ours.errors else LIMITS_PX[-1]
        right = ours.counts.correct - other.counts.correct
        return min(other.error, limit) - min(ours.error, limit), right, -index

    ranked = sorted(range(len(rows)), key=gain)
    return [(summary.GAIN_MEDIAN, ranked[len(ranked) // 2]), (summary.GAIN_MOST, ranked[-1])]


def picture_choice(ours: Sequence[Row], count: int) -> List[Tuple[str, int]]:
    """Which pairs to draw, `count` of the best, median and worst by our error: [("best-1", its index), ...]."""
    ranked = sorted(range(len(ours)), key=lambda i: (ours[i].error, -ours[i].counts.correct, i))
    count = min(count, len(ranked))
    worst, best = (count + 2) // 3, (count + 1) // 3
    middle = count - worst - best
    start = max(best, min((len(ranked) - middle) // 2, len(ranked) - worst - middle))
    chosen = {"best": ranked[:best], "median": ranked[start : start + middle], "worst": ranked[::-1][:worst]}
    return [(f"{kind}-{place}", index) for kind, group in chosen.items() for place, index in enumerate(group, 1)]
