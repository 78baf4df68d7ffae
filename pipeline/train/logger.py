"""Reports of a training: the local log and MLflow, curves for DVC, printed lines.

Rank 0 reports, and one rank writes the curves in each folder of reports; sums over ranks are
exchanged every `--log-every` steps. The log and MLflow also have what depends on the machine.
"""

from __future__ import annotations

import json
import math
import resource
import time
from typing import Dict, List, Mapping, Optional, Sequence

import torch

from pipeline import distributed, params, tracking
from pipeline.keypoints.store import Store
from pipeline.train import curves
from pipeline.train.checkpoint import Saved, TrainState
from pipeline.train.precision import Choice
from pipeline.train.resume import TrainPaths
from pipeline.train.step import StepResult
from superglue_sift.progress import Progress

SMOOTHING = 0.9  # of the printed loss from step to step


class TrainingLogger:
    """The record of one run; a context manager that closes the run as FINISHED, FAILED or KILLED.

    Args:
        writes: whether this rank writes curves; one rank does in each folder of reports.
        identity: of the training (`identity.name_of`).
        precision: of the network's layers, and why.
        pairs: of a step, over all ranks.
        saved: the checkpoint that the training resumes from; None: from scratch, in a new run.
    """

    bar: Progress  # set by `log_start`

    def __init__(
        self,
        paths: TrainPaths,
        context: distributed.Context,
        writes: bool,
        identity: str,
        precision: Choice,
        pairs: int,
        saved: Optional[Saved],
    ) -> None:
        self.paths = paths
        self.context = context
        self.pairs = pairs
        tensors, info = saved or ({}, {})
        self.sums = _own_share(info.get("log_window", []), context)
        self._restart_clock()
        self.status = "FAILED"
        sections = params.load_all(paths.params, paths.options)
        self.data = params.data_name(sections)
        names = (params.preset(paths.params), self.data)
        self.run = tracking.open_run(
            paths.reports,
            {**sections, "world_size": context.world_size},
            tags={
                "device": context.device.type,
                "precision": precision.precision,
                "precision_reason": precision.reason,
                "training": identity,
                "preset": names[0],
            },
            resume=tracking.known_run(paths.reports, identity) if info.get("step") else None,
            enabled=context.is_main,
            training=identity,
            name=" ".join(filter(None, dict.fromkeys(names))),
        )
        before = curves.from_tensors(tensors)
        self.curves = {
            kind: curves.Curve(
                paths.reports / "curves" / name if writes else None, before.get(kind, "")
            )
            for kind, name in curves.CURVES.items()
        }
        self._loss = math.nan  # on the line of progress
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

        steps: of the whole training. baseline: F1 of the ratio test on the validation pairs.
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
            self.run.dataset(self.data or "views", store.digest, str(self.paths.keypoints))
        self.bar = Progress(
            total=steps, initial=state.step, desc="train", unit="step", disable=not is_main
        )
        self._baseline = baseline

    def add_step(self, result: StepResult, waited: float) -> None:
        """Add a step that waited `waited` seconds for its batch to the next point."""
        _add(self.sums, result.sums)
        self.waited += waited
        self.timed_steps += 1
        loss = result.sums["loss"] / max(result.sums["pairs"], 1.0)
        if math.isfinite(loss):
            before = loss if math.isnan(self._loss) else self._loss
            self._loss = SMOOTHING * before + (1 - SMOOTHING) * loss
        self._show()
        self.bar.update(1)

    def log_point(self, step: int, metrics: Mapping[str, float]) -> None:
        """A point on the curves: means since the last one, and `metrics` of this step; all ranks
        call it.
        """
        weight = self.sums.pop("pairs", 0.0)
        self._log("train", step, {**distributed.weighted_means(self.sums, weight), **metrics})
        seconds = max(time.perf_counter() - self.window_began, 1e-9)
        # on no curve: it differs on every machine
        timing = {
            "train/pairs_per_s": self.pairs * self.timed_steps / seconds,
            "train/data_wait": self.waited / seconds,
            "train/memory_gib": _memory_gib(self.context.device),
        }
        self.run.log(timing, step)
        self._restart_clock()
        self.sums = {}

    def log_validation(
        self, step: int, metrics: Dict[str, float], best: Optional[float], untrained: bool
    ) -> None:
        """A point of the validation curves, also on the line of progress; in a log it has its own.

        best: F1 of the best weights before. untrained: these weights are not kept.
        """
        self._log("val", step, metrics)
        gain = 0.0 if best is None else 100 * (metrics["f1"] - best)
        self._validation = f"F1 {100 * metrics['f1']:.1f}" + (f" ({gain:+.1f}), " if best else ", ")
        if self.context.is_main and not self.bar.terminal:
            kind = " (untrained, not kept)" if untrained else ""
            more = f", {gain:+.1f} from the best before" if best else ""
            self.bar.say(
                f"validation at step {step}{kind}: {_describe(metrics)}{more}; ratio test"
                f" {100 * self._baseline:.1f} %"
            )
        self._show()
        self._restart_clock()  # validation is no training time

    def _show(self) -> None:
        mark = f"ratio test {100 * self._baseline:.1f}"
        self.bar.show(f"loss {self._loss:.2f}, {self._validation}{mark}")  # 80 columns cut the end

    def window(self) -> List[Dict[str, float]]:
        """Each rank's sums since the last point, for the checkpoint; all ranks call it.

        They make the next point after a resume equal that of an uninterrupted run.
        """
        window = distributed.all_gather(self.sums)
        return window if any(window) else []

    def log_stop(self, step: int) -> None:
        """Report that the run stops on request; its checkpoint is saved."""
        self.status = "KILLED"
        if self.context.is_main:
            without = " without --fresh" if self.paths.fresh else ""
            print(f"stopped at step {step}; the same command{without} resumes there", flush=True)

    def log_finish(self, state: TrainState, init_from: str = "") -> None:
        """Write metrics.json, register the model, print the metrics of its validation.

        init_from: the initial weights; a line reports if they stayed the best.
        """
        self.status = "FINISHED"
        if not self.context.is_main:
            return
        best = self.paths.out / "best.json"
        curves.write_metrics(self.paths.reports, json.loads(best.read_text()))
        self.run.artifact(self.paths.reports / curves.METRICS)
        self.run.model(best.with_suffix(".safetensors"), best, step=state.best_step)
        figures = state.best_figures
        print(
            f"best validation at step {state.best_step}: {_describe(figures)}"
            f" ({figures['pairs']:.0f} pairs)"
        )
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
        """A point of a curve, to its file and to MLflow."""
        self.curves[kind].append(step, point)
        self.run.log({f"{kind}/{name}": value for name, value in point.items()}, step)


def _describe(metrics: Mapping[str, float]) -> str:
    """F1 74.1 %, precision 80.2 %, recall 68.9 %, loss 0.581: of a validation, for a person."""
    return (
        f"F1 {100 * metrics['f1']:.1f} %, precision {100 * metrics['precision']:.1f} %,"
        f" recall {100 * metrics['recall']:.1f} %, loss {metrics['loss']:.3f}"
    )


def _own_share(window: List[Dict[str, float]], context: distributed.Context) -> Dict[str, float]:
    """This rank's sums; rank 0 takes all of them if another number of ranks saved them."""
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
    """Peak memory of this process: on the GPU if there is one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
