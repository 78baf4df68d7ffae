"""Plain-text tables of matchers side by side, from the flat names of metrics.json."""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

TITLES = {
    "superglue": "SuperGlue (ours)",
    "superglue_scene": "SuperGlue, scenes",
    "nn": "nearest neighbour",
    "mutual_nn": "mutual nearest neighbour",
    "ratio_test": "ratio test, mutual",
    "lightglue": "LightGlue",
    "true_matches": "true matches (bound)",
}
SHORT = {  # all metrics but the AUC, in the order of the columns
    "precision": "P",
    "recall": "R",
    "matching_score": "MS",
    "recall_at_ratio_precision": "R@P",
    "precision_at_ratio_recall": "P@R",
    "matching_score_at_ratio_precision": "MS@P",
    "precision_at_ratio_matching_score": "P@MS",
}
AT_RATIO = "_at_ratio_"  # in metrics where every threshold is tried: "at the ratio test's"
ALIGNED = "_aligned"  # suffix of the estimator's name in metrics of aligned matches
# headings of the two parts of a table
DETECTED = "as detected"
MOVED = "aligned"
POSES = ("AUC POSE", "AUC REFINED")
ABREAST = 3  # estimators in one table, within 100 columns
WORDS = {
    "AUC RANSAC": "RANSAC: cv2.findHomography with UsacParams, 3 px; refined by least squares",
    "AUC DLT": "DLT: least squares over all matches, weighted by their confidence",
    "AUC SUREST": "SUREST: least squares over the surest matches, with equal weights",
}
MIN_PAIRS = 20  # tables mark metrics of fewer pairs
FEW = f"* fewer than {MIN_PAIRS} pairs: too few to judge by"


def percent(value: Optional[float]) -> str:
    """0.5367 -> '53.7'; None -> '-'."""
    return "-" if value is None else f"{100 * value:.1f}"


def matchers_in(metrics: Mapping[str, Optional[float]]) -> List[str]:
    """Names of the matchers with metrics, in the order they appear."""
    return [name[: -len(".pairs")] for name in metrics if name.endswith(".pairs")]


def title(matcher: str) -> str:
    """A matcher's display name."""
    return TITLES.get(matcher, matcher)


def points(value: Optional[float]) -> str:
    """A difference: 0.0123 -> '+1.2'; None -> '-'."""
    return "-" if value is None else f"{100 * value:+.1f}"


def metric_title(name: str) -> str:
    """auc_ransac_3 -> 'AUC@3 RANSAC', auc_ransac_aligned_3 -> 'AUC@3 RANSAC aligned'; other names
    as words.
    """
    kind, _, rest = name.partition("_")
    estimator, _, pixels = rest.rpartition("_")
    words = name.replace(AT_RATIO, " at the ratio test's ").replace("_", " ")
    return f"AUC@{pixels} {estimator_title(estimator)}" if kind == "auc" else words


def estimator_title(estimator: str) -> str:
    """ransac -> 'RANSAC', ransac_aligned -> 'RANSAC aligned'."""
    plain, moved, _ = estimator.partition(ALIGNED)
    return f"{plain.upper()} {MOVED}" if moved else plain.upper()


def aligned_counterpart(name: str) -> str:
    """auc_ransac_3 -> 'auc_ransac_aligned_3'; '' for other metrics and for aligned ones."""
    start, _, limit = name.rpartition("_")
    return (
        f"{start}{ALIGNED}_{limit}"
        if name.startswith("auc_") and not start.endswith(ALIGNED)
        else ""
    )


def aligned(rows: Sequence[Sequence[str]]) -> List[str]:
    """Lines with aligned columns: the first to the left, the others to the right."""
    first, *widths = (max(map(len, column)) for column in zip(*rows))
    return [
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows
    ]


def lines_by_matcher(metrics: Mapping[str, Optional[float]]) -> List[Dict[str, object]]:
    """One line per matcher from flat names."""
    lines: Dict[str, Dict[str, object]] = {}
    for name, value in metrics.items():
        matcher, _, metric = name.partition(".")
        lines.setdefault(matcher, {"matcher": matcher})[metric] = value
    return list(lines.values())


def columns_of(metrics: Iterable[str]) -> Dict[str, List[str]]:
    """Names of the metrics in a table by heading: "", then one for the AUC of each estimator.

    AUC of aligned matches are not included: see `aligned_counterpart`.
    """
    known = dict.fromkeys(name.rpartition(".")[2] for name in metrics)
    groups: Dict[str, List[str]] = {"": [name for name in SHORT if name in known]}
    for name in known:
        if aligned_counterpart(name):
            groups.setdefault(f"AUC {name[len('auc_') :].rpartition('_')[0].upper()}", []).append(
                name
            )
    return groups


def column_groups(names: Sequence[str]) -> List[Tuple[str, List[Tuple[str, str]]]]:
    """Narrow tables for a page: heading, and (metric, column title) of each column.

    Precision and recall first, then the AUC of each estimator, as detected and aligned.
    """
    groups = []
    for head, metrics in columns_of(names).items():
        if not head:
            groups.append(("Matches", [(name, metric_title(name)) for name in metrics]))
            continue
        moved = [aligned_counterpart(name) for name in metrics]
        for title_of, shown in ((head, metrics), (f"{head}, matches {MOVED} by the pixels", moved)):
            areas = [(name, f"@{name.rpartition('_')[2]}") for name in shown if name in names]
            groups += [(title_of, areas)] if areas else []
    return groups


def comparison(metrics: Mapping[str, Optional[float]]) -> str:
    """The tables of an evaluation, a line per matcher: matches, then AUC of ABREAST estimators."""
    groups = columns_of(metrics)
    first = groups.pop("")
    rows = [["", "pairs", "matches", *(SHORT[name] for name in first)]]
    for matcher in matchers_in(metrics):
        matches = metrics.get(f"{matcher}.matches")
        counts = [str(metrics[f"{matcher}.pairs"]), "-" if matches is None else f"{matches:.0f}"]
        cells = [percent(metrics.get(f"{matcher}.{name}")) for name in first]
        rows.append([title(matcher), *counts, *cells])
    lines = aligned(rows)
    heads = list(groups)
    for start in range(0, len(heads), ABREAST):
        lines += [
            "",
            *areas(metrics, {head: groups[head] for head in heads[start : start + ABREAST]}),
        ]
    return "\n".join([*lines, *notes(metrics)])


def areas(metrics: Mapping[str, Optional[float]], groups: Mapping[str, Sequence[str]]) -> List[str]:
    """A table of the AUC of some estimators; those of aligned matches, if any, follow below in the
    same columns.

    groups: names of the metrics by heading.
    """
    names = [name for group in groups.values() for name in group]
    matchers = matchers_in(metrics)
    heads = [f"@{name.rpartition('_')[2]}" for name in names]
    moved = [aligned_counterpart(name) for name in names]
    both = any(f"{matcher}.{name}" in metrics for matcher in matchers for name in moved)
    rows = []
    for head, shown in ((DETECTED, names), (MOVED, moved)) if both else (("", names),):
        rows.append([head, *heads])
        for matcher in matchers:
            cells = (percent(metrics.get(f"{matcher}.{name}")) for name in shown)
            rows.append([title(matcher), *cells])
    lines = aligned(rows)
    starts = [word.start() for word in re.finditer(r"@", lines[0])]
    above = ""
    for head, group in groups.items():
        above = above.ljust(starts[names.index(group[0])]) + f"{head} "
    if both:
        lines.insert(len(matchers) + 1, "")
    return [above.rstrip(), *lines]


def notes(metrics: Mapping[str, Optional[float]]) -> List[str]:
    """Notes below the table: the meaning of its columns, and which matches and pairs they count."""
    groups = columns_of(metrics)
    matchers = matchers_in(metrics)
    columns = [
        f"{SHORT[name]}: {metric_title(name)}" for name in groups[""] if AT_RATIO not in name
    ]
    for head, group in list(groups.items())[1:]:
        limits = ", ".join(name.rpartition("_")[2] for name in group)
        error = (
            f"pose error up to {limits} degrees"
            if head in POSES
            else f"mean corner error up to {limits} px"
        )
        columns.append(f"AUC of the {error}")
    lines = ["in %; " + "; ".join(dict.fromkeys(columns))]
    lines += [words for head, words in WORDS.items() if head in groups]
    if any(ALIGNED in name for name in metrics):
        lines.append(f"{MOVED}: the matches of every matcher moved by the pixels around them")
    thresholds = {title(name): metrics.get(f"{name}.threshold") for name in matchers}
    thresholds = {name: f"{value:g}" for name, value in thresholds.items() if value is not None}
    if thresholds:
        equal = len(set(thresholds.values())) == 1
        above = (
            next(iter(thresholds.values()))
            if equal
            else ", ".join(map(" ".join, thresholds.items()))
        )
        lines.append(f"a network's matches have a confidence above {above}")
    swept = [f"{SHORT[name]}: {metric_title(name)}" for name in groups[""] if AT_RATIO in name]
    if swept:
        lines.append(f"{', '.join(swept)}, where every threshold is tried")
    counts = [(metrics.get(f"{name}.recall_pairs"), metrics[f"{name}.pairs"]) for name in matchers]
    for recall_pairs, pairs in dict.fromkeys(counts):
        if recall_pairs not in (None, pairs):
            lines.append(
                f"recall is over {recall_pairs} of {pairs} pairs: the others have no true match"
            )
    return lines


def negative_pairs(metrics: Mapping[str, Optional[float]]) -> List[str]:
    """A table of the number of matches on negative pairs; empty without such pairs."""
    names = ("unrelated_matches", "unrelated_matches_p95")
    matchers = [
        name for name in matchers_in(metrics) if metrics.get(f"{name}.{names[0]}") is not None
    ]
    if not matchers:
        return []
    pairs = metrics[f"{matchers[0]}.unrelated_pairs"]
    rows = [[f"matches on {pairs} pairs with nothing in common", "mean", "95th percentile"]]
    rows += [
        [title(name), *(f"{metrics[f'{name}.{kind}']:.1f}" for kind in names)] for name in matchers
    ]
    return ["", *aligned(rows)]


def side_by_side(variants: Dict[str, Dict[str, Optional[float]]]) -> str:
    """Several evaluations in one table. variants: name -> metrics."""
    metrics = {}
    for variant, values in variants.items():
        for name, value in values.items():
            matcher, _, metric = name.partition(".")
            metrics[f"{variant}  {title(matcher)}.{metric}"] = value
    return comparison(metrics)


def by_scene(lines: Sequence[Mapping[str, Any]]) -> str:
    """One line per sequence: AUC@3 by the first estimator, the same aligned, and precision of each
    matcher.

    lines: as in scenes.csv.
    """
    area = next(name for name in lines[0] if name.startswith("auc_") and name.endswith("_3"))
    names = [name for name in (area, aligned_counterpart(area), "precision") if name in lines[0]]
    scenes, matchers = (
        list(dict.fromkeys(str(line[key]) for line in lines)) for key in ("scene", "matcher")
    )
    by_cell = {(str(line["scene"]), str(line["matcher"])): line for line in lines}
    heads = [metric_title(area), *([MOVED] if len(names) > 2 else []), "precision"]
    rows = [[" | ".join(heads), "pairs"] + [title(matcher) for matcher in matchers]]
    for scene in scenes:
        cells = [by_cell[scene, matcher] for matcher in matchers]
        texts = [" | ".join(percent(cell[name]) for name in names) for cell in cells]
        rows.append([scene, marked(int(cells[0]["pairs"])), *texts])
    few = any(int(line["pairs"]) < MIN_PAIRS for line in lines)
    return "\n".join([*aligned(rows), *([FEW] if few else [])])


def marked(pairs: int) -> str:
    """A number of pairs, with a star below MIN_PAIRS."""
    return f"{pairs}*" if pairs < MIN_PAIRS else str(pairs)


def foremost(names: Sequence[str]) -> List[str]:
    """The metrics to show first: all of SHORT, AUC@5 and AUC@10 (20) of ABREAST estimators.

    Of the first estimator also those of aligned matches.
    """
    estimators = list(columns_of(names).values())[1 : ABREAST + 1]
    areas = [
        [name for name in group if name.endswith("_5") or name == group[-1]] for group in estimators
    ]
    shown = set(SHORT).union(*areas, *([map(aligned_counterpart, areas[0])] if areas else []))
    return [name for name in names if name in shown]


def differences(lines: Sequence[Mapping[str, Any]]) -> str:
    """Ours minus the best baseline with its 95 % interval, in percentage points. lines: of
    differences.csv.
    """
    rows = [["ours minus the best baseline", "points", "95 % interval", "verdict", "best baseline"]]
    first = foremost([line["figure"] for line in lines])
    for line in lines:
        span = "-" if line["low"] is None else f"{points(line['low'])} .. {points(line['high'])}"
        row = [
            metric_title(line["figure"]),
            points(line["value"]),
            span,
            line["verdict"],
            title(line["baseline"]),
        ]
        rows += [row] if line["figure"] in first else []
    return "\n".join(aligned(rows))
