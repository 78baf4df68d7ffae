"""Curves and lists as CSV files: DVC plots them, spreadsheets open them, MLflow keeps them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Dict, List, Mapping, Sequence

import numpy as np

from pipeline.evaluation.metrics import recall_curve

LIMITS_DEG = tuple(round(0.2 * step, 1) for step in range(101))  # 0 .. 20 degrees, of the pose error
LIMITS_PX = tuple(round(0.1 * step, 1) for step in range(101))  # 0 .. 10 px, the range of the widest AUC


def write_csv(path: Path, lines: Sequence[Mapping[str, object]], columns: Sequence[str] = ()) -> None:
    """Write dicts as CSV; columns as given, else those of all lines in order of appearance."""
    names = list(columns) or list(dict.fromkeys(name for line in lines for name in line))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def error_curve(
    errors: Mapping[str, Sequence[float]], limits: Sequence[float] = LIMITS_PX, unit: str = "px"
) -> List[Dict[str, float]]:
    """Share of pairs with an error of at most each limit, by matcher: the curve whose area the AUC is.

    errors: matcher -> one error per pair in the unit of the limits, inf without an estimate. The first column of a
    line is the limit, `error_px` or `error_deg`.
    """
    shares = {matcher: recall_curve(values, limits) for matcher, values in errors.items()}
    return [
        {
            f"error_{unit}": limit,
            **{matcher: round(float(np.nan_to_num(share[index])), 6) for matcher, share in shares.items()},
        }
        for index, limit in enumerate(limits)
    ]
