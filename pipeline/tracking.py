"""Runs of trainings in MLflow.

The curves of a training are on disk, in its checkpoints and in reports/train/curves. MLflow gets a
copy: a thread of rank 0 sends what the server lacks. So no server can stop or fail a training, or
hold up its end for more than a minute. `reports/train/mlflow.json` describes the run, and has no
password. What did not arrive is sent later, once, from these files:

    python -m pipeline.tracking send    send what the server lacks
    python -m pipeline.tracking ui      MLflow's pages on the store of this clone
"""

from __future__ import annotations

import contextlib
import csv
import logging
import math
import os
import re
import shlex
import sys
import tempfile
import textwrap
import threading
import time
import uuid
import warnings
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from pipeline import errors, provenance
from pipeline.params import flatten
from superglue_sift.files import compute_json_digest, read_json, write_atomically, write_json

MODEL = "superglue-sift"  # Name of the registered model, and of the experiment
EVALUATION = "test"  # Prefix of the evaluation's metrics, and folder of its files
SEPARATOR = " · "  # It stands between the name of a run and its result
TAG_PREFIX = "superglue."  # The names of the project's tags begin with this
KEY_TAG = f"{TAG_PREFIX}run_key"  # The tag by which the run of a record is found
CLONE_STORE = "mlflow.db"  # The store of a clone
ARTIFACTS = "mlartifacts"  # Folder of the files of all runs, beside a local store
RECORD = "mlflow.json"  # File that describes the run of a training
# Names of the files in reports/train/curves
CURVES = {"train": "train.csv", "val": "validation.csv"}

SEND_SECONDS = 5.0  # Pause between two requests with points of the curves
RETRY_SECONDS = 30.0  # Pause after a server did not answer
# How long the end of a training waits for a server that did not answer, and for any other
SHORT_WAIT_SECONDS = 6.0
LONG_WAIT_SECONDS = 60.0
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",  # Seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # Seven processes for language models
}
# Without this word, MLflow opens its page for language models.
WORKFLOW = "machine_learning"
# A login stands in front of the name of a server or a database.
_LOGIN = re.compile(r"(?<=://)[^/\s'\"<>][^\s'\"<>]*@")

Record = Dict[str, Any]
Row = Dict[str, float]  # The values of one step, and the `step`
Point = Tuple[str, Row]  # The prefix of the metrics, and their values


def redact(text: str) -> str:
    """Return a text without the logins in its addresses."""
    return _LOGIN.sub("", text)


def get_database_path(uri: str) -> Optional[Path]:
    """Return the file of a SQLite address, or None for the address of a server.

    The address of a SQLite file is relative to the user's clone.
    """
    scheme, _, path = uri.partition(":///")
    return provenance.find_clone() / path if scheme == "sqlite" and path else None


def choose_uri() -> str:
    """Return MLFLOW_TRACKING_URI, or the store of the user's clone if it is not set.

    A DVC experiment runs in a copy of the clone, and also takes the store of the user's clone.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{CLONE_STORE}"
    path = get_database_path(uri)
    return f"sqlite:///{path}" if path else uri


def connect(uri: str) -> Tuple[Any, str]:
    """Connect to a server or a local store.

    Returns:
        Its `MlflowClient`, and the id of the experiment. A local store and the experiment are
        created if they do not exist.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    import mlflow

    logging.disable(logging.INFO)  # Alembic, which makes the tables, sets a level of its own
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    path = get_database_path(uri)
    if path and not path.is_file():
        create_database(path)
    client = mlflow.MlflowClient(uri, uri)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or MODEL
    if path and client.get_experiment_by_name(name) is None:
        # MLflow's default is the current directory, which may be that of a DVC experiment.
        folder = (path.resolve().parent / ARTIFACTS).as_uri()
        with contextlib.suppress(mlflow.MlflowException):  # Another training has created it
            client.create_experiment(name, folder)
    return client, mlflow.set_experiment(name).experiment_id


def create_database(path: Path) -> None:
    """Create the file of a local store with all its tables at once.

    MLflow needs seconds for its tables. A process that is killed meanwhile must not leave a part of
    them, and one that starts meanwhile must not replace them.
    """
    import mlflow
    from filelock import FileLock

    with FileLock(f"{path}.lock"), tempfile.TemporaryDirectory() as folder:
        if not path.is_file():
            complete = Path(folder) / "mlflow.db"
            mlflow.MlflowClient(f"sqlite:///{complete}").search_experiments()
            write_atomically(path, complete.read_bytes())


class Run:
    """The run of a training in MLflow. Without a record it does nothing, as on all ranks but 0.

    As a context manager it closes itself: as FINISHED, as FAILED on an exception, and as KILLED on
    Ctrl-C or sys.exit, by which a signal ends a stage.
    """

    def __init__(
        self, path: Optional[Path] = None, uri: Optional[str] = None, live: bool = False
    ) -> None:
        """Prepare to send the run.

        Args:
            path: the record of the run. If None, the run does nothing.
            uri: the address of the server or local store. If None, `choose_uri` gives it.
            live: whether this process trains. Then a thread sends the points while it runs, with
                the use of the machine. Otherwise the curves on disk beside the record are sent, at
                the end.
        """
        self._path = path
        self._record = read_record(path) if path else {}
        self._uri = uri or choose_uri()
        self._client: Any = None  # None until the server has told the last steps
        self._run_id = ""
        self._last_steps: Dict[str, int] = {}  # Last step of each metric that the server had
        self._points: List[Point] = []
        self._next_point = 0  # First point that was not sent
        self._next_item = 0  # First item of the record that the server lacks
        self._error: Optional[Exception] = None
        self._closing = threading.Event()
        self._sender: Optional[threading.Thread] = None
        if path and live:
            self._sender = threading.Thread(target=self._send_until_closed, daemon=True)
            self._sender.start()

    def log_points(self, prefix: str, rows: Iterable[Row]) -> None:
        """Add points to the curves `prefix/...`, without waiting for the server.

        Args:
            prefix: `train` or `val`.
            rows: the values at each step, by name, and the `step`.
        """
        self._points += [(prefix, row) for row in rows]

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add metrics of one step."""
        values = {name: float(value) for name, value in metrics.items()}
        self._add({"metrics": values, "step": step, "time": get_time_ms()})

    def add_artifact(self, path: Path, folder: str = "") -> None:
        """Add a file, or all files of a folder, to the folder `folder` of the run's artifacts."""
        self._add({"artifact": str(path.resolve()), "folder": folder})

    def describe(self, result: str, note: str) -> None:
        """Append a result to the run's name, and show a note in Markdown above its metrics."""
        name = f"{self._record.get('name', '')}{SEPARATOR}{result}"
        self.set_tags({"mlflow.runName": name, "mlflow.note.content": note})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set further tags. All but MLflow's own get the prefix `superglue.`."""
        prefixes = {name: "" if name.startswith("mlflow.") else TAG_PREFIX for name in tags}
        self._add({"tags": {f"{prefixes[name]}{name}": text for name, text in tags.items()}})

    def register_model(self, weights: Path, description: Path, step: int = 0) -> None:
        """Register the weights and their JSON as a version of the model."""
        self._add({"model": [str(weights.resolve()), str(description.resolve())], "step": step})

    def close(self, status: str = "FINISHED") -> bool:
        """Send what is left, and end the run. A line says if not everything has arrived.

        Args:
            status: FINISHED, FAILED or KILLED.

        Returns:
            Whether everything has arrived.
        """
        if self._path is None:
            return True
        path, self._path = self._path, None
        if self._sender:
            self._record.update(status=status, end_time=get_time_ms())
            write_json(path, self._record)
            self._closing.set()
            self._sender.join(SHORT_WAIT_SECONDS if self._error else LONG_WAIT_SECONDS)
            if self._sender.is_alive() and self._error is None:
                self._error = TimeoutError(f"not done after {LONG_WAIT_SECONDS:.0f} s")
        else:
            for prefix, rows in read_curves(path.parent):
                self.log_points(prefix, rows)
            self._try_to_send(is_last=True)
        if self._error is None:
            self._record["sent"][redact(self._uri)] = len(self._record["items"])
            write_json(path, self._record)
            return True
        reason = textwrap.shorten(str(self._error) or type(self._error).__name__, 200)
        command = f"python -m pipeline.tracking send --reports {shlex.quote(str(path.parent))}"
        text = f"{self._uri} did not get all of this run ({reason}); to send it, type {command}"
        print(f"tracking: {redact(text)}", file=sys.stderr, flush=True)
        return False

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind, error, trace) -> None:
        is_killed = kind and issubclass(kind, (KeyboardInterrupt, SystemExit))
        self.close("FINISHED" if kind is None else "KILLED" if is_killed else "FAILED")

    def _add(self, item: Record) -> None:
        """Keep an item in the record, so that `send` has it as well. Closing sends it."""
        if self._path:
            self._record["items"].append(item)
            write_json(self._path, self._record)

    def _send_until_closed(self) -> None:
        pause = 0.0
        is_last = False
        while not is_last:
            is_last = self._closing.wait(pause)
            self._try_to_send(is_last)
            pause = RETRY_SECONDS if self._error else SEND_SECONDS

    def _try_to_send(self, is_last: bool) -> None:
        try:
            self._send(is_last)
            self._error = None
        except Exception as error:  # Whatever MLflow raises, the training goes on
            self._error = error
            self._client = None  # The server may have stored what it did not confirm

    def _send(self, is_last: bool) -> None:
        """Send new points, and at the end also the items and the state of the run."""
        import mlflow
        from mlflow.entities import Metric

        if self._client is None:
            client, experiment = connect(self._uri)
            self._run_id = self._find_or_create(client, experiment)
            if self._sender and mlflow.active_run() is None:  # Of this thread
                mlflow.start_run(self._run_id, log_system_metrics=True)
            self._last_steps = read_last_steps(client, self._run_id)
            self._next_point = 0
            self._client = client
        now = get_time_ms()
        points = self._points[self._next_point :]
        metrics = [
            Metric(f"{prefix}/{name}", value, now, int(row["step"]))
            for prefix, row in points
            for name, value in row.items()
            if name != "step" and not math.isnan(value)
            if row["step"] > self._last_steps.get(f"{prefix}/{name}", -1)
        ]
        if metrics:
            self._client.log_batch(self._run_id, metrics)
        self._next_point += len(points)
        if not is_last:
            return
        for item in self._record["items"][self._next_item :]:
            self._send_item(item)
        if self._sender:
            mlflow.end_run(self._record["status"])
        # A process that was killed could not write its state.
        state = self._record.get("status", "KILLED")
        self._client.set_terminated(self._run_id, state, self._record.get("end_time"))

    def _find_or_create(self, client: Any, experiment: str) -> str:
        """Return the id of the run of the record."""
        from mlflow.entities import Param

        record = self._record
        query = f"tags.`{KEY_TAG}` = '{record['key']}'"
        runs = client.search_runs([experiment], query, max_results=1)
        if runs:
            self._next_item = record["sent"].get(redact(self._uri), 0)
            run_id = runs[0].info.run_id
        else:
            tags = {KEY_TAG: record["key"]}
            run_id = client.create_run(experiment, record["time"], tags, record["name"]).info.run_id
        # Also of a run that exists: the server may have failed after it was created.
        client.log_batch(run_id, params=[Param(*pair) for pair in record["params"].items()])
        return run_id

    def _send_item(self, item: Record) -> None:
        from mlflow.entities import Metric, RunTag

        client = self._client
        if "metrics" in item:
            # MLflow stores a point once that arrives again with the same time.
            values = item["metrics"].items()
            metrics = [Metric(name, value, item["time"], item["step"]) for name, value in values]
            client.log_batch(self._run_id, metrics)
        elif "tags" in item:
            tags = [RunTag(name, text) for name, text in item["tags"].items()]
            client.log_batch(self._run_id, tags=tags)
        elif "artifact" in item:
            path = Path(item["artifact"])
            send = client.log_artifacts if path.is_dir() else client.log_artifact
            send(self._run_id, str(path), item["folder"] or None)
        else:
            register(client, self._run_id, item["model"], item["step"])


def get_time_ms() -> int:
    """Return the present time in milliseconds since 1970, MLflow's unit."""
    return int(1000 * time.time())


def read_record(path: Path) -> Record:
    """Read the record of a run, or return {} if there is none.

    Raises:
        RequestError: If the file cannot be read.
    """
    return read_json(path, "") if path.is_file() else {}


def read_last_steps(client: Any, run_id: str) -> Dict[str, int]:
    """Return the last step of each metric of the curves that a run has on the server."""
    prefixes = tuple(f"{name}/" for name in CURVES)
    return {
        name: max(point.step for point in client.get_metric_history(run_id, name))
        for name in client.get_run(run_id).data.metrics
        if name.startswith(prefixes)
    }


def register(client: Any, run_id: str, files: List[str], step: int) -> None:
    """Log weights as a model of a run, and register a version of it, once for each step.

    Args:
        client: an `MlflowClient`.
        run_id: the id of the run.
        files: the weights and their JSON.
        step: the step of the training at which the weights were taken.
    """
    from mlflow import pyfunc
    from mlflow.models import Model

    versions = client.search_model_versions(f"run_id = '{run_id}'")
    if any(version.tags.get("step") == str(step) for version in versions):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # MLflow asks for an example of an input
        logged = Model.log(
            None, pyfunc, name=MODEL, run_id=run_id, step=step, **describe_model(files)
        )
    if not client.search_registered_models(f"name = '{MODEL}'"):
        client.create_registered_model(MODEL, description="SuperGlue on SIFT keypoints")
    client.create_model_version(
        MODEL,
        f"models:/{logged.model_id}",
        run_id,
        {"step": str(step)},
        model_id=logged.model_id,
        await_creation_for=0,
    )


def describe_model(files: List[str]) -> Dict[str, Any]:
    """Return the arguments with which MLflow saves a model.

    Args:
        files: the weights and their JSON.

    Raises:
        RequestError: If the weights cannot be read.
    """
    import superglue_sift
    from pipeline import served_model

    threshold = superglue_sift.Matcher.load(files[0], device="cpu").threshold
    pins = provenance.get_release_versions(
        ("mlflow", "numpy", "opencv-python", "safetensors", "torch")
    )
    return {
        "python_model": str(served_model.__file__),
        "code_paths": [str(Path(superglue_sift.__file__).parent)],
        "artifacts": dict(zip((served_model.WEIGHTS, "description"), files)),
        "signature": served_model.make_signature(threshold),
        "pip_requirements": [f"{name}=={version}" for name, version in pins.items()],
    }


def open_run(
    folder: Path,
    params: Mapping[str, Any],
    training: str,
    resume: bool = False,
    tags: Optional[Mapping[str, str]] = None,
    enabled: bool = True,
    name: str = "",
) -> Run:
    """Open a run of a training, or continue its interrupted run.

    Args:
        folder: the folder of reports, which gets RECORD.
        params: the parameters of the run. They may be nested: {"train": {"lr": 1}} becomes
            `train.lr`.
        training: the identity of the training, by which `attach` finds the run.
        resume: whether to continue the run of the record, if it is of this training.
        tags: further tags of the run.
        enabled: False on every rank but the first, where the run does nothing.
        name: the name of the run. If "", the run is named by the time.
    """
    if not enabled:
        return Run()
    git = provenance.read_git_state()
    flat_params = {key: str(value) for key, value in flatten(params).items()}
    all_tags = {
        **(tags or {}),
        "git.dirty": git["dirty"],
        "params": compute_json_digest(flat_params),
        "world_size": os.environ.get("WORLD_SIZE", "1"),
        "mlflow.source.name": f"pipeline.{os.environ.get('DVC_STAGE') or 'train'}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git["commit"],
        "mlflow.user": os.environ.get("USER", str(os.getuid())),
    }
    path = folder / RECORD
    if not (resume and read_record(path).get("training") == training):
        name = os.environ.get("MLFLOW_RUN_NAME") or os.environ.get("DVC_EXP_NAME") or name
        record = {
            "key": uuid.uuid4().hex,
            "training": training,
            "name": name or time.strftime("%Y-%m-%d %H.%M"),
            "time": get_time_ms(),
            "params": {**flat_params, **provenance.describe_machine()},
            "items": [],
            "sent": {},
        }
        write_json(path, record)
    run = Run(path, live=True)
    run.set_tags(all_tags)  # Also of a resumed run, which may have another number of processes
    return run


def attach(path: Path, training: Optional[str]) -> Run:
    """Add to the run of a training from another stage. Without such a run, do nothing.

    Args:
        path: RECORD of the training.
        training: the identity of the training, from the description of its model.
    """
    return Run(path if training and read_record(path).get("training") == training else None)


def read_curves(reports: Path) -> Iterator[Tuple[str, List[Row]]]:
    """Yield the prefix and the points of each curve in the folder of reports."""
    for name, file in CURVES.items():
        path = reports / "curves" / file
        if path.is_file():
            with path.open(newline="") as stream:
                rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(stream)]
            yield name, rows


def serve_pages(host: str, port: int) -> int:
    """Print the address of the runs, and become MLflow's server if the store is local.

    Raises:
        RequestError: If the server or store does not answer.
    """
    uri = choose_uri()
    is_local = get_database_path(uri) is not None
    try:
        _, experiment = connect(uri)
    except Exception as error:  # A wrong address, or an error of MLflow, HTTP or a database
        raise errors.RequestError(redact(f"{uri}: {error}")) from None
    server = f"http://127.0.0.1:{port}" if is_local else redact(uri)
    print(f"{server}/#/experiments/{experiment}/runs?workflowType={WORKFLOW}", flush=True)
    if not is_local:
        return 0
    # The address is in the environment, so that `ps` shows no password.
    os.environ["MLFLOW_BACKEND_STORE_URI"] = uri
    os.environ.setdefault("MLFLOW_UVICORN_OPTS", "--log-level warning")
    words = ["mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    return os.execv(sys.executable, [sys.executable, "-m", *words])


def main(argv: Optional[List[str]] = None) -> int:
    """Send what the server lacks, or start MLflow's pages. Return the exit code."""
    parser = errors.make_parser("pipeline.tracking", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sender = commands.add_parser("send", help="send what the server lacks of the last training")
    sender.add_argument("--reports", type=Path, default=Path("reports/train"), help="its reports")
    sender.add_argument("--to", metavar="URI", help="another address")
    pages = commands.add_parser("ui", help="MLflow's pages on the store of this clone")
    pages.add_argument("--host", default="127.0.0.1", help="0.0.0.0: also for other machines")
    pages.add_argument("--port", type=int, default=5000)
    args = parser.parse_args(argv)
    if args.command == "ui":
        return serve_pages(args.host, args.port)
    record = args.reports / RECORD
    if not record.is_file():
        raise errors.RequestError(f"{record}: no such file; a training writes it")
    uri = args.to or choose_uri()
    if not Run(record, uri).close():
        return 1
    print(f"{redact(uri)} has all of this run")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
