"""The few words and figures an evaluation is known by: its verdict, what MLflow shows of it first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Tuple

from pipeline.report import tables

if TYPE_CHECKING:
    from pipeline.report.page import Content

OURS, RATIO_TEST = "superglue", "ratio_test"
VERDICTS = {"better": "Better than", "worse": "Worse than", "equal": "Equal, within the 95 % interval, to"}


def leading_area(content: Content) -> str:
    """Name of the area within 5 px (degrees) of the estimator that leads."""
    names = (name.partition(".")[2] for name in content.figures if name.startswith(f"{OURS}.auc_"))
    return next(name for name in names if name.endswith("_5"))


def best_baseline(content: Content, figure: str) -> Optional[Mapping[str, Any]]:
    """The line of differences.csv about a figure of ours and the best baseline."""
    return next((line for line in content.differences if line["figure"] == figure), None)


def headline(content: Content) -> Dict[str, float]:
    """At most eleven figures: the leading area, the same of aligned matches and recall at equal precision, each beside
    the best baseline; P and R."""
    found: Dict[str, Optional[float]] = {}
    area = leading_area(content)
    shares = "recall_at_ratio_precision", "matching_score_at_ratio_precision"
    for name in (area, tables.aligned_counterpart(area), *shares):
        line, ours = best_baseline(content, name), content.figures.get(f"{OURS}.{name}")
        found[name] = ours
        if line is not None and ours is not None and line["value"] is not None:
            found.update({f"{name}_best_baseline": ours - line["value"], f"{name}_difference": line["value"]})
    for name in ("precision", "recall", "matching_score"):
        found[name] = content.figures.get(f"{OURS}.{name}")
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
        return f"Too few {content.unit} to tell ({line.get('clusters', 0)} of {tables.LEAST_CLUSTERS})"
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
    """What an MLflow run says of itself, in Markdown: verdict, a picture from its artifacts in `folder`, table."""
    lines = [" ".join(verdict(content)), f"{content.title}; {' '.join(content.notes)}"]
    if content.pictures:
        name = content.pictures[len(content.pictures) // 2].name
        place = f"get-artifact?path={folder}/pictures/{name}.png&run_uuid={run_id}"
        lines.append(f"![{name}: ours above, the ratio test below; right green, wrong red]({place})")
    names = [name for own in tables.columns_of(content.figures).values() for name in own]
    shown = tables.foremost(names)
    heads = ["", "pairs", *(tables.SHORT.get(name) or tables.figure_title(name) for name in shown), "unrelated"]
    rows = [heads, ["---"] * len(heads)]
    for matcher in tables.matchers_in(content.figures):
        wrong = unrelated(content.figures, matcher)
        cells = [tables.percent(content.figures.get(f"{matcher}.{name}")) for name in shown]
        cells += [f"{wrong[0]:.1f}" if wrong else "-"]
        rows.append([tables.title(matcher), str(content.figures[f"{matcher}.pairs"]), *cells])
    lines.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    lines.append(
        f"Figures {tables.notes(content.figures)[0]}; unrelated: matches for photographs with nothing in common. "
        f"All figures: `{folder}/matchers.csv`; pictures and curves: `{folder}/index.html`."
    )
    return "\n\n".join(lines)
