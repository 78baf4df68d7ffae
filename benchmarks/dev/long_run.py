"""A training of paper scale without the network: does the cost around a step grow with the steps?

    python -m benchmarks.dev.long_run                                          as preset coco2017: 340,000 steps
    python -m benchmarks.dev.long_run --steps 6000 --images 2000 --out /tmp/x  a small one

The real training loop, order of pairs, loader, logger, checkpoints and MLflow upload run; the network's pass and the
validation return synthetic numbers. The tracking server is down for the first half and then started. Times are
processor seconds of the named thread, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import psutil
import requests

from benchmarks.synthetic import made_pair
from pipeline import errors, tracking
from pipeline.features import store
from pipeline.features.store import Store
from pipeline.image_sets import manifest
from pipeline.processes import distributed, signals
from pipeline.tracking import run
from pipeline.tracking.mlflow_store import MlflowStore
from pipeline.train.pairs.order import PairOrder
from pipeline.train.resume import TrainPaths
from pipeline.train.step import StepResult
from pipeline.train.trainer import Training

VIEWS, SHARD, BATCH = 4, 64, 64  # of preset coco2017
TRAIN = {
    "init_from": "",
    "batch": 2,
    "max_keypoints": 8,
    "dim": 8,
    "layers": 1,
    "heads": 1,
    "val_every": 5000,
    "seed": 0,
    "options": "--loader synthetic --save-every 2500",
}
FULL = 100  # only batches of this many events are timed; a small one would measure the fixed cost of a request
SERVER_SECONDS = 300  # for the server to start, on a busy machine


def main(argv: Optional[Sequence[str]] = None) -> int:
    options = parse(argv)
    with contextlib.ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{_free_port()}"
        tell("manifest", _manifest(folder, options.images))
        stores = _stores(folder, options.images)
        tell("order of the pairs", _order(options.images, options.steps))
        server = stack.enter_context(Server(folder))
        simulated = Simulated(_paths(folder, options.steps), stores, server)
        simulated.run()
        simulated.report()
        tell("resuming", _resumed(folder, options.steps, stores, server))
        tell("opening the run in the browser", _opened(server))
    return 0


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.long_run", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=340_000, help="steps, of which every tenth is a point on the curves")
    add("--images", type=int, default=118_000, help="images of the store, 64 in a shard")
    add("--out", type=Path, help="folder that is kept; default: one that is removed")
    options = parser.parse_args(argv)
    if options.steps < 1000 or options.images < SHARD:
        raise errors.RequestError(f"--steps must be 1000 or more, --images {SHARD} or more")
    return options


def tell(what: str, metrics: Dict[str, Any]) -> None:
    """Print one line of measurements."""
    shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    print(f"{what}: {shown}; memory {memory_mib():.0f} MiB", flush=True)


def memory_mib() -> float:
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss / 2**20


def _manifest(folder: Path, images: int) -> Dict[str, float]:
    """Time to write and to read a manifest of `images` images."""
    entries = [
        manifest.Entry(f"train2017/{i:012d}.jpg", "train", "zip", f"train2017/{i:012d}.jpg", 160_000, "0" * 8)
        for i in range(images)
    ]
    began = time.thread_time()
    manifest.write(folder / "manifest.csv", entries)
    written = time.thread_time()
    manifest.read(folder / "manifest.csv")
    return {"images": images, "writing s": written - began, "reading s": time.thread_time() - written}


def _stores(folder: Path, images: int) -> Tuple[Store, Store]:
    """Stores of `images` and of 64 images, of few keypoints each, opened as training opens them."""
    made = []
    for name, count in (("train", images), ("val", SHARD)):
        path = folder / "keypoints" / name
        if not (path / store.INDEX).is_file():
            _write_store(path, count)
        began = time.thread_time()
        opened = Store(path)
        seconds = time.thread_time() - began
        picked = np.random.default_rng(0).integers(count, size=1000).tolist()
        began = time.thread_time()
        for image in picked:
            opened.view(image, 1)
        view = (time.thread_time() - began) / len(picked)
        shards = -(-count // SHARD)
        tell(f"store, {shards} shards", {"images": count, "opening s": seconds, "a view us": 1e6 * view})
        made.append(opened)
    return made[0], made[1]


def _write_store(path: Path, images: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    pair = made_pair(4, np.random.default_rng(0))
    H, records = np.stack([np.eye(3)] * VIEWS), [pair.records0] * VIEWS
    rows = []
    for number, start in enumerate(range(0, images, SHARD)):
        names = [f"{i:012d}.jpg" for i in range(start, min(start + SHARD, images))]
        views = [store.ImageViews(name, (640, 480), H, records) for name in names]
        rows.append(store.write_shard(path / store.shard_name(number), views))
    (path / store.INDEX).write_text(json.dumps(store.index(rows, VIEWS, (512, 384))))


def _order(images: int, steps: int) -> Dict[str, float]:
    """Microseconds for the pairs of a step of 64, at the first and the last steps, alternating."""
    orders = {
        "first steps us": (PairOrder(0, images, VIEWS), 0),
        "last steps us": (PairOrder(0, images, VIEWS), steps - 101),
    }
    taken: Dict[str, List[float]] = {name: [] for name in orders}
    for step in range(101):
        for name, (order, first) in orders.items():
            began = time.thread_time()
            order.step(first + step, BATCH)
            taken[name].append(1e6 * (time.thread_time() - began))
    return {name: statistics.median(times[1:]) for name, times in taken.items()}  # the first one shuffles its epoch


def _paths(folder: Path, steps: int) -> TrainPaths:
    """A training in `folder`."""
    from ruamel.yaml import YAML

    from pipeline import presets

    section = YAML(typ="safe", pure=True).load(presets.render("sample"))["train"]
    (folder / "params.yaml").write_text(json.dumps({"train": {**section, **TRAIN, "steps": steps}}))  # JSON is YAML
    return TrainPaths(folder / "keypoints", folder / "checkpoints", folder / "reports/train", folder / "params.yaml")


class Server:
    """MLflow's server on a store in `folder`; down until `start`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, os.environ["MLFLOW_TRACKING_URI"]
        self._process: Optional[subprocess.Popen] = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process is not None:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.terminate()
            self._process.terminate()
            self._process.wait()

    def start(self) -> None:
        """Start the server, which answers some seconds later."""
        port = self.address.rpartition(":")[2]
        words = ["server", "--host", "127.0.0.1", "--port", port, "--workers", "1"]
        words += ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}"]
        words += ["--default-artifact-root", str(self.folder / "artifacts")]
        log = open(self.folder / "server.log", "ab")  # noqa: SIM115 (the child's)
        self._process = subprocess.Popen([sys.executable, "-m", "mlflow", *words], stdout=log, stderr=log)

    def wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + SERVER_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.address}/health", timeout=5).ok:
                    return
            time.sleep(0.5)
        raise errors.WorkError(f"no answer from MLflow's server, see {self.folder / 'server.log'}")

    def get(self, path: str, **values: Any) -> Any:
        """The answer to a request of the browser."""
        return self._json(requests.get(f"{self.address}/ajax-api/{path}", params=values, timeout=60))

    def post(self, path: str, **values: Any) -> Any:
        return self._json(requests.post(f"{self.address}/ajax-api/{path}", json=values, timeout=60))

    @staticmethod
    def _json(answer: requests.Response) -> Any:
        answer.raise_for_status()
        return answer.json()


class Simulated(Training):
    """The training loop with synthetic numbers in place of the network."""

    def __init__(self, paths: TrainPaths, stores: Tuple[Store, Store], server: Server) -> None:
        context = distributed.start()
        super().__init__(paths, context, signals.Stop(), *stores)
        self.server = server
        self.stepping: List[float] = []  # processor seconds of this thread at every 1,000th step
        self.memory: List[float] = []
        self.shipping: List[float] = []  # seconds an event took, in each full batch that reached the server
        self.points: List[float] = []  # processor seconds of the logger at every point

    def run(self) -> int:
        """Train, then wait until the server has everything."""
        with self._watched():
            code = super().run()
        self.closed = time.monotonic()
        return code

    def _gradient_step(self, batches: List[Any]) -> StepResult:
        step = self.state.step
        if step % 1000 == 0:
            self.stepping.append(time.thread_time())
            self.memory.append(memory_mib())
        if step == self.train.steps // 2 and not self.shipping:
            self.server.start()
        pairs = float(self.train.batch)
        sums = {"loss": pairs / (step + 1), "loss_positive": pairs, "loss_unmatched": pairs, "pairs": pairs}
        return StepResult(sums, 1.0 + step % 7, True, [])

    def _validate(self) -> Dict[str, float]:
        metrics = {"loss": 1.0, "precision": 0.5, "recall": 0.5, "f1": 0.5, "pairs": 4.0, "threshold": 0.2}
        if self.state.keep_best(metrics):
            self._save_best()
        return metrics

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Time the logger's points and the uploaded batches; wait until the server has everything."""
        from pipeline.train.logger import TrainingLogger

        inner_point = TrainingLogger.log_point
        inner_send = MlflowStore.send
        inner_close = run.Run.close

        def log_point(logger: TrainingLogger, *arguments: Any) -> None:
            began = time.thread_time()
            inner_point(logger, *arguments)
            self.points.append(time.thread_time() - began)

        def send(sink: MlflowStore, events: List[Any]) -> None:
            began = time.monotonic()
            inner_send(sink, events)
            if len(events) >= FULL:
                self.shipping.append((time.monotonic() - began) / len(events))

        TrainingLogger.log_point = log_point
        MlflowStore.send = send
        run.Run.close = lambda self, status="FINISHED": inner_close(self, status, 3600.0)
        try:
            yield
        finally:
            TrainingLogger.log_point = inner_point
            MlflowStore.send = inner_send
            run.Run.close = inner_close

    def report(self) -> None:
        """Print the cost at the first and the last tenth of the run."""
        steps = np.diff(self.stepping) * 1e3  # microseconds a step
        tenth = max(len(steps) // 10, 1)
        tell("a step without its arithmetic", _first_last(steps.tolist(), tenth, "us"))
        points = [1e6 * seconds for seconds in self.points]
        tell("a point of the logger", _first_last(points, max(len(points) // 10, 1), "us"))
        batches = [1e3 * seconds for seconds in self.shipping[1:]]  # the first one connects
        if batches:
            per_event = _first_last(batches, max(len(batches) // 10, 1), "ms")
            tell("an event to the server, wall clock", {"batches": len(batches), **per_event})
        low, high = np.array_split(self.memory, 10)[1], np.array_split(self.memory, 10)[-1]
        print(f"memory: {np.mean(low):.0f} MiB in the second tenth, {np.mean(high):.0f} in the last", flush=True)


def _first_last(values: List[float], count: int, unit: str) -> Dict[str, float]:
    median = statistics.median
    return {f"first tenth {unit}": median(values[:count]), f"last tenth {unit}": median(values[-count:])}


def _resumed(folder: Path, steps: int, stores: Tuple[Store, Store], server: Server) -> Dict[str, float]:
    """Processor seconds from the start of a nearly finished training to its first step."""
    for pattern in (f"step-{steps:08d}.*", "best.*"):  # the best model marks the training as finished
        for path in sorted((folder / "checkpoints").glob(pattern)):
            path.unlink()
    began, clock = time.thread_time(), time.monotonic()
    again = Simulated(_paths(folder, steps), stores, server)
    again.shipping.append(0.0)  # the server is up
    again.run()
    return {
        "first step after s": again.stepping[0] - began if again.stepping else 0.0,
        "steps": steps - steps // 2500 * 2500 or 2500,
        "to the end, wall clock s": again.closed - clock,
    }


def _opened(server: Server) -> Dict[str, float]:
    """Seconds of the browser's requests when the run is opened: the list, the run, every curve."""
    found = {}
    began = time.monotonic()
    experiment = server.get("2.0/mlflow/experiments/get-by-name", experiment_name=tracking.EXPERIMENT)
    number = experiment["experiment"]["experiment_id"]
    runs = server.post("2.0/mlflow/runs/search", experiment_ids=[number], max_results=100)["runs"]
    found["list s"] = time.monotonic() - began
    run_id = runs[0]["info"]["run_id"]
    began = time.monotonic()
    metrics = server.get("2.0/mlflow/runs/get", run_id=run_id)["run"]["data"]["metrics"]
    found["run s"] = time.monotonic() - began
    began, points = time.monotonic(), 0
    for metric in metrics:
        path = "2.0/mlflow/metrics/get-history-bulk-interval"
        got = server.get(path, run_ids=run_id, metric_key=metric["key"], max_results=320)
        points += len(got["metrics"])
    found.update({"curves": len(metrics), "all curves s": time.monotonic() - began, "points drawn": points})
    return found


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    os.environ.setdefault("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "10")
    raise SystemExit(errors.run(main))
