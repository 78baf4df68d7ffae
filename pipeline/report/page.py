"""The report as one self-contained HTML page, with pictures, curves and script inside.

The page is rendered from `report.json`, which is the same in every clone, the curves of the
training, and this clone's commit and date.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import jinja2
import numpy as np
from markupsafe import Markup

from pipeline.provenance import repro
from pipeline.report import charts, summary, tables
from pipeline.report.document import Content, Picture, load
from superglue_sift import drawing

Line = Mapping[str, Any]
PAGE = "index.html"


def write(folder: Path, training: Optional[Path] = None) -> Path:
    """Write index.html from report.json. training: optional folder with train.csv and
    validation.csv.
    """
    version = {"commit": repro.git_state()["commit"][:8], "date": time.strftime("%Y-%m-%d")}
    (folder / PAGE).write_text(
        render(load(folder), training_curves(training), version), encoding="utf-8"
    )
    return folder / PAGE


def training_curves(folder: Optional[Path]) -> Dict[str, List[Line]]:
    """Lines of train.csv and validation.csv by name, of the files that exist."""
    paths = [folder / f"{name}.csv" for name in ("train", "validation")] if folder else []
    texts = {path.stem: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    return {name: list(csv.DictReader(text.splitlines())) for name, text in texts.items()}


def render(
    content: Content, training: Mapping[str, Sequence[Line]], version: Mapping[str, str]
) -> str:
    """The page as HTML text. version: commit and date."""
    sections = (
        ("Training", training_charts(training)),
        ("Pairs within an error", error_charts(content.curves)),
        ("Confidence", confidence_charts(content.curves)),
    )
    return template().render(
        title=content.title, content=content, sections=sections, version=version
    )


def template() -> jinja2.Template:
    """`page.html`, with the functions of the tables as filters."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    filters = (
        as_text,
        tables.metric_title,
        tables.foremost,
        tables.marked,
        tables.matchers_in,
        tables.notes,
    )
    filters += (
        tables.percent,
        tables.points,
        tables.column_groups,
        summary.negative_matches,
        summary.verdict,
        marks,
    )
    environment.filters.update(
        {function.__name__: function for function in filters}, title_of=tables.title
    )
    environment.filters.update(
        by_cell=lambda lines: {(line["matcher"], line["figure"]): line for line in lines},
        picture_title=lambda name: summary.PICTURES.get(name, name),
        select_ours=lambda line: [
            name.partition(".")[2] for name in line if name.startswith("superglue.")
        ],
    )
    environment.globals.update(
        min_pairs=tables.MIN_PAIRS, few=tables.FEW, ours=summary.OURS, short=tables.SHORT
    )
    environment.globals.update(opacity=drawing.OPACITY, max_lines=drawing.LINES)
    return environment.from_string(
        Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    )


class Mark(NamedTuple):
    """A match as the page draws it. path: of an SVG, a line or two dots; colour: of its place."""

    path: str
    line: bool
    colour: str
    score: float
    right: bool


def marks(matches: Sequence[Sequence[float]], picture: Picture) -> List[Mark]:
    """The matches of a `Picture` in the order and colours of `drawing`, as many of them lines."""
    rows = np.array(matches, np.float64).reshape(-1, 6)
    scores = rows[:, 4]
    wrong = rows[:, 5] == 0
    width = (picture.width - drawing.GAP) // 2
    colours = drawing.css_colours(rows[:, :2], width)
    lines = np.zeros(len(rows), bool)
    lines[drawing.spread(rows[:, :2], scores, (width, picture.height))[: drawing.LINES]] = True
    drawn = []
    for index in drawing.drawing_order(drawing.Panel("", rows[:, :2], rows[:, 2:4], scores, wrong)):
        x0, y0, x1, y1, score, _ = rows[index].tolist()
        path = (
            f"M{x0:g} {y0:g}L{x1:g} {y1:g}" if lines[index] else f"M{x0:g} {y0:g}h0M{x1:g} {y1:g}h0"
        )
        drawn.append(Mark(path, bool(lines[index]), colours[index], score, not wrong[index]))
    return drawn


def as_text(differences: Sequence[Line]) -> List[str]:
    """Sentences on what is better, worse and equal: than the best baseline, then than each further
    model.

    Empty with too few photographs, which the verdict and the table state.
    """
    seen: Dict[str, str] = {}  # metric -> baseline of its first line
    groups: Dict[Tuple[str, str], List[str]] = {}
    for line in differences:
        metric = str(line["figure"])
        baseline = str(line["baseline"])
        other = "the best baseline" if metric not in seen else tables.title(baseline)
        seen.setdefault(metric, baseline)
        groups.setdefault((other, str(line["verdict"])), []).append(tables.metric_title(metric))
    words = summary.VERDICTS
    known = [key for key in groups if key[1] in words]
    ranked = sorted(
        known, key=lambda key: (key[0] != "the best baseline", key[0], list(words).index(key[1]))
    )
    return [
        f"{words[verdict]} {other} in: {', '.join(groups[other, verdict])}."
        for other, verdict in ranked
    ]


Chart = Tuple[Markup, str]  # and its caption
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
    series = {
        name: charts.column(curves.get("validation", ()), "step", name)
        for name in ("precision", "recall")
    }
    scores = charts.line_chart(series, "step", "fraction on validation pairs", (0, last))
    return [
        (loss, "Training and validation loss"),
        (scores, "Precision and recall on validation pairs"),
    ]


def error_charts(curves: Mapping[str, Sequence[Line]]) -> List[Chart]:
    """The curves whose areas are the AUC metrics."""
    shown = []
    for name, lines in curves.items():
        if not name.startswith("error_") or not lines:
            continue
        axis, *matchers = lines[0]
        series = {
            tables.title(matcher): charts.column(lines, axis, matcher) for matcher in matchers
        }
        label, title = AXES[axis]
        chart = charts.line_chart(series, label, "fraction of pairs", (0, float(lines[-1][axis])))
        estimator = tables.estimator_title(name[len("error_") :])
        shown.append((chart, f"{title.format(estimator)}: fraction of pairs within an error"))
    return shown


def confidence_charts(curves: Mapping[str, Sequence[Line]]) -> List[Chart]:
    """Precision over recall, both over the threshold, and calibration; empty without these
    curves.
    """
    if "precision_recall" not in curves:
        return []
    thresholds = curves["precision_recall"]
    swept = curves["precision_at_recall"]
    networks = [name for name in swept[0] if name != "recall"] if swept else []
    series = {tables.title(name): charts.column(swept, "recall", name) for name in networks}
    for line in curves["operating_points"]:
        if line["matcher"] not in networks:
            series[tables.title(str(line["matcher"]))] = charts.column(
                [line], "recall", "precision"
            )
    first = charts.line_chart(series, "recall", "precision", (0, 1))
    series = {
        name: charts.column(thresholds, "threshold", name) for name in ("precision", "recall")
    }
    second = charts.line_chart(series, "minimum confidence of a match", "fraction", (0, 1))
    points = {"ours": charts.column(curves["calibration"], "confidence", "precision")}
    third = charts.line_chart(
        points, "confidence of a match", "fraction of correct ones", (0, 1), diagonal=True
    )
    return [
        (first, "Precision at each recall over all confidences of ours; a baseline is one point"),
        (
            second,
            (
                "Precision and recall of ours over the confidence threshold (a pair without matches"
                " counts as 0)"
            ),
        ),
        (
            third,
            "Calibration: on the dashed line, confidence equals the fraction of correct matches",
        ),
    ]
