"""Comparison of a model with another one that was evaluated earlier, by their pairs.csv."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from pipeline.bootstrap import MIN_CLUSTERS, Clusters, auc_by_pair

# rows of pairs.csv
OURS = "superglue"
NEAREST = "nn"
LIMIT = 5  # px, of the AUC that decides


def better_than(ours: Path, theirs: Optional[Path]) -> Tuple[bool, str]:
    """Whether the first model is better, and why. theirs: None for a model that was never
    evaluated.

    Better: the 95 % interval of the difference of AUC@5 on the same pairs is above 0, with enough
    photographs.
    """
    if theirs is None:
        return True, "it was never evaluated"
    rows, baseline = read(ours)
    their_rows, their_baseline = read(theirs)
    if baseline != their_baseline:  # the same keypoints give the same nearest neighbours
        return False, "it was evaluated on other pairs"
    error = next(name for name in rows[0] if name.startswith("error_"))
    areas = [
        auc_by_pair([float(row[error]) for row in model], LIMIT) for model in (rows, their_rows)
    ]
    clusters = Clusters([row["scene"] for row in rows])
    difference = clusters.mean(areas[0] - areas[1]).line()
    if difference["low"] is None:
        return False, "one photograph is not enough"
    value, low, high = (f"{100 * difference[name]:+.1f}" for name in ("value", "low", "high"))
    interval = (
        f"95 % interval {low} .. {high}, {difference['pairs']} pairs of {clusters.count} scenes"
    )
    better = difference["low"] > 0 and clusters.count >= MIN_CLUSTERS
    return better, f"AUC@{LIMIT} {value} points, {interval}"


def read(path: Path) -> List[List[Dict[str, str]]]:
    """The rows of our matcher and of the nearest neighbours in a pairs.csv."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [[row for row in rows if row["matcher"] == name] for name in (OURS, NEAREST)]
