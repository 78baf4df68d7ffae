"""The report as one HTML page that needs nothing beside it: no network, pictures, curves and script inside.

`report.json` holds all that an evaluation puts on it, the same in every clone. The page is made of it, of the curves
of the training and of what only this clone knows: commit and date.
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
from pipeline.report.document import Content, load
from superglue_sift import drawing

Line = Mapping[str, Any]
PAGE = "index.html"


def write(folder: Path, training: Optional[Path] = None) -> Path:
    """Write index.html from report.json. training: folder with train.csv and validation.csv, where there is one."""
    made = {"commit": repro.git_state()["commit"][:8], "date": time.strftime("%Y-%m-%d")}
    (folder / PAGE).write_text(render(load(folder), training_curves(training), made), encoding="utf-8")
    return folder / PAGE


def training_curves(folder: Optional[Path]) -> Dict[str, List[Line]]:
    """Lines of the curves that training left in a folder, by the name of the file; those that are there."""
    found: Dict[str, List[Line]] = {}
    if folder is None:
        return found
    for name in ("train", "validation"):
        path = folder / f"{name}.csv"
        if path.is_file():
            found[name] = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    return found


def render(content: Content, training: Mapping[str, Sequence[Line]], made: Mapping[str, str]) -> str:
    """The page as HTML text. made: commit and date."""
    sections = (
        ("Training", training_charts(training)),
        ("Pairs within an error", error_charts(content.curves)),
        ("Confidence", confidence_charts(content.curves)),
    )
    return template().render(title=content.title, content=content, sections=sections, made=made)


def template() -> jinja2.Template:
    """`page.html`, with the words of the tables as filters."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    words = (as_text, tables.figure_title, tables.foremost, tables.marked, tables.matchers_in, tables.notes)
    words += (tables.percent, tables.points, tables.column_groups, summary.unrelated, summary.verdict, marks)
    environment.filters.update({each.__name__: each for each in words}, title_of=tables.title)
    environment.filters.update(
        by_cell=lambda lines: {(line["matcher"], line["figure"]): line for line in lines},
        picture_title=lambda name: summary.PICTURES.get(name, name),
        select_ours=lambda line: [name.partition(".")[2] for name in line if name.startswith("superglue.")],
    )
    environment.globals.update(least_pairs=tables.LEAST_PAIRS, few=tables.FEW, ours=summary.OURS, short=tables.SHORT)
    colours = ",".join(drawing.css_colours()[::15])
    environment.globals.update(scale=colours, opacity=drawing.OPACITY, most_lines=drawing.LINES)
    return environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


class Mark(NamedTuple):
    """A match as the page draws it: path of an SVG, a line or two dots; colour: of its confidence."""

    path: str
    line: bool
    colour: str
    score: float
    right: bool


def marks(matches: Sequence[Sequence[float]]) -> List[Mark]:
    """The matches of a `Picture` in the order and colours of `drawing`. The strongest lines stay such whatever the
    threshold, since it takes the weakest matches first."""
    rows = np.array(matches, np.float64).reshape(-1, 6)
    scores, wrong = rows[:, 4], rows[:, 5] == 0
    lines, colours = drawing.strongest(scores), drawing.css_colours()
    found = []
    for index in drawing.drawing_order(drawing.Panel("", rows[:, :2], rows[:, 2:4], scores, wrong)):
        x0, y0, x1, y1, score, _ = rows[index].tolist()
        path = f"M{x0:g} {y0:g}L{x1:g} {y1:g}" if lines[index] else f"M{x0:g} {y0:g}h0M{x1:g} {y1:g}h0"
        colour = colours[round(255 * min(max(score, 0.0), 1.0))]
        found.append(Mark(path, bool(lines[index]), colour, score, not wrong[index]))
    return found


def as_text(differences: Sequence[Line]) -> List[str]:
    """What is better, worse and equal: compared with the best baseline, then with each further model.

    Nothing where the photographs are too few, which the verdict and the table say.
    """
    seen: Dict[str, str] = {}  # figure -> whom its first line is about
    groups: Dict[Tuple[str, str], List[str]] = {}
    for line in differences:
        figure, baseline = str(line["figure"]), str(line["baseline"])
        other = "the best baseline" if figure not in seen else tables.title(baseline)
        seen.setdefault(figure, baseline)
        groups.setdefault((other, str(line["verdict"])), []).append(tables.figure_title(figure))
    words = {"better": "Better than", "worse": "Worse than", "equal": "Equal within the interval to"}
    known = [key for key in groups if key[1] in words]
    ranked = sorted(known, key=lambda key: (key[0] != "the best baseline", key[0], list(words).index(key[1])))
    return [f"{words[verdict]} {other} in: {', '.join(groups[other, verdict])}." for other, verdict in ranked]


Chart = Tuple[Markup, str]  # and its caption
AXES = {  # first column of a curve -> its axis, and what was estimated
    "error_px": ("corner error in pixels", "Homography from {}"),
    "error_deg": ("pose error in degrees", "Relative pose from the essential matrix, {}"),
}


def training_charts(curves: Mapping[str, Sequence[Line]]) -> List[Chart]:
    """Loss of training and validation by step, and what validation finds."""
    losses = {name: charts.column(lines, "step", "loss") for name, lines in curves.items()}
    losses = {name: points for name, points in losses.items() if points}
    if not losses:
        return []
    last, most = (max(point[axis] for points in losses.values() for point in points) for axis in (0, 1))
    loss = charts.line_chart(losses, "step", "loss", (0, last), (0, most or 1.0))
    shares = {name: charts.column(curves.get("validation", ()), "step", name) for name in ("precision", "recall")}
    share = charts.line_chart(shares, "step", "share on validation pairs", (0, last))
    return [(loss, "Loss while training and on validation pairs"), (share, "Precision and recall on validation pairs")]


def error_charts(curves: Mapping[str, Sequence[Line]]) -> List[Chart]:
    """The curves whose areas the AUC are."""
    found = []
    for name, lines in curves.items():
        if not name.startswith("error_") or not lines:
            continue
        axis, *matchers = lines[0]
        series = {tables.title(matcher): charts.column(lines, axis, matcher) for matcher in matchers}
        label, title = AXES[axis]
        chart = charts.line_chart(series, label, "share of pairs", (0, float(lines[-1][axis])))
        estimator = tables.estimator_title(name[len("error_") :])
        caption = f"{title.format(estimator)}: share of pairs within an error"
        found.append((chart, caption))
    return found


def confidence_charts(curves: Mapping[str, Sequence[Line]]) -> List[Chart]:
    """Precision beside recall, both over the threshold, and calibration; nothing where neither was asked."""
    if "precision_recall" not in curves:
        return []
    thresholds, swept = curves["precision_recall"], curves["precision_at_recall"]
    networks = [name for name in swept[0] if name != "recall"] if swept else []
    series = {tables.title(name): charts.column(swept, "recall", name) for name in networks}
    for line in curves["operating_points"]:
        if line["matcher"] not in networks:
            series[tables.title(str(line["matcher"]))] = charts.column([line], "recall", "precision")
    first = charts.line_chart(series, "recall", "precision", (0, 1))
    series = {name: charts.column(thresholds, "threshold", name) for name in ("precision", "recall")}
    second = charts.line_chart(series, "smallest confidence of a match", "share", (0, 1))
    points = {"ours": charts.column(curves["calibration"], "confidence", "precision")}
    third = charts.line_chart(points, "confidence of a match", "share of right ones", (0, 1), diagonal=True)
    return [
        (first, "Precision at each recall over all confidences of ours; a baseline is one point"),
        (second, "Precision and recall of ours over the confidence threshold (a pair without matches counts as 0)"),
        (third, "Calibration: on the dashed line, confidence is the share of right matches"),
    ]
