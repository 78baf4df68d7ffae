"""Reports of a training: printed lines, the local log and MLflow, and what DVC tracks beside the
model, which is the same in every run: curves, their picture, and metrics.json.

Rank 0 reports, and one rank writes in each folder of reports. Sums over ranks are exchanged every
`run.log_every` steps. The text of the curves is also in every checkpoint: a training that is
resumed continues them. The log and MLflow also have what depends on the machine.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import resource
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline import distributed, params, tracking
from pipeline.files import write_atomic
from pipeline.keypoints.store import Store
from pipeline.train.checkpoint import Saved, TrainState, part
from superglue_sift.progress import Progress

SMOOTHING = 0.9  # weight of the previous steps in the printed loss
# Names of the files in reports/train/curves, whose text is also in every checkpoint
CURVES = {"train": "train.csv", "val": "validation.csv"}
PREFIX = "curve."  # how names of tensors begin that hold the text of a curve in a checkpoint
METRICS = "metrics.json"
PICTURE = "curves.svg"
OURS = "#10a070"
RATIO_TEST = "#e0524a"
GRAY = "#888888"


class Curve:
    """A CSV file with the column `step` and one column for each metric, to which points are added.

    If `path` is None, another process writes the file. The file begins with `text`, the points of
    the steps done before, which replaces whatever else the file holds. Without `text` there is no
    file until the first point.
    """

    def __init__(self, path: Optional[Path], text: str = "") -> None:
        self.text = text
        self._path = path
        if path is not None and text:
            write_atomic(path, text)
        elif path is not None:
            path.unlink(missing_ok=True)

    def append(self, step: int, point: Mapping[str, float]) -> None:
        """Append a point, with the same metrics as the first point.

        A metric that is missing becomes nan. Raises OSError, for example if the disk is full.
        """
        lines = "" if self.text else ",".join(["step", *point]) + "\n"
        names = (self.text or lines).split("\n")[0].split(",")[1:]
        lines += ",".join([str(step), *(f"{point.get(name, math.nan):.6g}" for name in names)])
        self.text += f"{lines}\n"
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(f"{lines}\n")


def curve_tensors(curves: Mapping[str, Curve]) -> Dict[str, Tensor]:
    """Return the text of each curve as a tensor (bytes,) uint8, to put into a checkpoint."""
    return {
        f"{PREFIX}{kind}": torch.tensor(list(curve.text.encode()), dtype=torch.uint8)
        for kind, curve in curves.items()
        if curve.text
    }


def curve_texts(tensors: Mapping[str, Tensor]) -> Dict[str, str]:
    """Return the text of each curve in the tensors of a checkpoint."""
    texts = part(tensors, PREFIX).items()
    return {kind: bytes(tensor.tolist()).decode() for kind, tensor in texts}


def draw_curves(path: Path, texts: Mapping[str, str], best_step: int) -> None:
    """Draw the curves as an SVG file: the losses, and F1 on the validation pairs.

    The loss is drawn for training and validation, F1 for the network and the ratio test. A line
    marks the step of the best model. `texts` holds the text of each of the CURVES. Equal curves
    give equal bytes.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    nothing = "step,loss\nnan,nan\n"  # the curves before the first point of the training
    train, val = (
        np.genfromtxt(io.StringIO(texts.get(kind, nothing)), delimiter=",", names=True, ndmin=1)
        for kind in ("train", "val")
    )
    # Letters stay text, and the file contains no random names. The colours are the same as in the
    # report. They are readable on a light and on a dark page.
    parts = ("axes.edgecolor", "xtick.color", "ytick.color", "axes.labelcolor", "text.color")
    ink: Dict[Any, Any] = dict.fromkeys(parts, GRAY)
    style = {"svg.fonttype": "none", "svg.hashsalt": "curves", "font.size": 9, **ink}
    with rc_context(style):
        figure = Figure(figsize=(7, 4.5), layout=None)
        losses, scores = figure.subplots(2, 1, sharex=True)
        losses.plot(train["step"], train["loss"], color=GRAY, label="training")
        losses.plot(val["step"], val["loss"], "o-", color=OURS, ms=3, label="validation")
        losses.set(ylabel="loss", ylim=(0, None))
        scores.plot(val["step"], val["f1"], "o-", color=OURS, ms=3, label="SuperGlue")
        scores.plot(val["step"], val["f1_ratio_test"], "--", color=RATIO_TEST, label="ratio test")
        scores.set(xlabel="step", ylabel="F1 on validation pairs, %")
        for axes in (losses, scores):
            axes.axvline(best_step, color=GRAY, lw=0.8, ls=":", label=f"kept: step {best_step}")
            axes.grid(alpha=0.3)
            axes.legend(loc="best", frameon=False)
        stream = io.BytesIO()
        options = {"metadata": {"Date": None}, "bbox_inches": "tight", "transparent": True}
        figure.savefig(stream, format="svg", **options)
    write_atomic(path, stream.getvalue())


def write_curves(reports: Path, tensors: Mapping[str, Tensor], best_step: int) -> None:
    """Write the curves that a checkpoint holds, and their picture, to the folder of reports."""
    texts = curve_texts(tensors)
    for kind, text in texts.items():
        write_atomic(reports / "curves" / CURVES[kind], text)
    draw_curves(reports / PICTURE, texts, best_step)


def text_of_metrics(best: Dict[str, Any]) -> str:
    """Return metrics.json of a finished training, made from the JSON of its best model.

    F1, precision and recall are in percent.
    """
    figures = best["validation"]
    names = ("f1", "f1_ratio_test", "precision", "recall")
    metrics = {
        "best_step": best["step"],
        **{name: round(100 * figures[name], 2) for name in names},
        "loss": round(figures["loss"], 4),
        "skipped_steps": best["skipped_steps"],
        "step": best["train"]["steps"],
    }
    return json.dumps(metrics, indent=2) + "\n"


def has_metrics(reports: Path, best: Dict[str, Any]) -> bool:
    """Return whether metrics.json exists and belongs to this training."""
    path = reports / METRICS
    return path.is_file() and path.read_text() == text_of_metrics(best)


class TrainingLogger:
    """The reports of one run. As a context manager it closes the run as FINISHED, FAILED or KILLED.

    Args:
        sections: the sections of params.yaml.
        writes: whether this rank writes curves; one rank does in each folder of reports.
        identity: the name of the training.
        tags: tags of the run in MLflow.
        pairs: number of pairs of a step, over all ranks.
        saved: the checkpoint that the training resumes from. Without it the training starts from
            scratch, in a new run.
    """

    bar: Progress  # set by `log_start`

    def __init__(
        self,
        args: argparse.Namespace,
        sections: params.Params,
        context: distributed.Context,
        writes: bool,
        identity: str,
        tags: Dict[str, str],
        pairs: int,
        saved: Optional[Saved],
    ) -> None:
        self.args = args
        self.context = context
        self.writes = writes
        self.pairs = pairs
        # a resumed training continues its sums, its run and its curves
        tensors, info = saved or ({}, {})
        self.sums = _own_share(info.get("log_window", []), context)
        self._restart_clock()
        self.status = "FAILED"
        # the run in the local log and in MLflow
        self.data = params.data_name(sections.fetch)
        names = (params.preset(args.params), self.data)
        self.run = tracking.open_run(
            args.reports,
            {**dict(sections), "world_size": context.world_size},
            tags={"device": context.device.type, "training": identity, "preset": names[0], **tags},
            resume=tracking.known_run(args.reports, identity) if info.get("step") else None,
            enabled=context.is_main,
            training=identity,
            name=" ".join(filter(None, dict.fromkeys(names))),
        )
        before = curve_texts(tensors)
        self.curves = {
            kind: Curve(args.reports / "curves" / name if writes else None, before.get(kind, ""))
            for kind, name in CURVES.items()
        }
        self._loss = math.nan  # the smoothed loss on the line of progress
        self._validation = ""

    def __enter__(self) -> TrainingLogger:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self.status = tracking.ending(kind)
        self.run.close(self.status)

    def log_start(
        self, state: TrainState, steps: int, store: Store, messages: Sequence[str], baseline: float
    ) -> None:
        """Print what is trained on which data.

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
            self.run.dataset(self.data or "views", store.digest, str(self.args.keypoints))
        self.bar = Progress(
            total=steps, initial=state.step, desc="train", unit="step", disable=not is_main
        )
        self._baseline = baseline

    def add_step(self, sums: Mapping[str, float], waited: float) -> None:
        """Add the sums of a step to the next point. The step waited `waited` seconds for its
        batch."""
        _add(self.sums, sums)
        self.waited += waited
        self.timed_steps += 1
        loss = sums["loss"] / max(sums["pairs"], 1.0)
        if math.isfinite(loss):
            before = loss if math.isnan(self._loss) else self._loss
            self._loss = SMOOTHING * before + (1 - SMOOTHING) * loss
        self._show()
        self.bar.update(1)

    def log_point(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a point to the curves: the means since the last point, and `metrics` of this step.

        All ranks call this together, because the means are over all ranks.
        """
        weight = self.sums.pop("pairs", 0.0)
        self._log("train", step, {**distributed.weighted_means(self.sums, weight), **metrics})
        seconds = max(time.perf_counter() - self.window_began, 1e-9)
        # Speed and memory are on no curve, because they differ on every machine
        timing = {
            "train/pairs_per_s": self.pairs * self.timed_steps / seconds,
            "train/data_wait": self.waited / seconds,
            "train/memory_gib": _memory_gib(self.context.device),
        }
        self.run.log(timing, step)
        self._restart_clock()
        self.sums = {}

    def log_validation(self, state: TrainState, metrics: Dict[str, float], untrained: bool) -> None:
        """Add a point to the validation curves, print a line, and show it on the line of progress.

        `state` has the best score before this validation. If `untrained`, the weights are not kept.
        """
        point = {name: value for name, value in metrics.items() if name != "pairs"}
        for name in point:
            if name.startswith(("f1", "precision", "recall")):
                point[name] *= 100
        self._log("val", state.step, point)
        gain = f"{100 * (metrics['f1'] - state.best):+.1f}" if state.best else ""
        self._validation = f"F1 {point['f1']:.1f}" + (f" ({gain}), " if gain else ", ")
        if self.context.is_main:
            kind = " (untrained, not kept)" if untrained else ""
            more = f", {gain} from the best before" if gain else ""
            self.bar.say(
                f"validation at step {state.step}{kind}: {_describe(metrics)}{more}; ratio test"
                f" {100 * self._baseline:.1f} %"
            )
        self._show()
        self._restart_clock()  # validation is no training time

    def draw(self, best_step: int) -> None:
        """Draw the curves so far."""
        if self.writes:
            texts = {kind: curve.text for kind, curve in self.curves.items() if curve.text}
            draw_curves(self.args.reports / PICTURE, texts, best_step)

    def _show(self) -> None:
        # the baseline comes last, because a terminal of 80 columns cuts the end
        baseline = f"ratio test {100 * self._baseline:.1f}"
        self.bar.show(f"loss {self._loss:.2f}, {self._validation}{baseline}")

    def window(self) -> List[Dict[str, float]]:
        """Return each rank's sums since the last point, to be saved in a checkpoint.

        All ranks call this together. With these sums the next point after a resume equals the point
        of an uninterrupted run.
        """
        window = distributed.all_gather(self.sums)
        return window if any(window) else []

    def log_stop(self, step: int) -> None:
        """Report that the run stops on request. Its checkpoint is saved already."""
        self.status = "KILLED"
        if self.context.is_main:
            without = " without --fresh" if self.args.fresh else ""
            print(f"stopped at step {step}; the same command{without} resumes there", flush=True)

    def log_finish(self, state: TrainState, init_from: str = "") -> None:
        """Write metrics.json, register the model and print the metrics of its validation.

        `init_from` is the file of the initial weights. If they stayed the best, a line says so.
        """
        self.status = "FINISHED"
        if not self.context.is_main:
            return
        best = self.args.out / "best.json"
        reports = self.args.reports
        # metrics and picture for DVC, and the model in MLflow
        write_atomic(reports / METRICS, text_of_metrics(json.loads(best.read_text())))
        for name in (METRICS, PICTURE):
            if (reports / name).is_file():
                self.run.artifact(reports / name)
        self.run.model(best.with_suffix(".safetensors"), best, step=state.best_step)
        metrics = state.best_metrics
        print(
            f"best validation at step {state.best_step}: {_describe(metrics)}"
            f" ({metrics['pairs']:.0f} pairs)"
        )
        # step 0 has the initial weights
        if init_from and state.best_step == 0:
            print(
                f"validation kept the weights of {init_from}: training on these images did not"
                " raise their F1"
            )

    def _restart_clock(self) -> None:
        self.window_began = time.perf_counter()
        self.waited = 0.0
        self.timed_steps = 0

    def _log(self, kind: str, step: int, point: Dict[str, float]) -> None:
        """Add a point to a curve: to its file, and to the log and MLflow."""
        self.curves[kind].append(step, point)
        self.run.log({f"{kind}/{name}": value for name, value in point.items()}, step)


def _describe(metrics: Mapping[str, float]) -> str:
    """Describe a validation: "F1 74.1 %, precision 80.2 %, recall 68.9 %, loss 0.581"."""
    return (
        f"F1 {100 * metrics['f1']:.1f} %, precision {100 * metrics['precision']:.1f} %,"
        f" recall {100 * metrics['recall']:.1f} %, loss {metrics['loss']:.3f}"
    )


def _own_share(window: List[Dict[str, float]], context: distributed.Context) -> Dict[str, float]:
    """Return this rank's sums from a checkpoint.

    If another number of ranks saved them, rank 0 takes all sums and the other ranks take none.
    """
    if len(window) == context.world_size:
        return dict(window[context.rank])
    totals: Dict[str, float] = {}
    for sums in window if context.is_main else []:
        _add(totals, sums)
    return totals


def _add(totals: Dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + value


def _memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: on the GPU if it uses one, otherwise
    resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
