"""What DVC tracks of a training beside its model, the same in every run: curves and metrics.json.

The text of the curves is also in every checkpoint: a training that is resumed continues them.
"""

from __future__ import annotations

import json
from math import nan
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

import torch
from torch import Tensor

from pipeline.files import write_atomic
from pipeline.train.checkpoint import part

# In reports/train/curves, and in every checkpoint
CURVES = {"train": "train.csv", "val": "validation.csv"}
PREFIX = "curve."  # of the tensors of a checkpoint that hold the text of a curve
METRICS = "metrics.json"


class Curve:
    """A CSV file with the column `step` and one column per metric, appended to.

    path: None if another process writes the file. text: what it begins with, of the steps done
    before; it replaces whatever else the file holds. Without text there is no file until the first
    point.
    """

    def __init__(self, path: Optional[Path], text: str = "") -> None:
        self.text = text
        self._path = path
        if path is not None and text:
            write_atomic(path, text)
        elif path is not None:
            path.unlink(missing_ok=True)

    def append(self, step: int, point: Mapping[str, float]) -> None:
        """Append a point, with the metrics of the first one. Raises OSError (a full disk)."""
        lines = "" if self.text else ",".join(["step", *point]) + "\n"
        names = (self.text or lines).split("\n")[0].split(",")[1:]
        lines += ",".join([str(step), *(f"{point.get(name, nan):.6g}" for name in names)]) + "\n"
        self.text += lines
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(lines)


def to_tensors(curves: Mapping[str, Curve]) -> Dict[str, Tensor]:
    """The text of the curves, for a checkpoint."""
    return {
        f"{PREFIX}{kind}": torch.tensor(list(curve.text.encode()), dtype=torch.uint8)
        for kind, curve in curves.items()
        if curve.text
    }


def from_tensors(tensors: Mapping[str, Tensor]) -> Dict[str, str]:
    """The text of each curve in a checkpoint."""
    texts = part(tensors, PREFIX).items()
    return {kind: bytes(tensor.tolist()).decode() for kind, tensor in texts}


def write_curves(reports: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the curves in a checkpoint to the folder of reports."""
    for kind, text in from_tensors(tensors).items():
        write_atomic(reports / "curves" / CURVES[kind], text)


def write_metrics(reports: Path, best: Dict[str, Any]) -> None:
    """metrics.json of a finished training, from the JSON of its best model."""
    write_atomic(reports / METRICS, _text_of_metrics(best))


def has_metrics(reports: Path, best: Dict[str, Any]) -> bool:
    """Whether metrics.json is that of this training."""
    path = reports / METRICS
    return path.is_file() and path.read_text() == _text_of_metrics(best)


def _text_of_metrics(best: Dict[str, Any]) -> str:
    metrics = {
        "step": best["train"]["steps"],
        "best_step": best["step"],
        "skipped_steps": best["skipped_steps"],
        **{f"val_{name}": value for name, value in best["validation"].items()},
    }
    return json.dumps(metrics, indent=2) + "\n"
