"""Figures by how hard the pairs are: where the matcher wins, where it loses, and why a pair failed."""

from __future__ import annotations

import math
from typing import Dict, List, Sequence, Tuple

from pipeline.evaluation.matchers import OURS
from pipeline.evaluation.scoring import Row, estimators_of
from pipeline.evaluation.summary import figures_of

COMPARED = (OURS, "ratio_test")
BINS: Dict[str, Tuple[float, ...]] = {  # condition -> edges; a pair falls into low <= value < high
    "rotation_deg": (0, 15, 30, 60, 120, 181),
    "scale": (1, 1.25, 1.6, 2.2, 3, math.inf),
    "tilt": (1, 1.2, 1.5, 2, 3, math.inf),
    "perspective": (1, 1.5, 2.5, 5, 10, math.inf),
    "overlap": (0, 0.25, 0.5, 0.75, 1.01),
    "keypoints": (0, 64, 128, 256, 512, 1024, math.inf),
}


def conditions(row: Row) -> Dict[str, float]:
    """What makes a pair hard; keypoints: of the poorer view."""
    return {**row.conditions, "keypoints": min(row.keypoints0, row.keypoints1)}


def by_condition(rows: Sequence[Row]) -> List[Dict[str, object]]:
    """One line per condition and bin that holds a pair: condition, from, below, pairs, figures of both matchers."""
    lines = []
    for condition, edges in BINS.items():
        for low, high in zip(edges, edges[1:]):
            inside = [row for row in rows if low <= conditions(row).get(condition, math.nan) < high]
            if inside:
                lines.append(
                    line_of(condition, f"{low:g} ..{'' if math.isinf(high) else f' {high:g}'}", inside)
                )
    return lines


def line_of(condition: str, level: str, rows: Sequence[Row]) -> Dict[str, object]:
    """One line of robustness.csv."""
    line: Dict[str, object] = {"condition": condition, "level": level}
    shown = ["precision", "recall", *(f"auc_{name}_5" for name in estimators_of(rows)[:2])]
    for matcher in COMPARED:
        figures = figures_of([row for row in rows if row.matcher == matcher])
        line.setdefault("pairs", figures["pairs"])
        line.setdefault("recall_pairs", figures["recall_pairs"])
        line.update({f"{matcher}.{name}": figures[name] for name in shown})
    return line


def explanation(row: Row, limit_px: float = 3.0) -> str:
    """In words, what stood in the way of a pair whose error is above `limit_px`; empty for the others."""
    if row.error <= limit_px:
        return ""
    found = conditions(row)
    reasons = [
        (found["keypoints"] < 60, f"one view has only {found['keypoints']:.0f} keypoints"),
        (row.counts.truth < 20, f"only {row.counts.truth} keypoints are found again in the other view"),
        (
            found.get("overlap", 1) < 0.35,
            f"the views share only {100 * found.get('overlap', 1):.0f} % of image 0",
        ),
        (found.get("scale", 1) > 2, f"the scale changes {found.get('scale', 1):.1f} times"),
        (found.get("rotation_deg", 0) > 40, f"the view turns by {found.get('rotation_deg', 0):.0f} degrees"),
        (
            found.get("tilt", 1) > 1.8,
            f"the view is compressed {found.get('tilt', 1):.1f} times in one direction",
        ),
        (found.get("perspective", 1) > 4, "the perspective is strong"),
        (row.counts.matches < 8, f"only {row.counts.matches} matches were sure enough"),
        (row.counts.precision < 0.5, f"{100 * (1 - row.counts.precision):.0f} % of the matches are wrong"),
    ]
    said = [text for holds, text in reasons if holds]
    if not said:
        return "The matches lie too close together or too unevenly for an exact homography."
    return "Why it failed: " + "; ".join(said) + "."
