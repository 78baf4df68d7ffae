"""From rows to figures: flat names for metrics.json, one line per sequence, lines of pairs.csv."""

from __future__ import annotations

import math
from typing import Dict, List, Optional, Sequence

import numpy as np

from pipeline.evaluation import metrics
from pipeline.evaluation.scoring import Row, estimators_of

AUC_PIXELS = (1, 3, 5, 10)
DIGITS = 6  # figures are written with so many decimals: beyond them lies the noise of float32 sums

Figures = Dict[str, Optional[float]]


def plain(value: float) -> Optional[float]:
    """A number JSON can hold: rounded; None where there is none (no pair, or an infinite median)."""
    if isinstance(value, (int, np.integer)):
        return int(value)
    return round(float(value), DIGITS) if math.isfinite(value) else None


def figures_of(rows: Sequence[Row]) -> Figures:
    """Means over the rows of one matcher, each beside its number of pairs where that is not all of them.

    precision, recall and AUC lie in 0..1; errors are pixels. The median error is over all pairs, None when
    half of them have no estimate; the mean error is over `estimated_*` pairs and says nothing about the rest.
    """
    precision, pairs = metrics.mean_finite([row.counts.precision for row in rows])
    recall, recall_pairs = metrics.mean_finite([row.counts.recall for row in rows])
    matches, _ = metrics.mean_finite([row.counts.matches for row in rows])
    figures: Dict[str, float] = {
        "pairs": pairs,
        "matches": matches,
        "precision": precision,
        "recall": recall,
        "recall_pairs": recall_pairs,
    }
    for estimator in estimators_of(rows):
        errors = [row.errors[estimator] for row in rows]
        for pixels in AUC_PIXELS:
            figures[f"auc_{estimator}_{pixels}"] = metrics.auc(errors, pixels)
        mean, estimated = metrics.mean_finite(errors)
        figures[f"mean_error_{estimator}"] = mean
        figures[f"estimated_{estimator}"] = estimated
        figures[f"median_error_{estimator}"] = float(np.median(errors)) if errors else math.nan
    return {name: plain(value) for name, value in figures.items()}


def summarize(rows: Sequence[Row], matchers: Sequence[str]) -> Figures:
    """Flat names for metrics.json: `superglue.auc_ransac_3`, `ratio_test.precision`, ..."""
    flat: Figures = {}
    for matcher in matchers:
        for name, value in figures_of([row for row in rows if row.matcher == matcher]).items():
            flat[f"{matcher}.{name}"] = value
    return flat


def by_matcher(figures: Figures) -> List[Dict[str, object]]:
    """Flat names the other way round: one line per matcher."""
    lines: Dict[str, Dict[str, object]] = {}
    for name, value in figures.items():
        matcher, _, figure = name.partition(".")
        lines.setdefault(matcher, {"matcher": matcher})[figure] = value
    return list(lines.values())


def by_scene(rows: Sequence[Row], matchers: Sequence[str]) -> List[Dict[str, object]]:
    """One line per scene (sequence or image) and matcher, scenes in their order of appearance."""
    groups: Dict[tuple, List[Row]] = {}
    for row in rows:
        groups.setdefault((row.scene, row.matcher), []).append(row)
    scenes = list(dict.fromkeys(row.scene for row in rows))
    return [
        {"scene": scene, "matcher": matcher, **figures_of(groups[scene, matcher])}
        for scene in scenes
        for matcher in matchers
    ]


def pair_line(row: Row) -> Dict[str, object]:
    """A line of pairs.csv: everything needed to make any figure again by hand. `inf` = no estimate."""
    line: Dict[str, object] = {
        "pair": row.pair,
        "scene": row.scene,
        "matcher": row.matcher,
        "keypoints0": row.keypoints0,
        "keypoints1": row.keypoints1,
        "matches": row.counts.matches,
        "correct": row.counts.correct,
        "true_matches": row.counts.truth,
        "found": row.counts.found,
        "precision": round(row.counts.precision, DIGITS),
        "recall": round(row.counts.recall, DIGITS) if row.counts.truth else "",
    }
    line.update({f"error_{name}": round(error, DIGITS) for name, error in row.errors.items()})
    line.update({name: round(value, DIGITS) for name, value in row.conditions.items()})
    return line
