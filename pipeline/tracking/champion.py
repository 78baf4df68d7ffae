"""Whether a model beats another one that was judged earlier: their pairs.csv, pair by pair."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from pipeline.bootstrap import LEAST_CLUSTERS, Clusters, auc_by_pair

OURS, NEAREST = "superglue", "nn"  # rows of pairs.csv
LIMIT = 5  # of the area that decides, in px


def better_than(ours: Path, theirs: Optional[Path]) -> Tuple[bool, str]:
    """Is the first model better, and why. theirs: None for a model that was never judged.

    Better: the 95 % interval of the difference of AUC@5 on the same pairs lies above 0, over enough photographs.
    """
    if theirs is None:
        return True, "that one was never evaluated"
    (own, own_baseline), (other, other_baseline) = read(ours), read(theirs)
    if own_baseline != other_baseline:  # the same keypoints give the same nearest neighbours
        return False, "that one was evaluated on other pairs"
    error = next(name for name in own[0] if name.startswith("error_"))
    areas = [auc_by_pair([float(row[error]) for row in rows], LIMIT) for rows in (own, other)]
    clusters = Clusters([row["scene"] for row in own])
    found = clusters.mean(areas[0] - areas[1]).line()
    if found["low"] is None:
        return False, "one photograph decides nothing"
    value, low, high = (f"{100 * found[name]:+.1f}" for name in ("value", "low", "high"))
    interval = f"95 % interval {low} .. {high}, {found['pairs']} pairs of {clusters.count} scenes"
    better = found["low"] > 0 and clusters.count >= LEAST_CLUSTERS
    return better, f"AUC@{LIMIT} {value} points, {interval}"


def read(path: Path) -> List[List[Dict[str, str]]]:
    """Lines of ours and of the nearest neighbours in a pairs.csv."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [[row for row in rows if row["matcher"] == name] for name in (OURS, NEAREST)]
