"""Reports of a training: MLflow and the local log, curves for DVC, metrics.json, a profile, printed
lines.

Rank 0 reports, and one rank writes the curves in each folder of reports; sums over ranks are
exchanged every `--log-every` steps. Curves and metrics.json are outputs of the stage, the same in
every run; timing.csv and MLflow also have what depends on the machine.
"""

from __future__ import annotations

import contextlib
import json
import resource
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, TextIO

import torch

from pipeline import tracking
from pipeline.features.store import Store
from pipeline.files import write_atomic
from pipeline.parameters import params
from pipeline.processes import distributed
from pipeline.train.precision import Choice
from pipeline.train.resume import TrainPaths
from pipeline.train.step import StepResult

# In the folder `curves`, and in every checkpoint
CURVES = {"train": "train.csv", "val": "validation.csv"}
TIMING = "timing.csv"  # of this machine, so in no checkpoint
NO_CURVES: Mapping[str, str] = {}
Window = List[Dict[str, float]]  # each rank's sums since the last point


class TrainingLogger:
    """The record of one run; a context manager that closes the run as FINISHED, FAILED or KILLED.

    Args:
        writes: whether this rank writes curves; one rank does in each folder of reports.
        identity: of the training (`identity.identity`).
        precision: of the network's layers, and why.
        pairs: of a step, over all ranks.
        step: steps done before; 0: a training from scratch, which gets a new run.
        window: `window()` of the checkpoint that the training resumes from.
        curves: the text of each curve in that checkpoint.
    """

    def __init__(
        self,
        paths: TrainPaths,
        context: distributed.Context,
        writes: bool,
        identity: str,
        precision: Choice,
        pairs: int,
        step: int = 0,
        window: Optional[Window] = None,
        curves: Mapping[str, str] = NO_CURVES,
    ) -> None:
        self.paths = paths
        self.context = context
        self.pairs = pairs
        self.sums = _own_share(window or [], context)
        self.last_sums: Dict[str, float] = {}  # of the last step
        self._restart_clock()
        self.status = "FAILED"
        sections = params.load_all(paths.params, paths.options)
        self.data = params.data_name(sections)
        run_file = paths.reports.parent / "run.json"
        names = (params.preset(paths.params), self.data)
        size = context.world_size
        device = str(context.device.type)
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
        files = {kind: paths.reports / "curves" / name for kind, name in CURVES.items()}
        self.curves = {
            kind: Curve(file if writes else None, curves.get(kind, ""))
            for kind, file in files.items()
        }
        timing = paths.reports / TIMING
        self.timing = Curve(timing, points_until(timing, step)) if writes else Curve(None)

    def __enter__(self) -> TrainingLogger:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self.status = tracking.ending(kind)
        for curve in (*self.curves.values(), self.timing):
            curve.close()
        self.run.close(self.status)

    def log_start(self, weights: int, store: Store, messages: Sequence[str]) -> None:
        """Print what is trained on which data; `weights` is their number."""
        if not self.context.is_main:
            return
        what = (
            f"training {weights / 1e6:.2f} M weights on {len(store)} images of"
            f" {store.views_per_image} views"
        )
        where = f"{self.context.world_size} process(es) on {self.context.device.type}"
        print(f"{what}, {self.pairs} pairs a step, {where}", *messages, sep="\n")
        self.run.dataset(self.data or "views", store.digest, str(self.paths.keypoints))

    def add_step(self, result: StepResult, waited: float) -> None:
        """Add a step that waited `waited` seconds for its batch; `log_point` reports them
        together.
        """
        _add(self.sums, result.sums)
        self.last_sums = result.sums
        self.waited += waited
        self.timed_steps += 1

    def log_point(self, step: int, metrics: Mapping[str, float]) -> None:
        """A point on the curves: means since the last one, and `metrics` of this step; all ranks
        call it.
        """
        weight = self.sums.pop("pairs", 0.0)
        means = distributed.weighted_means(self.sums, weight)
        self._point("train", step, {**means, **metrics})
        seconds = max(time.perf_counter() - self.window_began, 1e-9)
        speed = self.pairs * self.timed_steps / seconds
        wait = self.waited / seconds
        timing = {
            "pairs_per_s": speed,
            "data_wait": wait,
            "memory_gib": _memory_gib(self.context.device),
        }
        self._track("train", step, timing)
        self.timing.append(step, timing)
        self._restart_clock()
        self.sums = {}

    def log_validation(self, step: int, metrics: Dict[str, float]) -> None:
        """A point of the validation curves."""
        self._point("val", step, metrics)
        self._restart_clock()  # validation is no training time

    def window(self) -> Window:
        """Each rank's sums since the last point, for the checkpoint; all ranks call it.

        They make the next point after a resume equal that of an uninterrupted run.
        """
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
            f"best validation at step {best_step}: F1 {metrics['f1']:.3f}, loss"
            f" {metrics['loss']:.3f}, precision {metrics['precision']:.3f}, recall"
            f" {metrics['recall']:.3f} ({metrics['pairs']:.0f} pairs)"
        )
        if init_from and best_step == 0:
            print(
                f"validation kept the weights of {init_from}: training on these images did not"
                " raise their F1"
            )

    def _restart_clock(self) -> None:
        self.window_began = time.perf_counter()
        self.waited = 0.0
        self.timed_steps = 0

    def _point(self, kind: str, step: int, point: Dict[str, float]) -> None:
        self._track(kind, step, point)
        self.curves[kind].append(step, point)

    def _track(self, kind: str, step: int, point: Dict[str, float]) -> None:
        if self.context.is_main:
            self.run.log({f"{kind}/{name}": value for name, value in point.items()}, step)


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
    metrics = {
        "step": info["train"]["steps"],
        "best_step": info["step"],
        "skipped_steps": info["skipped_steps"],
    }
    metrics.update({f"val_{name}": value for name, value in info["validation"].items()})
    write_atomic(reports / "metrics.json", json.dumps(metrics, indent=2) + "\n")


def _memory_gib(device: torch.device) -> float:
    """Peak memory of this process: on the GPU if there is one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Curve:
    """A CSV file with the column `step` and one column per metric, appended to.

    path: None if another process writes the file. text: what it begins with, of the steps done
    before; it replaces whatever else the file holds.
    """

    def __init__(self, path: Optional[Path], text: str = "") -> None:
        self.path = path
        self._parts = [text] if text else []
        self._stream: Optional[TextIO] = None

    @property
    def text(self) -> str:
        """All points so far, as a checkpoint holds them."""
        return "".join(self._parts)

    def append(self, step: int, point: Mapping[str, float]) -> None:
        """Append the point of `step`. Every point has the same metrics. Raises OSError (a full
        disk).
        """
        row = {"step": str(step), **{name: f"{value:.6g}" for name, value in point.items()}}
        if not self._parts:
            self._parts.append(",".join(row) + "\n")
        line = ",".join(row.values()) + "\n"
        self._parts.append(line)
        if self._stream is not None:
            self._stream.write(line)
            self._stream.flush()
        elif self.path is not None:
            write_atomic(self.path, self.text)
            self._stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (kept open from point to point)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        elif self.path is not None and self._parts:  # no new point
            write_atomic(self.path, self.text)


def points_until(path: Path, step: int) -> str:
    """The whole lines of a curve's file up to `step`; "" without a file or at step 0."""
    if step <= 0 or not path.is_file():
        return ""
    header, *lines = (
        path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0].split("\n")
    )
    kept = [
        line
        for line in lines
        if line.partition(",")[0].isdigit() and int(line.partition(",")[0]) <= step
    ]
    return "".join(f"{line}\n" for line in (header, *kept))


SKIPPED = 3  # first steps, which are slower


@contextlib.contextmanager
def profiled(steps: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Profile `steps` steps after the first few, as a table and as a trace for Perfetto; 0: no
    profile.

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
