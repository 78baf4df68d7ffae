"""Report a training: its curves and their picture, metrics.json, and the line of progress.

DVC tracks the curves, the picture and metrics.json, which are the same in every run. MLflow gets
the curves and what depends on the machine. The first rank of each node writes the files. The ranks
exchange sums every `run.log_every` steps. Every checkpoint has the curves, too, so a training that
is resumed continues them.

Inside a training F1, precision and recall are fractions. All that this module writes and prints is
in percent (`to_percent`).
"""

from __future__ import annotations

import io
import math
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from pipeline import distributed, tracking
from pipeline.tracking import CURVES
from pipeline.train.checkpoint import Info, Metrics, TrainState, list_changed_keys
from superglue_sift.files import write_atomically, write_csv, write_json
from superglue_sift.network.weights import ModelFile, Tensors, select_by_prefix
from superglue_sift.progress import Progress

Rows = List[Metrics]  # The points of a curve, each with its `step`
Curves = Dict[str, Rows]  # Keys "train" and "val"

METRICS = "metrics.json"
PICTURE = "curves.svg"
# Colors of the network, of the ratio test and of everything else
OURS = "#10a070"
RATIO_TEST = "#e0524a"
GRAY = "#888888"


def to_percent(metrics: Metrics) -> Metrics:
    """Return metrics with F1, precision and recall in percent, which are fractions before."""
    percent_names = ("f1", "precision", "recall")
    return {
        name: 100 * value if name.startswith(percent_names) else value
        for name, value in metrics.items()
    }


# --- curves


def list_columns(rows: Rows) -> List[str]:
    """Return the names of all values of a curve, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row))


def pack_curves(curves: Curves) -> Tuple[Dict[str, List[str]], Tensors]:
    """Return the names of the columns of each curve, and its values as tensors for a checkpoint.

    A tensor `curves.train` or `curves.val` is (points, columns) float64. A value that a point lacks
    is nan.
    """
    columns = {kind: list_columns(rows) for kind, rows in curves.items()}
    tensors = {
        f"curves.{kind}": torch.tensor(
            [[row.get(name, math.nan) for name in columns[kind]] for row in rows],
            dtype=torch.float64,
            device="cpu",
        )
        for kind, rows in curves.items()
    }
    return columns, tensors


def unpack_curves(tensors: Tensors, info: Info) -> Curves:
    """Return the curves in a checkpoint, which `pack_curves` has packed.

    Args:
        tensors: all tensors of the checkpoint.
        info: everything else in the checkpoint.
    """
    return {
        kind: [dict(zip(info["columns"][kind], row)) for row in values.tolist()]
        for kind, values in select_by_prefix(tensors, "curves.").items()
    }


def write_curves(reports: Path, curves: Curves, best_step: int) -> None:
    """Write a CSV file of each curve, and their picture. Files of another training are replaced.

    Args:
        reports: the folder of reports.
        curves: the curves. The file of a curve that is missing or empty is deleted.
        best_step: the step of the best model, which the picture marks.
    """
    for kind, name in CURVES.items():
        path = reports / "curves" / name
        rows = curves.get(kind, [])
        if rows:
            columns = list_columns(rows)
            lines = [[f"{row.get(name, math.nan):.6g}" for name in columns] for row in rows]
            for line, row in zip(lines, rows):
                line[0] = str(int(row["step"]))  # All digits of a large step
            write_csv(path, [columns, *lines])
        else:
            path.unlink(missing_ok=True)
    draw_curves(reports / PICTURE, curves, best_step)


def draw_curves(path: Path, curves: Curves, best_step: int) -> None:
    """Draw the curves into an SVG file: the losses, and F1 on the validation pairs.

    The loss is drawn for training and validation, F1 for the network and the ratio test. Equal
    curves give equal bytes.

    Args:
        path: the SVG file.
        curves: the curves.
        best_step: the step of the best model, which a line marks.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    def draw(axes: Any, kind: str, name: str, style: str, **options: Any) -> None:
        rows = curves.get(kind, [])
        steps = [row["step"] for row in rows]
        axes.plot(steps, [row.get(name, math.nan) for row in rows], style, **options)

    # These colors are readable on a light and on a dark page, and the report has the same.
    color_keys = ("axes.edgecolor", "xtick.color", "ytick.color", "axes.labelcolor", "text.color")
    colors: Dict[Any, Any] = dict.fromkeys(color_keys, GRAY)
    # Letters stay text. Without a salt of the hash, the file would contain random names.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves", "font.size": 9, **colors}):
        figure = Figure(figsize=(7, 4.5), layout=None)
        losses, scores = figure.subplots(2, 1, sharex=True)
        draw(losses, "train", "loss", "-", color=GRAY, label="training")
        draw(losses, "val", "loss", "o-", color=OURS, ms=3, label="validation")
        losses.set(ylabel="loss", ylim=(0, None))
        draw(scores, "val", "f1", "o-", color=OURS, ms=3, label="SuperGlue")
        draw(scores, "val", "f1_ratio_test", "--", color=RATIO_TEST, label="ratio test")
        scores.set(xlabel="step", ylabel="F1 on validation pairs, %")
        for axes in (losses, scores):
            axes.axvline(best_step, color=GRAY, lw=0.8, ls=":", label=f"kept: step {best_step}")
            axes.grid(alpha=0.3)
            axes.legend(loc="best", frameon=False)
        stream = io.BytesIO()
        figure.savefig(
            stream, format="svg", metadata={"Date": None}, bbox_inches="tight", transparent=True
        )
    write_atomically(path, stream.getvalue())


# --- metrics and lines


def write_metrics(reports: Path, best: Info) -> None:
    """Write metrics.json of a finished training.

    Args:
        reports: the folder of reports.
        best: the description of the best model.
    """
    percent = to_percent(best["validation"])
    names = ("f1", "f1_ratio_test", "precision", "recall")
    metrics = {
        "best_step": best["step"],
        **{name: round(percent[name], 2) for name in names},
        "loss": round(percent["loss"], 4),
        "skipped_steps": best["skipped_steps"],
        "step": best["train"]["steps"],
    }
    write_json(reports / METRICS, metrics, 2)


def describe_precision(reason: str, history: Sequence[Info]) -> str:
    """Return why a precision was chosen.

    After a change on resume, the same bytes are no longer promised.

    Args:
        reason: the reason of `choose_precision`.
        history: an entry for the start of the training, and one for each change on resume.
    """
    changes = [
        f"{key} at step {after['step']}"
        for before, after in zip(history, history[1:])
        for key in list_changed_keys(before, after)
        if key != "step"
    ]
    if changes and reason.startswith("portable"):
        return f"portable, but the bytes may be others, since these changed: {', '.join(changes)}"
    return reason


def describe_validation(metrics: Metrics) -> str:
    """Describe a validation: "F1 74.1 %, precision 80.2 %, recall 68.9 %, loss 0.581"."""
    percent = to_percent(metrics)
    return (
        f"F1 {percent['f1']:.1f} %, precision {percent['precision']:.1f} %,"
        f" recall {percent['recall']:.1f} %, loss {percent['loss']:.3f}"
    )


class TrainingLog:
    """The curves of a training, and its line of progress. MLflow gets the curves, too."""

    def __init__(
        self,
        reports: Path,
        run: tracking.Run,
        bar: Progress,
        context: distributed.Context,
        pairs: int,
        baseline: float,
        saved: Optional[ModelFile],
    ) -> None:
        """Begin the curves, or continue those of a checkpoint.

        Args:
            reports: the folder of reports.
            run: the run in MLflow.
            bar: the line of progress.
            context: this process among the ranks.
            pairs: number of pairs of a step, over all ranks.
            baseline: F1 of the ratio test on the validation pairs, a fraction.
            saved: the checkpoint that the training resumes from, or None.
        """
        self.reports = reports
        self.run = run
        self.bar = bar
        self.context = context
        self.pairs = pairs
        self.baseline = f"ratio test {100 * baseline:.1f}"
        self.curves: Curves = unpack_curves(*saved) if saved else {}
        for kind, rows in self.curves.items():
            run.log_points(kind, rows)
        # The sums of the next point. Ranks add theirs, so the others begin at 0.
        unlogged = saved.info["unlogged_sums"] if saved else {}
        self.sums: Metrics = dict(unlogged) if context.is_main else dict.fromkeys(unlogged, 0.0)
        self._validation = ""
        self._restart_clock()

    def get_validated_step(self) -> int:
        """Return the step of the last validation, or -1."""
        return int(max((row["step"] for row in self.curves.get("val", [])), default=-1))

    def add_step(self, sums: Metrics, waited: float) -> None:
        """Add a step to the next point of the curves, and show it on the line of progress.

        Args:
            sums: this rank's sums of the step by name (`train_step`).
            waited: seconds that the step waited for its batches.
        """
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.waited += waited
        self.timed_steps += 1
        # The baseline comes last in the line of progress, because a terminal cuts the end.
        loss = self.sums["loss"] / max(self.sums["pairs"], 1.0)
        self.bar.show_text(f"loss {loss:.2f}, {self._validation}{self.baseline}")
        self.bar.update(1)

    def log_point(self, step: int, metrics: Metrics) -> None:
        """Add a point to the curves of the training. All ranks call this together.

        The point has the means since the last point, over all ranks.

        Args:
            step: number of steps so far.
            metrics: further values of this step.
        """
        sums = distributed.sum_over_ranks(self.sums)
        pairs = sums.pop("pairs")
        seconds = max(time.perf_counter() - self.window_began, 1e-9)
        # Speed differs on every machine, so it is in MLflow only.
        speed = {
            "step": step,
            "pairs_per_s": self.pairs * self.timed_steps / seconds,
            "data_wait": self.waited / seconds,
        }
        self.run.log_points("train", [speed])
        self._add_point("train", step, {**{n: sums[n] / pairs for n in sorted(sums)}, **metrics})
        self._restart_clock()
        self.sums = {}

    def log_validation(self, state: TrainState, metrics: Metrics, untrained: bool) -> None:
        """Add a point to the curves of the validation, and print a line.

        Args:
            state: the state of the training, with the best metrics before this validation.
            metrics: the metrics of this validation.
            untrained: whether the weights are not trained yet, so that they are not kept.
        """
        percent = to_percent(metrics)
        self._add_point("val", state.step, {k: v for k, v in percent.items() if k != "pairs"})
        # The line of progress shows this F1 until the next validation.
        self._validation = f"F1 {percent['f1']:.1f}, "
        note = " (untrained, not kept)" if untrained else ""
        line = f"validation at step {state.step}{note}: {describe_validation(metrics)}"
        if state.best_metrics:
            gain = f"{percent['f1'] - to_percent(state.best_metrics)['f1']:+.1f}"
            self._validation = f"F1 {percent['f1']:.1f} ({gain}), "
            line += f", {gain} from the best before"
        if self.context.is_main:
            self.bar.print_line(f"{line}; {self.baseline} %")
        self._restart_clock()  # Validation does not count as training time

    def write_curves(self, best_step: int) -> None:
        """Write the curves so far, and their picture."""
        if self.context.is_first_of_node:
            write_curves(self.reports, self.curves, best_step)

    def _restart_clock(self) -> None:
        self.window_began = time.perf_counter()
        self.waited = 0.0
        self.timed_steps = 0

    def _add_point(self, kind: str, step: int, point: Metrics) -> None:
        """Add a point to a curve, which MLflow gets as well."""
        # The curves have as many digits as their files.
        row = {"step": step, **{name: float(f"{value:.6g}") for name, value in point.items()}}
        self.curves.setdefault(kind, []).append(row)
        self.run.log_points(kind, [row])
