"""The report as one self-contained HTML page, with pictures and curves inside."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Mapping, Sequence, Tuple

import jinja2
from markupsafe import Markup

from pipeline.report import charts, summary, tables
from pipeline.report.document import Content, Line, Picture
from pipeline.report.rows import Measure, table_of, title
from superglue_sift import drawing

Chart = Tuple[Markup, str]  # and its caption


def render(content: Content) -> str:
    """The page as HTML text."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(
        percent=tables.percent, points=tables.points, title=title, mark=tables.mark
    )
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        content=content,
        charts={
            "Pairs within an error": error_charts(content.errors),
            "Confidence": confidence_charts(content.curves),
        },
        tables=tables,
        summary=summary,
        Measure=Measure,
        table_of=table_of,
        address=address,
    )


def address(picture: Picture) -> str:
    """A picture as the address of a JPEG inside the page."""
    return charts.address("jpeg", drawing.Picture(picture.pixels).encode())


AXES = {  # first column of a curve -> label of its axis, and caption
    "error_px": ("corner error in pixels", "Homography from {}"),
    "error_deg": ("pose error in degrees", "Relative pose from the essential matrix, {}"),
}


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
        chart = charts.line_chart(series, label, "fraction of pairs", float(lines[-1][axis]))
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
    first = charts.line_chart(series, "recall", "precision")
    series = columns(curves["precision_recall"], "threshold", ("precision", "recall"))
    second = charts.line_chart(series, "minimum confidence of a match", "fraction")
    points = {"ours": charts.column(curves["calibration"], "confidence", "precision")}
    labels = "confidence of a match", "fraction of correct ones"
    third = charts.line_chart(points, *labels, diagonal=True)
    return [
        (first, "Precision at each recall, over all confidences of a matcher"),
        (
            second,
            "Precision and recall of ours over the confidence threshold (a pair without matches"
            " counts as 0)",
        ),
        (third, "Calibration: on the dashed line, confidence equals the fraction of right matches"),
    ]
