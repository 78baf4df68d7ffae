"""Curves and lists as CSV files: DVC plots them, spreadsheets open them, MLflow keeps them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Dict, List, Mapping, Sequence

import numpy as np

from pipeline.matching.metrics import recall_curve

LIMITS_PX = tuple(round(0.1 * step, 1) for step in range(101))  # 0 .. 10 px, the range of the widest AUC


def write_csv(path: Path, lines: Sequence[Mapping[str, object]], columns: Sequence[str] = ()) -> None:
    """Write dicts as CSV; columns as given, else those of all lines in order of appearance."""
    names = list(columns) or list(dict.fromkeys(name for line in lines for name in line))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def error_curve(errors: Mapping[str, Sequence[float]]) -> List[Dict[str, float]]:
    """Share of pairs with a corner error of at most x px, by matcher: the curve whose area the AUC is.

    errors: matcher -> one error in pixels per pair, inf without an estimate.
    """
    shares = {matcher: recall_curve(values, LIMITS_PX) for matcher, values in errors.items()}
    return [
        {
            "error_px": limit,
            **{matcher: round(float(np.nan_to_num(share[index])), 6) for matcher, share in shares.items()},
        }
        for index, limit in enumerate(LIMITS_PX)
    ]
