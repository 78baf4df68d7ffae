"""What a training reports: MLflow and the local log, curves for DVC, metrics.json, messages.

Only rank 0 reports. Sums over ranks are exchanged every `train.log_every` steps, not in each step.

Curves and metrics.json are outputs of the stage and hold what every run of it gives again. What this machine did
just now (pairs per second, waiting, memory) goes to timing.csv beside them and to MLflow.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch

from pipeline import params, tracking
from pipeline.files import write_atomic
from pipeline.runtime import distributed
from pipeline.training.curves import CurveFile
from pipeline.training.step import StepResult

CURVES = {"train": "curves/train.csv", "val": "curves/validation.csv", "timing": "timing.csv"}
Window = List[Dict[str, float]]  # each rank's sums since the last point


class TrainingLogger:
    """The record of one run; a context manager that closes the run as FINISHED, FAILED or KILLED."""

    def __init__(self, training, window: Optional[Window] = None) -> None:
        """`window`: what `window()` said when the checkpoint was saved that the training goes on from."""
        self.training = training
        self.context = training.context
        self.reports: Path = training.args.reports
        self.sums = _own_share(window or [], self.context)
        self.window_began = time.perf_counter()
        self.waited, self.timed_steps = 0.0, 0
        self.status = "FAILED"
        step, noted_in = training.state.step, self.reports.parent / "run.json"
        sections = params.load_all(training.args.params)
        self.data = params.data_name(sections)
        self.run = tracking.open_run(
            self.reports,
            {
                **{name: own.model_dump() for name, own in sections.items()},
                "world_size": self.context.world_size,
            },
            tags={
                "world_size": self.context.world_size,
                "device": str(self.context.device.type),
                "precision": training.objective.precision,
                "training": training.identity,
            },
            resume_run_id=tracking.known_run(noted_in, training.identity) if step else None,
            enabled=self.context.is_main,
            training=training.identity,
            noted_in=noted_in,
            name=" ".join(
                dict.fromkeys(one for one in (params.preset(training.args.params), self.data) if one)
            ),
        )
        self.curves = {kind: CurveFile(self.reports / name, step) for kind, name in CURVES.items()}

    def __enter__(self) -> TrainingLogger:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self.status = "KILLED" if issubclass(kind, (KeyboardInterrupt, SystemExit)) else "FAILED"
        for curve in self.curves.values():
            curve.close()
        self.run.close(self.status)

    def began(self) -> None:
        """Say what is about to be trained, on what."""
        training = self.training
        if not self.context.is_main:
            return
        weights = sum(p.numel() for p in training.state.model.parameters())
        print(
            f"training {weights / 1e6:.2f} M weights on {len(training.store)} images of "
            f"{training.store.views_per_image} views, {training.batch} pairs a step, "
            f"{self.context.world_size} process(es) on {self.context.device.type}"
        )
        for line in training.told:
            print(line)
        self.run.dataset(self.data or "views", training.store.digest, str(training.args.keypoints))

    def stepped(self, result: StepResult, lr: float, waited: float) -> None:
        """Count a step; every `log_every` steps one point on the curves."""
        for name, value in result.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.waited += waited
        self.timed_steps += 1
        step = self.training.state.step
        if step % self.training.train.log_every and step != self.training.train.steps:
            return
        weight = self.sums.pop("pairs", 0.0)
        point, _ = distributed.weighted_means(self.sums, weight)
        point.update(
            lr=lr,
            grad_norm=result.grad_norm,
            dustbin=float(self.training.state.model.dustbin.detach()),
            skipped_steps=float(self.training.state.skipped),
        )
        self._point("train", step, point)
        self._timing(step)
        self.sums = {}

    def validated(self, figures: Dict[str, float]) -> Dict[str, str]:
        """A point of the validation curves; what the progress bar shows of it."""
        self._point("val", self.training.state.step, figures)
        self._restart_clock()  # validation is no training time
        return {name: f"{figures[name]:.3f}" for name in ("loss", "precision", "recall")}

    def window(self) -> Window:
        """What every rank has summed up since the last point, for the checkpoint; all ranks call it together.

        With it the point after a resume is that of an uninterrupted run. Points so far are on the disk after this.
        """
        if self.context.is_main:
            for curve in self.curves.values():
                curve.sync()
        window = distributed.all_gather(self.sums)
        return window if any(window) else []

    def stopped(self) -> None:
        """The run was told to stop; its checkpoint is saved."""
        self.status = "KILLED"
        if self.context.is_main:
            print(
                f"stopped at step {self.training.state.step}; the same command goes on from there", flush=True
            )

    def finished(self) -> None:
        """metrics.json, the model, and the best figures in one line."""
        self.status = "FINISHED"
        state, training = self.training.state, self.training
        if not self.context.is_main:
            return
        best = training.args.out / "best.json"
        figures = state.best_figures
        write_metrics(self.reports, json.loads(best.read_text()))
        self.run.artifact(self.reports / "metrics.json")
        self.run.model(training.args.out / "best.safetensors", best, step=state.best_step)
        print(
            f"best validation at step {state.best_step}: loss {figures['loss']:.3f}, "
            f"precision {figures['precision']:.3f}, recall {figures['recall']:.3f} ({figures['pairs']:.0f} pairs)"
        )

    def _timing(self, step: int) -> None:
        """How fast the steps since the last point were, on this machine."""
        seconds = max(time.perf_counter() - self.window_began, 1e-9)
        point = {
            "pairs_per_s": self.training.batch * self.timed_steps / seconds,
            "data_wait": self.waited / seconds,
            "memory_gib": _memory_gib(self.context.device),
        }
        self._point("timing", step, point, "train")
        self._restart_clock()

    def _restart_clock(self) -> None:
        self.window_began, self.waited, self.timed_steps = time.perf_counter(), 0.0, 0

    def _point(self, kind: str, step: int, point: Dict[str, float], tracked_as: str = "") -> None:
        if self.context.is_main:
            self.run.log({f"{tracked_as or kind}/{name}": value for name, value in point.items()}, step)
            self.curves[kind].append(step, point)


def _own_share(window: Window, context: Any) -> Dict[str, float]:
    """This rank's sums; rank 0 takes all of them where another number of ranks saved them."""
    if len(window) == context.world_size:
        return dict(window[context.rank])
    totals: Dict[str, float] = {}
    for sums in window if context.is_main else []:
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def write_metrics(reports: Path, info: Dict[str, Any]) -> None:
    """metrics.json of a finished training, from the JSON of its best model."""
    metrics = {
        "step": info["train"]["steps"],
        "best_step": info["step"],
        "skipped_steps": info["skipped_steps"],
    }
    metrics.update({f"val_{name}": value for name, value in info["validation"].items()})
    write_atomic(reports / "metrics.json", json.dumps(metrics, indent=2) + "\n")


def _memory_gib(device: torch.device) -> float:
    """Peak memory of this process: on the GPU where there is one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
