"""Reports of a training: MLflow and the local log, curves for DVC, metrics.json, a profile, printed lines.

Rank 0 reports, and one rank writes the curves in each folder of reports; sums over ranks are exchanged every
`--log-every` steps. Curves and metrics.json are outputs of the stage, the same in every run; timing.csv and MLflow
also have what depends on the machine.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import resource
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, TextIO

import torch

from pipeline import tracking
from pipeline.features.store import Store
from pipeline.files import write_atomic
from pipeline.parameters import params
from pipeline.processes import distributed
from pipeline.train.precision import Choice
from pipeline.train.resume import TrainPaths
from pipeline.train.step import StepResult

CURVES = {"train": "curves/train.csv", "val": "curves/validation.csv", "timing": "timing.csv"}
Window = List[Dict[str, float]]  # each rank's sums since the last point


class TrainingLogger:
    """The record of one run; a context manager that closes the run as FINISHED, FAILED or KILLED.

    Args:
        curves: whether this rank writes curves; one rank does in each folder of reports.
        identity: of the training (`identity.identity`).
        precision: of the network's layers, and why.
        pairs: of a step, over all ranks.
        step: steps done before; 0: a training from scratch, which gets a new run.
        window: `window()` of the checkpoint that the training resumes from.
    """

    def __init__(
        self,
        paths: TrainPaths,
        context: distributed.Context,
        curves: bool,
        identity: str,
        precision: Choice,
        pairs: int,
        step: int = 0,
        window: Optional[Window] = None,
    ) -> None:
        self.paths, self.context, self.pairs = paths, context, pairs
        self.sums = _own_share(window or [], context)
        self.last_sums: Dict[str, float] = {}  # of the last step
        self._restart_clock()
        self.status = "FAILED"
        sections = params.load_all(paths.params, paths.options)
        self.data = params.data_name(sections)
        run_file = paths.reports.parent / "run.json"
        names = (params.preset(paths.params), self.data)
        size, device = context.world_size, str(context.device.type)
        chosen = {"precision": precision.precision, "precision_reason": precision.reason}
        self.run = tracking.open_run(
            paths.reports,
            {**sections, "world_size": size},
            tags={"device": device, **chosen, f"{tracking.HIDDEN}training": identity},
            resume=tracking.known_run(run_file, identity) if step else None,
            enabled=context.is_main,
            training=identity,
            noted_in=run_file,
            name=" ".join(dict.fromkeys(name for name in names if name)),
        )
        files = {kind: CurveFile(paths.reports / name, step) for kind, name in CURVES.items()}
        self.curves = files if curves else {}

    def __enter__(self) -> TrainingLogger:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self.status = tracking.ending(kind)
        for curve in self.curves.values():
            curve.close()
        self.run.close(self.status)

    def log_start(self, weights: int, store: Store, messages: Sequence[str]) -> None:
        """Print what is trained on which data; `weights` is their number."""
        if not self.context.is_main:
            return
        what = f"training {weights / 1e6:.2f} M weights on {len(store)} images of {store.views_per_image} views"
        where = f"{self.context.world_size} process(es) on {self.context.device.type}"
        print(f"{what}, {self.pairs} pairs a step, {where}", *messages, sep="\n")
        self.run.dataset(self.data or "views", store.digest, str(self.paths.keypoints))

    def add_step(self, result: StepResult, waited: float) -> None:
        """Add a step that waited `waited` seconds for its batch; `log_point` reports them together."""
        _add(self.sums, result.sums)
        self.last_sums = result.sums
        self.waited += waited
        self.timed_steps += 1

    def log_point(self, step: int, metrics: Mapping[str, float]) -> None:
        """A point on the curves: means since the last one, and `metrics` of this step; all ranks call it."""
        weight = self.sums.pop("pairs", 0.0)
        means = distributed.weighted_means(self.sums, weight)
        self._point("train", step, {**means, **metrics})
        seconds = max(time.perf_counter() - self.window_began, 1e-9)
        speed, wait = self.pairs * self.timed_steps / seconds, self.waited / seconds
        timing = {"pairs_per_s": speed, "data_wait": wait, "memory_gib": _memory_gib(self.context.device)}
        self._point("timing", step, timing, "train")
        self._restart_clock()
        self.sums = {}

    def log_validation(self, step: int, metrics: Dict[str, float]) -> None:
        """A point of the validation curves."""
        self._point("val", step, metrics)
        self._restart_clock()  # validation is no training time

    def window(self) -> Window:
        """Each rank's sums since the last point, for the checkpoint; all ranks call it.

        They make the next point after a resume equal that of an uninterrupted run. Points so far are synced to disk.
        """
        for curve in self.curves.values():
            curve.sync()
        window = distributed.all_gather(self.sums)
        return window if any(window) else []

    def log_stop(self, step: int) -> None:
        """Report that the run stops on request; its checkpoint is saved."""
        self.status = "KILLED"
        if self.context.is_main:
            print(f"stopped at step {step}; the same command resumes there", flush=True)

    def log_finish(self, best_step: int, metrics: Dict[str, float], init_from: str = "") -> None:
        """Write metrics.json, register the model, print the metrics of its validation.

        init_from: the initial weights; a line reports if they stayed the best.
        """
        self.status = "FINISHED"
        if not self.context.is_main:
            return
        best = self.paths.out / "best.json"
        write_metrics(self.paths.reports, json.loads(best.read_text()))
        self.run.artifact(self.paths.reports / "metrics.json")
        self.run.model(best.with_suffix(".safetensors"), best, step=best_step)
        print(
            f"best validation at step {best_step}: F1 {metrics['f1']:.3f}, loss {metrics['loss']:.3f}, "
            f"precision {metrics['precision']:.3f}, recall {metrics['recall']:.3f} ({metrics['pairs']:.0f} pairs)"
        )
        if init_from and best_step == 0:
            print(f"validation kept the weights of {init_from}: training on these images did not raise their F1")

    def _restart_clock(self) -> None:
        self.window_began, self.waited, self.timed_steps = time.perf_counter(), 0.0, 0

    def _point(self, kind: str, step: int, point: Dict[str, float], tracked_as: str = "") -> None:
        if self.context.is_main:
            self.run.log({f"{tracked_as or kind}/{name}": value for name, value in point.items()}, step)
        if kind in self.curves:
            self.curves[kind].append(step, point)


def _own_share(window: Window, context: distributed.Context) -> Dict[str, float]:
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


def write_metrics(reports: Path, info: Dict[str, Any]) -> None:
    """metrics.json of a finished training, from the JSON of its best model."""
    metrics = {"step": info["train"]["steps"], "best_step": info["step"], "skipped_steps": info["skipped_steps"]}
    metrics.update({f"val_{name}": value for name, value in info["validation"].items()})
    write_atomic(reports / "metrics.json", json.dumps(metrics, indent=2) + "\n")


def _memory_gib(device: torch.device) -> float:
    """Peak memory of this process: on the GPU if there is one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class CurveFile:
    """A CSV file with the column `step` and one column per metric, appended to.

    A training resumed at `last_step` keeps the points up to it. The first new point removes later ones and the partial
    line of a killed writer, so that the file ends as that of an uninterrupted run.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path, self.last_step = Path(path), last_step
        self._stream: Optional[TextIO] = None

    def append(self, step: int, point: Mapping[str, float]) -> None:
        """Append the point of `step`. Every point has the same metrics. Raises OSError (a full disk)."""
        row = {"step": str(step), **{name: f"{value:.6g}" for name, value in point.items()}}
        if self._stream is None:
            # points of an older version keep the columns that still exist
            write_atomic(self.path, "".join(_line(row, kept) for kept in [dict(zip(row, row)), *self._kept()]))
            self._stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (kept open from point to point)
        self._stream.write(_line(row, row))
        self._stream.flush()

    def _kept(self) -> List[Dict[str, str]]:
        """The points of the existing file up to `last_step`."""
        if self.last_step <= 0 or not self.path.is_file():
            return []
        whole_lines = self.path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0]
        rows = csv.DictReader(io.StringIO(whole_lines))
        return [row for row in rows if (row.get("step") or "").isdigit() and int(row["step"]) <= self.last_step]

    def sync(self) -> None:
        """Sync all points to disk, so that a checkpoint never outlives the points before it."""
        if self._stream is not None:
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def _line(columns: Iterable[str], row: Mapping[str, str]) -> str:
    """One line of the file: names and numbers need no quotes."""
    return ",".join(row.get(name) or "" for name in columns) + "\n"


SKIPPED = 3  # first steps, which are slower


@contextlib.contextmanager
def profiled(steps: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Profile `steps` steps after the first few, as a table and as a trace for Perfetto; 0: no profile.

    Yields a function to call at the end of each step.
    """
    if not steps:
        yield lambda: None
        return

    def write(profiler: torch.profiler.profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json"))
        order = "cuda_time_total" if torch.cuda.is_available() else "cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=30)
        (folder / "table.txt").write_text(table + "\n")
        print(f"profile of {steps} steps: {folder}/table.txt, trace.json")

    schedule = torch.profiler.schedule(wait=SKIPPED - 1, warmup=1, active=steps, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profiler:
        yield profiler.step
