"""The report as one self-contained HTML page, with pictures, curves and script inside."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import jinja2
import numpy as np
from markupsafe import Markup

from pipeline.report import charts, summary, tables
from pipeline.report.document import Content, Line, Picture
from pipeline.report.rows import Measure, table_of, title
from superglue_sift import drawing

Chart = Tuple[Markup, str]  # and its caption


def read_curves(folder: Optional[Path]) -> Dict[str, List[Line]]:
    """Lines of the training's train.csv and validation.csv by name, of the files that exist."""
    paths = [folder / f"{name}.csv" for name in ("train", "validation")] if folder else []
    texts = {path.stem: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    return {name: list(csv.DictReader(text.splitlines())) for name, text in texts.items()}


def render(content: Content, training: Mapping[str, Sequence[Line]]) -> str:
    """The page as HTML text. training: from `read_curves`."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(
        percent=tables.percent, points=tables.points, title=title, mark=tables.mark
    )
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        content=content,
        training=training_charts(training),
        charts={
            "Pairs within an error": error_charts(content.errors),
            "Confidence": confidence_charts(content.curves),
        },
        tables=tables,
        summary=summary,
        drawing=drawing,
        Measure=Measure,
        table_of=table_of,
        draw=draw,
    )


class Mark(NamedTuple):
    """A match as the page draws it. path: of an SVG, a line or two dots; colour: of its place."""

    path: str
    line: bool
    colour: str
    score: float
    right: bool


def draw(matches: Sequence[Sequence[float]], picture: Picture) -> List[Mark]:
    """The matches of a `Picture` in the order and colours of `drawing`, as many of them lines."""
    rows = np.array(matches, np.float64).reshape(-1, 6)
    points = rows[:, :2]
    scores = rows[:, 4]
    wrong = rows[:, 5] == 0
    width = (picture.width - drawing.GAP) // 2
    colours = drawing.css_colours(points, width)
    lines = drawing.spread(points, scores, (width, picture.height))[: drawing.LINES].tolist()
    marks = []
    for index in drawing.drawing_order(drawing.Panel("", points, rows[:, 2:4], scores, wrong)):
        x0, y0, x1, y1, score, right = rows[index].tolist()
        line = index in lines
        path = f"M{x0:g} {y0:g}" + (f"L{x1:g} {y1:g}" if line else f"h0M{x1:g} {y1:g}h0")
        marks.append(Mark(path, line, colours[index], score, bool(right)))
    return marks


AXES = {  # first column of a curve -> label of its axis, and caption
    "error_px": ("corner error in pixels", "Homography from {}"),
    "error_deg": ("pose error in degrees", "Relative pose from the essential matrix, {}"),
}


def training_charts(curves: Mapping[str, Sequence[Line]]) -> List[Chart]:
    """Loss of training and validation by step, and precision and recall of validation."""
    losses = {name: charts.column(lines, "step", "loss") for name, lines in curves.items()}
    losses = {name: points for name, points in losses.items() if points}
    if not losses:
        return []
    last, highest = (
        max(point[axis] for points in losses.values() for point in points) for axis in (0, 1)
    )
    loss = charts.line_chart(losses, "step", "loss", (0, last), (0, highest or 1.0))
    series = columns(curves.get("validation", ()), "step", ("precision", "recall"))
    scores = charts.line_chart(series, "step", "fraction on validation pairs", (0, last))
    return [
        (loss, "Training and validation loss"),
        (scores, "Precision and recall on validation pairs"),
    ]


def columns(lines: Sequence[Line], x: str, names: Sequence[str]) -> Dict[str, charts.Points]:
    """A series of points for each of these columns."""
    return {title(name): charts.column(lines, x, name) for name in names}


def error_charts(errors: Sequence[Tuple[Measure, Sequence[Line]]]) -> List[Chart]:
    """The curves whose areas are the AUC metrics."""
    shown = []
    for measure, lines in errors:
        axis, *matchers = lines[0]
        label, words = AXES[axis]
        series = columns(lines, axis, matchers)
        chart = charts.line_chart(series, label, "fraction of pairs", (0, float(lines[-1][axis])))
        words = words.format(measure.method)
        shown.append((chart, f"{words}: fraction of pairs within an error"))
    return shown


def confidence_charts(curves: Mapping[str, Sequence[Line]]) -> List[Chart]:
    """Precision over recall, both over the threshold, and calibration; empty without these
    curves.
    """
    if "precision_recall" not in curves:
        return []
    swept = curves["precision_at_recall"]
    networks = [name for name in swept[0] if name != "recall"] if swept else []
    series = columns(swept, "recall", networks)
    for line in curves["operating_points"]:
        if line["matcher"] not in networks:
            series[title(line["matcher"])] = charts.column([line], "recall", "precision")
    first = charts.line_chart(series, "recall", "precision", (0, 1))
    series = columns(curves["precision_recall"], "threshold", ("precision", "recall"))
    second = charts.line_chart(series, "minimum confidence of a match", "fraction", (0, 1))
    points = {"ours": charts.column(curves["calibration"], "confidence", "precision")}
    labels = "confidence of a match", "fraction of correct ones"
    third = charts.line_chart(points, *labels, (0, 1), diagonal=True)
    return [
        (first, "Precision at each recall over all confidences of ours; a baseline is one point"),
        (
            second,
            "Precision and recall of ours over the confidence threshold (a pair without matches"
            " counts as 0)",
        ),
        (third, "Calibration: on the dashed line, confidence equals the fraction of right matches"),
    ]
