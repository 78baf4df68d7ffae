"""Plain-text tables of matchers side by side."""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from pipeline.report.rows import ALIGNED, Measure, Row, Table, title

SHORT = {  # all metrics but the AUC, in the order of the columns
    "precision": "P",
    "recall": "R",
    "matching_score": "MS",
    "recall_at_ratio_precision": "R@P",
    "precision_at_ratio_recall": "P@R",
    "matching_score_at_ratio_precision": "MS@P",
    "precision_at_ratio_matching_score": "P@MS",
}
PAIRS = Measure("pairs")
NEGATIVES = Measure("negative_matches"), Measure("negative_matches_p95")
POSES = ("pose", "refined")  # estimators
ABREAST = 3  # estimators in one table, within 100 columns
WORDS = {
    "ransac": "RANSAC: cv2.findHomography with UsacParams, 3 px; refined by least squares",
    "dlt": "DLT: least squares over all matches, weighted by their confidence",
    "surest": "SUREST: least squares over the surest matches, with equal weights",
}
MIN_PAIRS = 20  # tables mark metrics of fewer pairs
FEW = f"* fewer than {MIN_PAIRS} pairs: too few to judge by"


def percent(value: Optional[float]) -> str:
    """0.5367 -> '53.7'; None -> '-'."""
    return "-" if value is None else f"{100 * value:.1f}"


def points(value: Optional[float]) -> str:
    """A difference: 0.0123 -> '+1.2'; None -> '-'."""
    return "-" if value is None else f"{100 * value:+.1f}"


def heading(measure: Measure) -> str:
    """The heading of its column: `R@P`; of an AUC its title."""
    return SHORT.get(measure.metric, measure.title)


def align(rows: Sequence[Sequence[str]]) -> List[str]:
    """Lines with aligned columns: the first to the left, the others to the right."""
    first, *widths = (max(map(len, column)) for column in zip(*rows))
    return [
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows
    ]


def columns_of(measures: Iterable[Measure]) -> Dict[str, List[Measure]]:
    """The measures in a table by estimator, first those without one; no AUC of aligned matches."""
    known = dict.fromkeys(measures)
    groups = {"": [Measure(name) for name in SHORT if Measure(name) in known]}
    for measure in known:
        if measure.metric == "auc" and not measure.aligned:
            groups.setdefault(measure.estimator, []).append(measure)
    return groups


def measures_of(table: Table) -> List[Measure]:
    """All measures of a table, in order of appearance."""
    return list(dict.fromkeys(measure for values in table.values() for measure in values))


def move(measures: Iterable[Measure]) -> List[Measure]:
    """The same measures of aligned matches."""
    return [measure._replace(aligned=True) for measure in measures]


def comparison(table: Table) -> str:
    """The tables of an evaluation, a line per matcher: matches, then AUC of ABREAST estimators."""
    groups = columns_of(measures_of(table))
    first = groups.pop("")
    rows = [["", "pairs", "matches", *map(heading, first)]]
    for matcher, values in table.items():
        matches = values.get(Measure("matches"))
        counts = [str(values[PAIRS]), "-" if matches is None else f"{matches:.0f}"]
        rows.append([title(matcher), *counts, *(percent(values.get(each)) for each in first)])
    lines = align(rows)
    names = list(groups)
    for start in range(0, len(names), ABREAST):
        shown = [groups[name] for name in names[start : start + ABREAST]]
        lines += ["", *area_table(table, shown)]
    return "\n".join([*lines, *notes(table)])


def area_table(table: Table, groups: Sequence[Sequence[Measure]]) -> List[str]:
    """The AUC of some estimators; those of aligned matches, if any, below in the same columns."""
    areas = [measure for group in groups for measure in group]
    both = any(measure in values for values in table.values() for measure in move(areas))
    rows = []
    parts = (("as detected", areas), (ALIGNED, move(areas))) if both else (("", areas),)
    for head, shown in parts:
        rows.append([head, *(f"@{measure.limit}" for measure in shown)])
        for matcher, values in table.items():
            rows.append([title(matcher), *(percent(values.get(each)) for each in shown)])
    lines = align(rows)
    starts = [word.start() for word in re.finditer("@", lines[0])]
    above = ""
    for group in groups:
        above = above.ljust(starts[areas.index(group[0])]) + f"AUC {group[0].method} "
    if both:
        lines.insert(len(table) + 1, "")
    return [above.rstrip(), *lines]


def notes(table: Table) -> List[str]:
    """Notes below the table: the meaning of its columns, and which matches and pairs they count."""
    groups = columns_of(measures_of(table))
    first = groups.pop("")
    swept = [measure for measure in first if "_at_" in measure.metric]
    columns = [f"{heading(each)}: {each.title}" for each in first if each not in swept]
    for estimator, group in groups.items():
        limits = ", ".join(str(measure.limit) for measure in group)
        error, unit = ("pose", "degrees") if estimator in POSES else ("mean corner", "px")
        columns.append(f"AUC of the {error} error up to {limits} {unit}")
    lines = ["in %; " + "; ".join(dict.fromkeys(columns))]
    lines += [words for estimator, words in WORDS.items() if estimator in groups]
    if any(measure.aligned for measure in measures_of(table)):
        lines.append(f"{ALIGNED}: the matches of every matcher moved by the pixels around them")
    limits = {title(name): values.get(Measure("threshold")) for name, values in table.items()}
    above = {name: f"{limit:g}" for name, limit in limits.items() if limit is not None}
    if above:
        several = len(set(above.values())) > 1
        text = ", ".join(map(" ".join, above.items())) if several else min(above.values())
        lines.append(f"a network's matches have a confidence above {text}")
    if swept:
        words = ", ".join(f"{heading(measure)}: {measure.title}" for measure in swept)
        lines.append(f"{words}, where every threshold is tried")
    counts = {(v.get(Measure("recall_pairs")), v[PAIRS]): None for v in table.values()}
    lines += [
        f"recall is over {known} of {pairs} pairs: the others have no true match"
        for known, pairs in counts
        if known not in (None, pairs)
    ]
    return lines


def negative_matches(table: Table) -> Dict[str, List[Any]]:
    """Matches on negative pairs by matcher: mean and 95th percentile."""
    return {
        name: [values[measure] for measure in NEGATIVES]
        for name, values in table.items()
        if NEGATIVES[0] in values
    }


def negatives(table: Table) -> str:
    """A table of the number of matches on negative pairs; "" without such pairs."""
    found = negative_matches(table)
    if not found:
        return ""
    pairs = min(table[name][Measure("negative_pairs")] or 0 for name in found)
    rows = [[f"matches on {pairs} pairs with nothing in common", "mean", "95th percentile"]]
    rows += [[title(name), *(f"{value:.1f}" for value in each)] for name, each in found.items()]
    return "\n".join(align(rows))


def side_by_side(variants: Mapping[str, Table]) -> str:
    """Several evaluations in one table, by name."""
    return comparison(
        {
            f"{name}  {title(matcher)}": values
            for name, table in variants.items()
            for matcher, values in table.items()
        }
    )


def by_scene(scenes: Sequence[Tuple[str, Table]]) -> str:
    """One line per sequence: AUC@3 of the first estimator."""
    matchers = list(scenes[0][1])
    measures = measures_of(scenes[0][1])
    area = next(measure for measure in measures if measure.metric == "auc" and measure.limit == 3)
    rows = [[area.title, "pairs", *map(title, matchers)]]
    for scene, table in scenes:
        pairs = int(table[matchers[0]][PAIRS] or 0)
        rows.append([scene, mark(pairs), *(percent(table[name][area]) for name in matchers)])
    return "\n".join([*align(rows), *([FEW] if "*" in "".join(row[1] for row in rows) else [])])


def mark(pairs: int) -> str:
    """A number of pairs, with a star below MIN_PAIRS."""
    return f"{pairs}*" if pairs < MIN_PAIRS else str(pairs)


def foremost(rows: Sequence[Row]) -> List[Row]:
    """The differences to show first: all of SHORT, and AUC@5."""
    return [row for row in rows if row.measure.metric in SHORT or row.measure.limit == 5]


def span(row: Row) -> str:
    """The 95 % interval of a row: `+0.7 .. +2.4`."""
    return "-" if row.low is None else f"{points(row.low)} .. {points(row.high)}"


def differences(rows: Sequence[Row]) -> str:
    """Ours minus the best baseline with its 95 % interval, in percentage points."""
    lines = [
        ["ours minus the best baseline", "points", "95 % interval", "verdict", "best baseline"]
    ]
    for row in foremost(rows):
        words = [row.measure.title, points(row.value), span(row), row.verdict, title(row.baseline)]
        lines.append(words)
    return "\n".join(align(lines))
