"""Plain-text tables of matchers side by side, from the flat names of metrics.json."""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Sequence

TITLES = {
    "superglue": "SuperGlue (ours)",
    "nn": "nearest neighbour",
    "mutual_nn": "mutual nearest neighbour",
    "ratio_test": "ratio test, mutual",
    "lightglue": "LightGlue",
}
AUC_PIXELS = (1, 3, 5, 10)


def percent(value: Optional[float]) -> str:
    """0.5367 -> '53.7'; '-' where there is no figure."""
    return "-" if value is None else f"{100 * value:.1f}"


def matchers_in(figures: Dict[str, Optional[float]]) -> List[str]:
    """Names of the matchers with figures, in the order they appear."""
    return [name[: -len(".pairs")] for name in figures if name.endswith(".pairs")]


def title(matcher: str) -> str:
    """A matcher's name for people."""
    return TITLES.get(matcher, matcher)


def figure_title(name: str) -> str:
    """auc_ransac_3 -> 'AUC@3 RANSAC'; other names as they are."""
    kind, _, rest = name.partition("_")
    estimator, _, pixels = rest.rpartition("_")
    return f"AUC@{pixels} {estimator.upper()}" if kind == "auc" else name


def aligned(rows: Sequence[Sequence[str]]) -> List[str]:
    """Lines with columns of one width: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def estimators_in(figures: Dict[str, Optional[float]]) -> List[str]:
    """Names of the estimators with an AUC, in the order they appear."""
    return list(
        dict.fromkeys(name.split(".auc_")[1].rpartition("_")[0] for name in figures if ".auc_" in name)
    )


def comparison(figures: Dict[str, Optional[float]]) -> str:
    """The table every evaluation ends with: one line per matcher, percentages beside the number of pairs."""
    estimators = estimators_in(figures)
    names = ["precision", "recall"] + [f"auc_{kind}_{pixels}" for kind in estimators for pixels in AUC_PIXELS]
    rows = [["", "pairs", "matches", "P", "R", *[f"@{pixels}" for _ in estimators for pixels in AUC_PIXELS]]]
    for matcher in matchers_in(figures):
        matches = figures.get(f"{matcher}.matches")
        rows.append(
            [title(matcher), str(figures[f"{matcher}.pairs"]), "-" if matches is None else f"{matches:.0f}"]
            + [percent(figures.get(f"{matcher}.{name}")) for name in names]
        )
    lines = aligned(rows)
    above = ""
    for kind, start in zip(estimators, re.finditer(r"@1\b", lines[0])):
        above = above.ljust(start.start()) + f"AUC {kind.upper()} "
    notes = [
        "in %; P, R: precision, recall; AUC of the mean corner error up to 1, 3, 5, 10 px",
        *recall_notes(figures),
    ]
    return "\n".join([above.rstrip(), *lines, *notes])


def recall_notes(figures: Dict[str, Optional[float]]) -> List[str]:
    """How many pairs the recall is a mean of, where that is not all of them."""
    found = {}
    for matcher in matchers_in(figures):
        pairs, asked = figures[f"{matcher}.pairs"], figures.get(f"{matcher}.recall_pairs")
        if asked is not None and asked != pairs:
            found[asked, pairs] = f"recall is over {asked} of {pairs} pairs: the others have no true match"
    return list(found.values())


def side_by_side(variants: Dict[str, Dict[str, Optional[float]]]) -> str:
    """Several evaluations in one table. variants: name -> the figures of each."""
    figures = {}
    for variant, own in variants.items():
        for matcher in matchers_in(own):
            start = f"{matcher}."
            names = (name[len(start) :] for name in own if name.startswith(start))
            figures.update(
                {
                    f"{variant}  {title(matcher)}.{name}": own[start + name]
                    for name in names
                    if "." not in name
                }
            )
    return comparison(figures)


def pose_comparison(figures: Dict[str, float], degrees: Sequence[int]) -> str:
    """The same for relative poses: AUC of the pose error, precision (P) and matching score (MS)."""
    names = [f"auc_pose_{limit}" for limit in degrees] + ["precision", "matching_score"]
    rows = [["", "pairs", *[f"AUC@{limit} deg" for limit in degrees], "P", "MS"]]
    for matcher in matchers_in(figures):
        cells = [percent(figures[f"{matcher}.{name}"]) for name in names]
        rows.append([title(matcher), str(figures[f"{matcher}.pairs"]), *cells])
    return "\n".join(aligned(rows))


def by_scene(lines: Sequence[Dict[str, object]], matchers: Sequence[str]) -> str:
    """One line per sequence: AUC@3 by the first estimator and precision of each matcher. lines: as in scenes.csv."""
    area = next(name for name in lines[0] if name.startswith("auc_") and name.endswith("_3"))
    scenes = list(dict.fromkeys(str(line["scene"]) for line in lines))
    found = {(str(line["scene"]), str(line["matcher"])): line for line in lines}
    rows = [[f"{figure_title(area)} | precision", "pairs"] + [title(matcher) for matcher in matchers]]
    for scene in scenes:
        cells = [found[scene, matcher] for matcher in matchers]
        rows.append(
            [scene, str(cells[0]["pairs"])]
            + [f"{percent(cell[area])} | {percent(cell['precision'])}" for cell in cells]
        )
    return "\n".join(aligned(rows))


def foremost(names: Sequence[str]) -> List[str]:
    """Of these figures those to show first: precision, recall, and two areas of each of the first two estimators.

    The second and the last, such as AUC@3 and AUC@10.
    """
    areas: Dict[str, List[str]] = {}
    for name in names:
        if name.startswith("auc_"):
            areas.setdefault(name.rpartition("_")[0], []).append(name)
    shown = {"precision", "recall"}.union(*([own[1], own[-1]] for own in list(areas.values())[:2]))
    return [name for name in names if name in shown]


def differences(lines: Sequence[Dict[str, object]]) -> str:
    """Ours minus the best baseline with its 95 % interval, in percentage points. lines: of differences.csv."""
    rows = [["ours minus the best baseline", "points", "95 % interval", "", "best baseline"]]
    first = foremost([str(line["figure"]) for line in lines])
    for line in lines:
        if line["figure"] not in first:
            continue
        value, low, high = (line[name] for name in ("value", "low", "high"))
        shown = "-" if value is None else f"{100 * value:+.1f}"
        span = "-" if low is None or high is None else f"{100 * low:+.1f} .. {100 * high:+.1f}"
        rows.append(
            [
                figure_title(str(line["figure"])),
                shown,
                span,
                str(line["verdict"]),
                title(str(line["baseline"])),
            ]
        )
    return "\n".join(aligned(rows))
