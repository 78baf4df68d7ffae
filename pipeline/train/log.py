"""Report a training: print lines, and write the local log, curves, their picture and metrics.json.

DVC tracks the curves, the picture and metrics.json, which are the same in every run. MLflow gets
the curves and what depends on the machine. Rank 0 reports, and one rank writes
into each folder of reports. The ranks exchange sums every `run.log_every` steps. Every checkpoint
has the curves, too, so a training that is resumed continues them.

Inside a training F1, precision and recall are fractions. All that this module writes and prints is
in percent (`to_percent`).
"""

from __future__ import annotations

import argparse
import io
import math
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from pipeline import distributed, params, tracking
from pipeline.errors import read_environment_number
from pipeline.keypoints.store import KeypointStore
from pipeline.tracking import CURVES
from pipeline.train.checkpoint import (
    BEST,
    Info,
    Metrics,
    Saved,
    Tensors,
    TrainState,
    list_changed_keys,
    select_by_prefix,
)
from superglue_sift.files import compute_file_sha256, write_atomic, write_csv, write_json
from superglue_sift.progress import Progress

Rows = List[Metrics]  # The points of a curve, each with its `step`
Curves = Dict[str, Rows]  # Keys "train" and "val"

METRICS = "metrics.json"
PICTURE = "curves.svg"
# Colours of the network, of the ratio test and of everything else
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


def hash_curve_files(reports: Path) -> Dict[str, str]:
    """Return the SHA-256 of the file of each curve that is in the folder of reports."""
    paths = [reports / "curves" / name for name in CURVES.values()]
    return {path.name: compute_file_sha256(path) for path in paths if path.is_file()}


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

    # These colours are readable on a light and on a dark page, and the report has the same.
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
    write_atomic(path, stream.getvalue())


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
    """Return why a precision was chosen, which promises no bytes that a change may have altered.

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


def _describe_validation(percent: Metrics) -> str:
    """Describe a validation: "F1 74.1 %, precision 80.2 %, recall 68.9 %, loss 0.581"."""
    return (
        f"F1 {percent['f1']:.1f} %, precision {percent['precision']:.1f} %,"
        f" recall {percent['recall']:.1f} %, loss {percent['loss']:.3f}"
    )


def is_first_of_node() -> bool:
    """Return whether this is the first rank of its node, which prints for the user of this node."""
    return read_environment_number("LOCAL_RANK", 0) == 0


class TrainingLogger:
    """The reports of one run. As a context manager it closes the run as FINISHED, FAILED or KILLED.

    Args:
        args: the command line.
        sections: the sections of params.yaml.
        context: this process among the ranks.
        training: the name of the training.
        precision: the precision of the network's layers.
        pairs: number of pairs of a step, over all ranks.
        saved: the checkpoint that the training resumes from. Without it the training starts from
            scratch, in a new run.
        is_writer: whether this rank writes the curves.
    """

    bar: Progress  # Set by `log_start`

    def __init__(
        self,
        args: argparse.Namespace,
        sections: params.Params,
        context: distributed.Context,
        training: str,
        precision: str,
        pairs: int,
        saved: Optional[Saved],
        is_writer: bool,
    ) -> None:
        self.args = args
        self.context = context
        self.is_writer = is_writer
        self.pairs = pairs
        self._validation = ""
        # A resumed training continues its curves, the sums of their next point, and its run.
        info = saved[1] if saved else {}
        self.curves: Curves = unpack_curves(*saved) if saved else {}
        # Ranks add their sums, so the others begin at 0.
        window = info.get("log_window", {})
        self.sums: Metrics = window if context.is_main else dict.fromkeys(window, 0.0)
        self._restart_clock()
        data = params.name_data(sections.fetch)
        preset = params.read_preset_name(args.params)
        device = context.device.type
        # Only rank 0 has a run in MLflow.
        self.run = tracking.open_run(
            args.reports,
            {**sections.model_dump(), "world_size": context.world_size},
            tags={"device": device, "training": training, "preset": preset, "precision": precision},
            resume=bool(info.get("step")),
            enabled=context.is_main,
            training=training,
            name=" ".join(filter(None, dict.fromkeys((preset, data)))),
        )
        for kind, rows in self.curves.items():
            self.run.log_points(kind, rows)

    def __enter__(self) -> TrainingLogger:
        return self

    def __exit__(self, kind, error, trace) -> None:
        # Without an error the run is closed already.
        self.run.close(tracking.get_end_status(kind) if kind else "FAILED")

    def log_start(
        self,
        state: TrainState,
        steps: int,
        store: KeypointStore,
        messages: Sequence[str],
        baseline: float,
    ) -> None:
        """Print the size of the network and of the data, and start the line of progress.

        Args:
            state: the state of the training.
            steps: number of steps of the whole training.
            store: the keypoints to train on.
            messages: lines to print.
            baseline: F1 of the ratio test on the validation pairs, a fraction.
        """
        is_main = self.context.is_main
        if is_main:
            weights = sum(p.numel() for p in state.model.parameters())
            print(
                f"training {weights / 1e6:.2f} M weights on {len(store)} images of"
                f" {store.views_per_image} views, {self.pairs} pairs a step,"
                f" {self.context.world_size} process(es) on {self.context.device.type}"
            )
            print(*messages, sep="\n")
            self.run.set_tags({"data": store.digest})
        elif is_first_of_node():
            print(
                f"rank {self.context.rank} of {self.context.world_size} trains from step"
                f" {state.step} of {steps}; rank 0 prints the progress",
                flush=True,
            )
        self.bar = Progress(
            total=steps, initial=state.step, desc="train", unit="step", disable=not is_main
        )
        self._baseline = f"ratio test {to_percent({'f1': baseline})['f1']:.1f}"
        if state.step:  # The folder may hold curves of another training
            self.write_curves(state.best_step)

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
        self.bar.show_text(f"loss {loss:.2f}, {self._validation}{self._baseline}")
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
        self._log_point("train", step, {**{n: sums[n] / pairs for n in sorted(sums)}, **metrics})
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
        self._log_point("val", state.step, {k: v for k, v in percent.items() if k != "pairs"})
        # The line of progress shows this F1 until the next validation.
        self._validation = f"F1 {percent['f1']:.1f}, "
        note = " (untrained, not kept)" if untrained else ""
        line = f"validation at step {state.step}{note}: {_describe_validation(percent)}"
        if state.best_metrics:
            gain = f"{percent['f1'] - to_percent(state.best_metrics)['f1']:+.1f}"
            self._validation = f"F1 {percent['f1']:.1f} ({gain}), "
            line += f", {gain} from the best before"
        if self.context.is_main:
            self.bar.print_line(f"{line}; {self._baseline} %")
        self._restart_clock()  # Validation is no training time

    def write_curves(self, best_step: int) -> None:
        """Write the curves so far, and their picture."""
        if self.is_writer:
            write_curves(self.args.reports, self.curves, best_step)

    def log_stop(self, state: TrainState) -> None:
        """Report that the run stops on request. Its checkpoint is saved already."""
        self.write_curves(state.best_step)
        if self.context.is_main or is_first_of_node():
            without = " without --fresh" if self.args.fresh else ""
            print(
                f"stopped at step {state.step}; the same command{without} resumes there", flush=True
            )
        self.run.close("KILLED")

    def log_finish(self, best: Info, init_from: str = "") -> None:
        """Write metrics.json, register the model and print the metrics of its validation.

        Args:
            best: the description of the best model.
            init_from: the file of the initial weights. If they stayed the best, a line says so.
        """
        if not self.context.is_main:
            if is_first_of_node():
                print(f"trained to step {best['train']['steps']}; rank 0 prints the metrics")
            return
        reports = self.args.reports
        model = self.args.out / BEST
        write_metrics(reports, best)
        for name in (METRICS, PICTURE):
            self.run.add_artifact(reports / name)
        self.run.register_model(model, model.with_suffix(".json"), best["step"])
        percent = to_percent(best["validation"])
        print(
            f"best validation at step {best['step']}: {_describe_validation(percent)}"
            f" ({percent['pairs']:.0f} pairs)"
        )
        # Step 0 has the initial weights.
        if init_from and best["step"] == 0:
            print(
                f"validation kept the weights of {init_from}: training on these images did not"
                " raise their F1"
            )
        self.run.close()

    def _restart_clock(self) -> None:
        self.window_began = time.perf_counter()
        self.waited = 0.0
        self.timed_steps = 0

    def _log_point(self, kind: str, step: int, point: Metrics) -> None:
        """Add a point to a curve, which MLflow gets as well."""
        # The curves have as many digits as their files.
        row = {"step": step, **{name: float(f"{value:.6g}") for name, value in point.items()}}
        self.curves.setdefault(kind, []).append(row)
        self.run.log_points(kind, [row])
