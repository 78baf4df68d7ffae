"""The few words and figures an evaluation is known by: its verdict, what MLflow shows of it first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Tuple

from pipeline.bootstrap import LEAST_CLUSTERS
from pipeline.report import tables

if TYPE_CHECKING:
    from pipeline.report.document import Content

OURS, RATIO_TEST = "superglue", "ratio_test"
GAIN_MEDIAN, GAIN_MOST = "gain-median", "gain-most"  # names of two pictures
PICTURES = {
    GAIN_MEDIAN: "A typical pair: the median of what ours gains over the ratio test",
    GAIN_MOST: "The pair where ours gains most over the ratio test",
}
VERDICTS = {"better": "Better than", "worse": "Worse than", "equal": "Equal, within the 95 % interval, to"}


def leading_area(content: Content) -> str:
    """Name of the area within 5 px (degrees) of the estimator that leads."""
    names = (name.partition(".")[2] for name in content.figures if name.startswith(f"{OURS}.auc_"))
    return next(name for name in names if name.endswith("_5"))


def best_baseline(content: Content, figure: str) -> Optional[Mapping[str, Any]]:
    """The line of differences.csv about a figure of ours and the best baseline."""
    return next((line for line in content.differences if line["figure"] == figure), None)


def headline(content: Content) -> Dict[str, float]:
    """At most ten figures of short names, for DVC (summary.json) and MLflow.

    Of ours and as what it gains over the best baseline: the leading area, the same of aligned matches, recall (of poses
    the matching score) at the ratio test's precision. Of ours: precision, recall, matches on pairs with nothing in
    common, and the F1 by which training chose it.
    """
    area = leading_area(content)
    share = "recall" if f"{OURS}.recall" in content.figures else "matching_score"
    names = {
        "auc_5": area,
        "auc_5_aligned": tables.aligned_counterpart(area),
        f"{share}_at_p": f"{share}_at_ratio_precision",
        "precision": "precision",
        share: share,
        "unrelated": "unrelated_matches",
    }
    found: Dict[str, Optional[float]] = {}
    for short, name in names.items():
        line = best_baseline(content, name)
        found[short] = content.figures.get(f"{OURS}.{name}")
        if line is not None and short != name:
            found[f"{short}_gain"] = line["value"]
    found["val_f1"] = content.protocol["model"].get("validation_f1")
    return {name: value for name, value in found.items() if value is not None}


def result(content: Content) -> str:
    """The one figure a run's name ends in: `AUC@5 57.8`."""
    return f"AUC@5 {tables.percent(content.figures[f'{OURS}.{leading_area(content)}'])}"


def verdict(content: Content) -> List[str]:
    """Two sentences: better, worse, equal or too few photographs to tell, and by how much; how clean the matches."""
    figures, area = content.figures, leading_area(content)
    value = f"{tables.figure_title(area)} {tables.percent(figures[f'{OURS}.{area}'])} %"
    line = best_baseline(content, area)
    value = f"{compared(content, line)}: {value}, {margin(content, line)}" if line is not None else value
    aligned = figures.get(f"{OURS}.{tables.aligned_counterpart(area)}")
    value += f"; with matches aligned by the pixels {tables.percent(aligned)} %" if aligned is not None else ""
    second = f"{tables.percent(figures.get(f'{OURS}.precision'))} % of its matches are right"
    if f"{OURS}.recall" in figures:
        second += f" and {tables.percent(figures[f'{OURS}.recall'])} % of the true ones are found"
    ours, others = (unrelated(figures, name) for name in (OURS, RATIO_TEST))
    if ours and others:
        second += (
            f"; photographs with nothing in common give {ours[0]:.1f} matches (95th percentile {ours[1]:.0f}), "
            f"by the ratio test {others[0]:.1f} ({others[1]:.0f})"
        )
    return [f"{value}.", f"{second}."]


def compared(content: Content, line: Mapping[str, Any]) -> str:
    """`Better than the best baseline (ratio test, mutual)`, or why that cannot be said."""
    if line["verdict"] not in VERDICTS:
        return f"Too few {content.unit} to tell ({line.get('clusters', 0)} of {LEAST_CLUSTERS})"
    return f"{VERDICTS[line['verdict']]} the best baseline ({tables.title(line['baseline'])})"


def margin(content: Content, line: Mapping[str, Any]) -> str:
    """The difference in points, with its interval where that is of enough photographs."""
    value = f"{tables.points(line['value'])} points"
    if line["verdict"] not in VERDICTS:
        return f"{value} from the best baseline ({tables.title(line['baseline'])})"
    low, high = tables.points(line["low"]), tables.points(line["high"])
    return f"{value} (95 % interval {low} .. {high}, {line.get('clusters', 0)} {content.unit})"


def unrelated(figures: Mapping[str, Optional[float]], matcher: str) -> Optional[Tuple[float, float]]:
    """Matches on pairs with nothing in common: mean and 95th percentile; None where there were no such pairs."""
    mean, most = (figures.get(f"{matcher}.unrelated_{name}") for name in ("matches", "matches_p95"))
    return None if mean is None or most is None else (mean, most)


def note(content: Content, folder: str, run_id: str) -> str:
    """What an MLflow run says of itself, in Markdown: verdict, table, two pictures from its artifacts in `folder`."""
    lines = [" ".join(verdict(content)), note_table(content)]
    notes = " ".join(f"{one.rstrip('.')}." for one in content.notes)
    lines.append(
        f"{content.title}; {notes} Figures {tables.notes(content.figures)[0]}; "
        "unrelated: matches for photographs with nothing in common. "
        f"All figures: `{folder}/matchers.csv`; pictures and curves: `{folder}/index.html`."
    )
    for picture in content.pictures:
        if picture.name in PICTURES:
            place = f"get-artifact?path={folder}/pictures/{picture.name}.png&run_uuid={run_id}"
            lines.append(f"**{PICTURES[picture.name]}.** {picture.caption}\n\n![{picture.name}]({place})")
    return "\n\n".join(lines)


def note_table(content: Content) -> str:
    """A line per matcher in Markdown. MLflow gives cells no margin, so they bring spaces that do not break."""
    area = leading_area(content)
    estimator = tables.columns_of(content.figures)[f"AUC {area[len('auc_') : -len('_5')].upper()}"]
    names = dict.fromkeys((area, tables.aligned_counterpart(area), estimator[-1], *tables.SHORT))
    shown = [name for name in names if f"{OURS}.{name}" in content.figures]
    heads = {name: tables.SHORT.get(name) or tables.figure_title(name) for name in shown}
    rows = [["", *heads.values(), "unrelated"]]
    for matcher in tables.matchers_in(content.figures):
        wrong = unrelated(content.figures, matcher)
        cells = [tables.percent(content.figures.get(f"{matcher}.{name}")) for name in shown]
        rows.append([tables.title(matcher), *cells, f"{wrong[0]:.1f}" if wrong else "-"])
    head, *body = [f"| {' | '.join(f'{cell}   '.replace(' ', '&nbsp;') for cell in row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])
