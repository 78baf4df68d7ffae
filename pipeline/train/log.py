"""Report a training: print lines, and write the local log, curves, their picture and metrics.json.

DVC tracks the curves, the picture and metrics.json, which are the same in every run. The log, which
is sent to MLflow, also has what depends on the machine. Rank 0 reports, and one rank writes in each
folder of reports. Sums over ranks are exchanged every `run.log_every` steps. The curves are also in
every checkpoint, so a training that is resumed continues them.

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

Rows = List[Metrics]  # the points of a curve, each with its `step`
Curves = Dict[str, Rows]  # "train" and "val"

# Names of the files in reports/train/curves
CURVES = {"train": "train.csv", "val": "validation.csv"}
METRICS = "metrics.json"
PICTURE = "curves.svg"
# Colours of the network, of the ratio test and of everything else
OURS = "#10a070"
RATIO_TEST = "#e0524a"
GRAY = "#888888"


def to_percent(metrics: Metrics) -> Metrics:
    """Return metrics with F1, precision and recall in percent. They are fractions before."""
    shares = ("f1", "precision", "recall")
    return {
        name: 100 * value if name.startswith(shares) else value for name, value in metrics.items()
    }


# --- curves


def list_columns(rows: Rows) -> List[str]:
    """Return the names of all values in the rows of a curve, in the order of their first rows."""
    return list(dict.fromkeys(name for row in rows for name in row))


def pack_curves(curves: Curves) -> Tuple[Dict[str, List[str]], Tensors]:
    """Return the columns of each curve, and its values for a checkpoint.

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
    """Return the curves in a checkpoint, see `pack_curves`."""
    return {
        kind: [dict(zip(info["columns"][kind], row)) for row in values.tolist()]
        for kind, values in select_by_prefix(tensors, "curves.").items()
    }


def write_curves(reports: Path, curves: Curves, best_step: int) -> None:
    """Write a CSV file of each curve, and their picture, to the folder of reports.

    A file of another training is replaced or deleted.
    """
    for kind, name in CURVES.items():
        path = reports / "curves" / name
        rows = curves.get(kind, [])
        if rows:
            columns = list_columns(rows)
            lines = [[f"{row.get(name, math.nan):.6g}" for name in columns] for row in rows]
            for line, row in zip(lines, rows):
                line[0] = str(int(row["step"]))  # all digits of a large step
            write_csv(path, [columns, *lines])
        else:
            path.unlink(missing_ok=True)
    draw_curves(reports / PICTURE, curves, best_step)


def hash_curve_files(reports: Path) -> Dict[str, str]:
    """Return the SHA-256 of the file of each curve that is in the folder of reports."""
    paths = [reports / "curves" / name for name in CURVES.values()]
    return {path.name: compute_file_sha256(path) for path in paths if path.is_file()}


def draw_curves(path: Path, curves: Curves, best_step: int) -> None:
    """Draw the curves as an SVG file: the losses, and F1 on the validation pairs.

    The loss is drawn for training and validation, F1 for the network and the ratio test. A line
    marks the step of the best model. Equal curves give equal bytes.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    def draw(axes: Any, kind: str, name: str, style: str, **options: Any) -> None:
        rows = curves.get(kind, [])
        steps = [row["step"] for row in rows]
        axes.plot(steps, [row.get(name, math.nan) for row in rows], style, **options)

    # Letters stay text, and the file contains no random names. The colours are the same as in the
    # report. They are readable on a light and on a dark page.
    parts = ("axes.edgecolor", "xtick.color", "ytick.color", "axes.labelcolor", "text.color")
    ink: Dict[Any, Any] = dict.fromkeys(parts, GRAY)
    # The losses are above and F1 is below, over the same steps.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves", "font.size": 9, **ink}):
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
        # The file has no date, so equal curves give equal bytes.
        stream = io.BytesIO()
        figure.savefig(
            stream, format="svg", metadata={"Date": None}, bbox_inches="tight", transparent=True
        )
    write_atomic(path, stream.getvalue())


# --- metrics and lines


def write_metrics(reports: Path, best: Info) -> None:
    """Write metrics.json of a finished training, made from the description of its best model."""
    figures = to_percent(best["validation"])
    names = ("f1", "f1_ratio_test", "precision", "recall")
    metrics = {
        "best_step": best["step"],
        **{name: round(figures[name], 2) for name in names},
        "loss": round(figures["loss"], 4),
        "skipped_steps": best["skipped_steps"],
        "step": best["train"]["steps"],
    }
    write_json(reports / METRICS, metrics, 2)


def describe_precision(reason: str, history: Sequence[Info]) -> str:
    """Return the reason of a precision, which claims no bytes that a change may have altered.

    `history` has an entry for the start of the training and for each change on resume.
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
    """Return whether this is the first rank of its node, which prints what its user has to know."""
    return read_environment_number("LOCAL_RANK", 0) == 0


class TrainingLogger:
    """The reports of one run. As a context manager it closes the run as FINISHED, FAILED or KILLED.

    Args:
        sections: the sections of params.yaml.
        identity: the name of the training.
        precision: the precision of the network's layers.
        pairs: number of pairs of a step, over all ranks.
        saved: the checkpoint that the training resumes from. Without it the training starts from
            scratch, in a new run.
        writes: whether this rank writes the curves.
    """

    bar: Progress  # set by `log_start`

    def __init__(
        self,
        args: argparse.Namespace,
        sections: params.Params,
        context: distributed.Context,
        identity: str,
        precision: str,
        pairs: int,
        saved: Optional[Saved],
        writes: bool,
    ) -> None:
        self.args = args
        self.context = context
        self.writes = writes
        self.pairs = pairs
        self._validation = ""
        # A resumed training continues its curves, the sums of their next point, and its run.
        info = saved[1] if saved else {}
        self.curves: Curves = unpack_curves(*saved) if saved else {}
        self.sums: Metrics = dict(info.get("log_window", {})) if context.is_main else {}
        self._restart_clock()
        data = params.name_data(sections.fetch)
        preset = params.read_preset_name(args.params)
        device = context.device.type
        # Only rank 0 has a run, in the local log and in MLflow.
        self.run = tracking.open_run(
            args.reports,
            {**sections.model_dump(), "world_size": context.world_size},
            tags={"device": device, "training": identity, "preset": preset, "precision": precision},
            resume=bool(info.get("step")),
            enabled=context.is_main,
            training=identity,
            name=" ".join(filter(None, dict.fromkeys((preset, data)))),
        )

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

        `steps` is the number of steps of the whole training. `baseline` is the F1 of the ratio test
        on the validation pairs.
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
        if state.step:  # the folder may hold curves of another training
            self.write_curves(state.best_step)

    def add_step(self, sums: Metrics, waited: float) -> None:
        """Add the sums of a step to the next point. The step waited `waited` s for its batch."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.waited += waited
        self.timed_steps += 1
        # The baseline comes last in the line of progress, because a terminal cuts the end.
        loss = self.sums["loss"] / max(self.sums["pairs"], 1.0)
        self.bar.show_text(f"loss {loss:.2f}, {self._validation}{self._baseline}")
        self.bar.update(1)

    def log_point(self, step: int, metrics: Metrics) -> None:
        """Add a point to the curves: the means since the last point, and `metrics` of this step.

        All ranks call this together, because the means are over all ranks.
        """
        sums = distributed.sum_over_ranks(self.sums)
        pairs = sums.pop("pairs")
        self._log_point("train", step, {**{n: sums[n] / pairs for n in sorted(sums)}, **metrics})
        seconds = max(time.perf_counter() - self.window_began, 1e-9)
        # Speed is on no curve, because it differs on every machine.
        timing = {
            "train/pairs_per_s": self.pairs * self.timed_steps / seconds,
            "train/data_wait": self.waited / seconds,
        }
        self.run.log_metrics(timing, step)
        self._restart_clock()
        self.sums = {}

    def log_validation(self, state: TrainState, metrics: Metrics, untrained: bool) -> None:
        """Add a point to the validation curves, print a line, and show it on the line of progress.

        `state` has the best score before this validation. If `untrained`, the weights are not kept.
        """
        percent = to_percent(metrics)
        self._log_point("val", state.step, {k: v for k, v in percent.items() if k != "pairs"})
        # Print a line; the line of progress shows this F1 until the next validation.
        self._validation = f"F1 {percent['f1']:.1f}, "
        more = " (untrained, not kept)" if untrained else ""
        line = f"validation at step {state.step}{more}: {_describe_validation(percent)}"
        if state.best_metrics:
            gain = f"{percent['f1'] - to_percent(state.best_metrics)['f1']:+.1f}"
            self._validation = f"F1 {percent['f1']:.1f} ({gain}), "
            line += f", {gain} from the best before"
        if self.context.is_main:
            self.bar.print_line(f"{line}; {self._baseline} %")
        self._restart_clock()  # validation is no training time

    def write_curves(self, best_step: int) -> None:
        """Write the curves so far, and their picture."""
        if self.writes:
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

        `best` describes the best model. `init_from` is the file of the initial weights. If they
        stayed the best, a line says so.
        """
        if not self.context.is_main:
            if is_first_of_node():
                print(f"trained to step {best['train']['steps']}; rank 0 prints the metrics")
            return
        # Write the metrics for DVC, and add them, the picture and the model to MLflow.
        reports = self.args.reports
        model = self.args.out / BEST
        write_metrics(reports, best)
        for name in (METRICS, PICTURE):
            self.run.add_artifact(reports / name)
        self.run.register_model(model, model.with_suffix(".json"), step=best["step"])
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
        """Add a point to a curve, to the log and to MLflow."""
        # Keep as many digits as the file of the curve has.
        row = {name: float(f"{value:.6g}") for name, value in point.items()}
        self.curves.setdefault(kind, []).append({"step": step, **row})
        self.run.log_metrics({f"{kind}/{name}": value for name, value in point.items()}, step)
