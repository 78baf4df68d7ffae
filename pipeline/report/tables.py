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
SHORT = {  # figures that are no AUC, in the order of the columns
    "precision": "P",
    "recall": "R",
    "matching_score": "MS",
    "recall_at_ratio_precision": "R@P",
    "precision_at_ratio_recall": "P@R",
    "matching_score_at_ratio_precision": "MS@P",
    "precision_at_ratio_matching_score": "P@MS",
}
LONG = {
    "recall_at_ratio_precision": "recall at the ratio test's precision",
    "precision_at_ratio_recall": "precision at the ratio test's recall",
    "matching_score_at_ratio_precision": "matching score at the ratio test's precision",
    "precision_at_ratio_matching_score": "precision at the ratio test's matching score",
}
ALIGNED = "_aligned"  # behind the estimator's name in figures of aligned matches
DETECTED, MOVED = "as detected", "aligned"  # what stands above the two parts of a table
POSES = ("AUC POSE", "AUC REFINED")
LEAST_PAIRS = 20  # of fewer a figure says too little to be judged
FEW = f"* fewer than {LEAST_PAIRS} pairs: too few to judge by"


def percent(value: Optional[float]) -> str:
    """0.5367 -> '53.7'; '-' where there is no figure."""
    return "-" if value is None else f"{100 * value:.1f}"


def matchers_in(figures: Mapping[str, Optional[float]]) -> List[str]:
    """Names of the matchers with figures, in the order they appear."""
    return [name[: -len(".pairs")] for name in figures if name.endswith(".pairs")]


def title(matcher: str) -> str:
    """A matcher's name for people."""
    return TITLES.get(matcher, matcher)


def points(value: Optional[float]) -> str:
    """A difference, 0.0123 -> '+1.2'; '-' where there is none."""
    return "-" if value is None else f"{100 * value:+.1f}"


def figure_title(name: str) -> str:
    """auc_ransac_3 -> 'AUC@3 RANSAC', auc_ransac_aligned_3 -> 'AUC@3 RANSAC aligned'; other names as words."""
    kind, _, rest = name.partition("_")
    estimator, _, pixels = rest.rpartition("_")
    return f"AUC@{pixels} {estimator_title(estimator)}" if kind == "auc" else LONG.get(name, name.replace("_", " "))


def estimator_title(estimator: str) -> str:
    """ransac -> 'RANSAC', ransac_aligned -> 'RANSAC aligned'."""
    plain, moved, _ = estimator.partition(ALIGNED)
    return f"{plain.upper()} {MOVED}" if moved else plain.upper()


def aligned_counterpart(name: str) -> str:
    """auc_ransac_3 -> 'auc_ransac_aligned_3'; '' for what is no area or is aligned already."""
    start, _, limit = name.rpartition("_")
    return f"{start}{ALIGNED}_{limit}" if name.startswith("auc_") and not start.endswith(ALIGNED) else ""


def aligned(rows: Sequence[Sequence[str]]) -> List[str]:
    """Lines with columns of one width: the first to the left, the others to the right."""
    first, *widths = (max(map(len, column)) for column in zip(*rows))
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows]


def lines_by_matcher(figures: Mapping[str, Optional[float]]) -> List[Dict[str, object]]:
    """Flat names the other way round: one line per matcher."""
    lines: Dict[str, Dict[str, object]] = {}
    for name, value in figures.items():
        matcher, _, figure = name.partition(".")
        lines.setdefault(matcher, {"matcher": matcher})[figure] = value
    return list(lines.values())


def columns_of(figures: Iterable[str]) -> Dict[str, List[str]]:
    """Names of the figures a table shows, under what stands above them: nothing, then each estimator's areas.

    Areas of aligned matches are not among them: see `aligned_counterpart`.
    """
    known = dict.fromkeys(name.rpartition(".")[2] for name in figures)
    groups: Dict[str, List[str]] = {"": [name for name in SHORT if name in known]}
    for name in known:
        if aligned_counterpart(name):
            groups.setdefault(f"AUC {name[len('auc_') :].rpartition('_')[0].upper()}", []).append(name)
    return groups


def column_groups(names: Sequence[str]) -> List[Tuple[str, List[Tuple[str, str]]]]:
    """Tables narrow enough for a page: a heading, then each figure with what stands above its column.

    What is found first, then each estimator's areas, as detected and aligned.
    """
    groups = []
    for head, own in columns_of(names).items():
        if not head:
            groups.append(("Matches", [(name, figure_title(name)) for name in own]))
            continue
        moved = [aligned_counterpart(name) for name in own]
        for title_of, shown in ((head, own), (f"{head}, matches {MOVED} by the pixels", moved)):
            areas = [(name, f"@{name.rpartition('_')[2]}") for name in shown if name in names]
            groups += [(title_of, areas)] if areas else []
    return groups


def comparison(figures: Mapping[str, Optional[float]]) -> str:
    """The table every evaluation ends with: one line per matcher, percentages beside the number of pairs.

    Where matches were aligned, the areas of these stand below in the same columns.
    """
    groups, matchers = columns_of(figures), matchers_in(figures)
    names = [name for own in groups.values() for name in own]
    moved = [aligned_counterpart(name) for name in names]
    both = any(f"{matcher}.{name}" in figures for matcher in matchers for name in moved)
    heads = [SHORT.get(name) or f"@{name.rpartition('_')[2]}" for name in names]
    rows = [[DETECTED if both else "", "pairs", "matches", *heads]]
    for matcher in matchers:
        matches = figures.get(f"{matcher}.matches")
        counts = [str(figures[f"{matcher}.pairs"]), "-" if matches is None else f"{matches:.0f}"]
        rows.append([title(matcher), *counts, *(percent(figures.get(f"{matcher}.{name}")) for name in names)])
    below = [[MOVED, "", "", *(head if name else "" for head, name in zip(heads, moved))]]
    for matcher in matchers:
        cells = (percent(figures.get(f"{matcher}.{name}")) if name else "" for name in moved)
        below.append([title(matcher), "", "", *cells])
    lines = aligned(rows + below) if both else aligned(rows)
    lines[len(rows) : len(rows)] = [""] if both else []
    starts = [found.start() for found in re.finditer(r"\S+", lines[0])][-len(names) :]  # after pairs and matches
    above = ""
    for head, own in groups.items():
        above = above.ljust(starts[names.index(own[0])]) + f"{head} " if head else above
    return "\n".join([above.rstrip(), *lines, *notes(figures)])


def notes(figures: Mapping[str, Optional[float]]) -> List[str]:
    """What stands below the table: what its columns are, and which matches they count."""
    groups, matchers = columns_of(figures), matchers_in(figures)
    said = [f"{SHORT[name]}: {figure_title(name)}" for name in groups[""] if name not in LONG]
    for head, own in list(groups.items())[1:]:
        limits = ", ".join(name.rpartition("_")[2] for name in own)
        of = f"pose error up to {limits} degrees" if head in POSES else f"mean corner error up to {limits} px"
        said.append(f"AUC of the {of}")
    lines = ["in %; " + "; ".join(dict.fromkeys(said))]
    if any(ALIGNED in name for name in figures):
        lines.append(f"{MOVED}: all matchers' matches moved by the pixels around them; the rest is {DETECTED}")
    stated = {title(name): figures.get(f"{name}.threshold") for name in matchers}
    stated = {name: f"{value:g}" for name, value in stated.items() if value is not None}
    if stated:
        one = len(set(stated.values())) == 1
        above = next(iter(stated.values())) if one else ", ".join(" ".join(own) for own in stated.items())
        lines.append(f"a network's matches have a confidence above {above}")
    if any(name in LONG for name in groups[""]):
        said = ", ".join(f"{SHORT[name]}: {LONG[name]}" for name in LONG if name in groups[""])
        lines.append(f"{said}, where every threshold is tried")
    counts = [(figures.get(f"{name}.recall_pairs"), figures[f"{name}.pairs"]) for name in matchers]
    for asked, pairs in dict.fromkeys(counts):
        if asked not in (None, pairs):
            lines.append(f"recall is over {asked} of {pairs} pairs: the others have no true match")
    return lines


def unrelated(figures: Mapping[str, Optional[float]]) -> List[str]:
    """A table of what each matcher returns for photographs with nothing in common; nothing where it was not asked."""
    names = ("unrelated_matches", "unrelated_matches_p95")
    matchers = [name for name in matchers_in(figures) if figures.get(f"{name}.{names[0]}") is not None]
    if not matchers:
        return []
    pairs = figures[f"{matchers[0]}.unrelated_pairs"]
    rows = [[f"matches on {pairs} pairs with nothing in common", "mean", "95th percentile"]]
    rows += [[title(name), *(f"{figures[f'{name}.{kind}']:.1f}" for kind in names)] for name in matchers]
    return ["", *aligned(rows)]


def acceptance(figures: Mapping[str, Optional[float]]) -> List[str]:
    """What validation on rendered scenes chose, as a line; nothing where it was not asked."""
    of = {name: figures.get(f"superglue.{name}") for name in ("strict_threshold", "accept_pairs")}
    if None in of.values():
        return []
    near, apart, accepted, false = (
        figures[f"superglue.scene_{name}"] for name in ("pairs", "pairs_apart", "accepted", "false")
    )
    return [
        f"pairs of a scene are accepted by {of['accept_pairs']} matches above {of['strict_threshold']:g}: of "
        f"rendered ones {percent(accepted)} % of {near} that overlap, {percent(false)} % of {apart} of opposite sides"
    ]


def side_by_side(variants: Dict[str, Dict[str, Optional[float]]]) -> str:
    """Several evaluations in one table. variants: name -> the figures of each."""
    figures = {}
    for variant, own in variants.items():
        for name, value in own.items():
            matcher, _, figure = name.partition(".")
            figures[f"{variant}  {title(matcher)}.{figure}"] = value
    return comparison(figures)


def by_scene(lines: Sequence[Mapping[str, Any]]) -> str:
    """One line per sequence: AUC@3 by the first estimator, the same aligned, and precision of each matcher.

    lines: as in scenes.csv.
    """
    area = next(name for name in lines[0] if name.startswith("auc_") and name.endswith("_3"))
    names = [name for name in (area, aligned_counterpart(area), "precision") if name in lines[0]]
    scenes, matchers = (list(dict.fromkeys(str(line[key]) for line in lines)) for key in ("scene", "matcher"))
    found = {(str(line["scene"]), str(line["matcher"])): line for line in lines}
    heads = [figure_title(area), *([MOVED] if len(names) > 2 else []), "precision"]
    rows = [[" | ".join(heads), "pairs"] + [title(matcher) for matcher in matchers]]
    for scene in scenes:
        cells = [found[scene, matcher] for matcher in matchers]
        shares = [" | ".join(percent(cell[name]) for name in names) for cell in cells]
        rows.append([scene, marked(int(cells[0]["pairs"])), *shares])
    few = any(int(line["pairs"]) < LEAST_PAIRS for line in lines)
    return "\n".join([*aligned(rows), *([FEW] if few else [])])


def marked(pairs: int) -> str:
    """A number of pairs, with a star where they are few."""
    return f"{pairs}*" if pairs < LEAST_PAIRS else str(pairs)


def foremost(names: Sequence[str]) -> List[str]:
    """Of these figures those to show first: all but areas, of the first two estimators AUC@5 and AUC@10 (20), of the
    first the same aligned."""
    estimators = list(columns_of(names).values())[1:3]
    areas = [[name for name in own if name.endswith("_5") or name == own[-1]] for own in estimators]
    shown = set(SHORT).union(*areas, *([map(aligned_counterpart, areas[0])] if areas else []))
    return [name for name in names if name in shown]


def differences(lines: Sequence[Mapping[str, Any]]) -> str:
    """Ours minus the best baseline with its 95 % interval, in percentage points. lines: of differences.csv."""
    rows = [["ours minus the best baseline", "points", "95 % interval", "verdict", "best baseline"]]
    first = foremost([line["figure"] for line in lines])
    for line in lines:
        span = "-" if line["low"] is None else f"{points(line['low'])} .. {points(line['high'])}"
        row = [figure_title(line["figure"]), points(line["value"]), span, line["verdict"], title(line["baseline"])]
        rows += [row] if line["figure"] in first else []
    return "\n".join(aligned(rows))
