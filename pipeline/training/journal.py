"""What a training tells the world: MLflow and the local log, curves for DVC, metrics.json, the last words.

Only rank 0 speaks. Sums over ranks are exchanged every `train.log_every` steps, not in each step.
"""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch

from pipeline.files import write_atomic
from pipeline.runtime import distributed, tracking
from pipeline.training.step import StepResult

CURVES = {"train": "train.csv", "val": "validation.csv"}


class Journal:
    """The record of one run; a context manager that closes the run as FINISHED, FAILED or KILLED."""

    def __init__(self, training, resumed_run: Optional[str]) -> None:
        self.training = training
        self.context = training.context
        self.reports: Path = training.args.reports
        self.sums: Dict[str, float] = {}
        self.window_began = time.perf_counter()
        self.waited = 0.0
        self.status = "FAILED"
        if self.context.is_main:
            (self.reports / "curves").mkdir(parents=True, exist_ok=True)
        self.run = tracking.open_run(
            self.reports,
            {"train": training.train.model_dump(), "world_size": self.context.world_size},
            tags={"world_size": self.context.world_size, "device": str(self.context.device.type)},
            resume_run_id=resumed_run,
            enabled=self.context.is_main,
        )
        self.rows = {kind: self._earlier_rows(kind) for kind in CURVES}

    @property
    def run_id(self) -> Optional[str]:
        return self.run.run_id

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self.status = "KILLED" if issubclass(kind, (KeyboardInterrupt, SystemExit)) else "FAILED"
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
        self.run.dataset("views", training.store.digest, str(training.args.keypoints))

    def stepped(self, result: StepResult, lr: float, waited: float) -> None:
        """Count a step; every `log_every` steps one point on the curves."""
        for name, value in result.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.waited += waited
        step = self.training.state.step
        if step % self.training.train.log_every and step != self.training.train.steps:
            return
        weight = self.sums.pop("pairs", 0.0)
        point, pairs = distributed.weighted_means(self.sums, weight)
        seconds = max(time.perf_counter() - self.window_began, 1e-9)
        point.update(
            lr=lr,
            grad_norm=result.grad_norm,
            pairs_per_s=pairs / seconds,
            data_wait=self.waited / seconds,
            dustbin=float(self.training.state.model.dustbin.detach()),
            skipped_steps=float(self.training.state.skipped),
            memory_gib=_memory_gib(self.context.device),
        )
        self._point("train", step, point)
        self.sums, self.waited = {}, 0.0
        self.window_began = time.perf_counter()

    def validated(self, figures: Dict[str, float]) -> Dict[str, str]:
        """A point of the validation curves; what the progress bar shows of it."""
        self._point("val", self.training.state.step, figures)
        self.window_began, self.waited = time.perf_counter(), 0.0  # validation is no training time
        return {name: f"{figures[name]:.3f}" for name in ("loss", "precision", "recall")}

    def stopped(self) -> None:
        """The run was told to stop; its checkpoint is saved."""
        self.status = "KILLED"
        if self.context.is_main:
            print(
                f"stopped at step {self.training.state.step}; the same command goes on from there", flush=True
            )

    def finished(self) -> None:
        """metrics.json, the model and the last words."""
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

    def _point(self, kind: str, step: int, point: Dict[str, float]) -> None:
        if not self.context.is_main:
            return
        self.run.log({f"{kind}/{name}": value for name, value in point.items()}, step)
        rows = [row for row in self.rows[kind] if int(row["step"]) < step]
        self.rows[kind] = [*rows, {"step": str(step), **{k: f"{v:.6g}" for k, v in point.items()}}]
        with open(self.reports / "curves" / CURVES[kind], "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(self.rows[kind][-1]))
            writer.writeheader()
            writer.writerows(self.rows[kind])

    def _earlier_rows(self, kind: str) -> List[Dict[str, str]]:
        """The curve of the run that is resumed, up to its checkpoint."""
        path = self.reports / "curves" / CURVES[kind]
        if not path.is_file() or self.training.state.step == 0:
            return []
        with open(path, newline="") as file:
            return [row for row in csv.DictReader(file) if int(row["step"]) <= self.training.state.step]


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
