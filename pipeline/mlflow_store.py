"""Send the events of a run to MLflow 3.1 or later, and choose the best model there."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sqlite3
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from pipeline import errors, provenance
from superglue_sift.files import write_atomic

MODEL = "superglue-sift"  # name of the model in the registry, and of the experiment
CHAMPION = "champion"  # alias of the best version
EVALUATION = "test"  # for the stage `evaluate`: prefix of its metrics, and folder of its files
MIN_SCENES = 6  # photographs that a comparison needs, as in the evaluation
LIMIT = 5  # px, the limit of the AUC that decides
SEPARATOR = " · "  # stands between the name of a run and its result
TAGS = "superglue."  # how names of the project's tags begin
KEY_TAG = f"{TAGS}run_key"  # the tag by which a run is found, from the header of its log
OWN_STORE = "sqlite:///mlflow.db"  # the store of a clone
ARTIFACTS = "mlartifacts"  # folder of the files of all runs, beside a local store

Event = Dict[str, Any]  # a line of the log (`tracking.EventLog`)


# --- no password is printed, stored or sent

# The login in front of the name of a server or a database
_LOGIN = re.compile(r"(?<=://)[^/\s'\"<>][^\s'\"<>]*@")


def redact(text: str) -> str:
    """Return a text without the logins in its addresses."""
    return _LOGIN.sub("", text)


def say(text: str) -> None:
    """Print one line to stderr."""
    print(f"tracking: {redact(text)}", file=sys.stderr, flush=True)


# --- addresses


def database(uri: str) -> Optional[Path]:
    """Return the file of a SQLite address, which is relative to the user's clone.

    Return None for the address of a server.
    """
    scheme, _, path = uri.partition(":///")
    return provenance.main_root() / path if scheme == "sqlite" and path else None


def shorten(path: Path) -> str:
    """Return a path for a log. A path in the user's clone is relative to the clone."""
    path = path.resolve()
    root = provenance.main_root().resolve()
    return str(path.relative_to(root) if root in path.parents else path)


def place_of(uri: str) -> str:
    """Return an address as logs name it, without a password.

    The store of a clone has no folder in it, because a clone may be copied or moved.
    """
    return OWN_STORE if database(uri) == database(OWN_STORE) else redact(uri)


def experiment_name() -> str:
    """Return MLFLOW_EXPERIMENT_NAME, or the name of the project's experiment if it is not set."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or MODEL


def reason_of(error: Exception) -> str:
    """Return the message of an error on one line of at most 200 characters, without passwords."""
    return textwrap.shorten(redact(str(error)) or type(error).__name__, 200, placeholder="...")


# --- MLflow, 3.1 and later

# Columns of a local store that hold paths of artifacts
PATHS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
)
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds; a server may store a file elsewhere meanwhile
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the sender tries again
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
VIEW_TAG = "mlflow.sharedViewState.results"
# MLflow's table of runs at the address that `ui` prints. MLflow 3.1 shows an error if a key is
# missing.
VIEW = {
    "selectedColumns": [
        "params.`train.lr`",
        "params.`train.steps`",
        "metrics.`val/f1`",
        f"metrics.`{EVALUATION}/auc_5`",
    ],
    "orderByKey": "attributes.start_time",
    "orderByAsc": False,
    "searchFilter": "",
    "startTime": "ALL",
    "lifecycleFilter": "Active",
    "modelVersionFilter": "All Runs",
    "datasetsFilter": [],
    "runsPinned": [],
    "runsHidden": [],
    "runsHiddenMode": "FIRST_10_RUNS",
    "groupBy": None,
    "runsExpanded": {},
    "groupsExpanded": {},
    "runsVisibilityMap": {},
    "chartsSearchFilter": "",
}
ABOUT_MODEL = (
    "SuperGlue on SIFT keypoints. Each version is the best model of one training. The alias"
    f" `{CHAMPION}` belongs to the first version, until another one is better on the same pairs of"
    " photographs: the 95 % interval of the difference of AUC@5 lies above 0, over"
    f" {MIN_SCENES} photographs or more. A version's tag `{CHAMPION}` says how it compared."
)


def open_experiment(uri: str, name: str) -> Tuple[Any, str]:
    """Open the server or local store. Return a client, and the id of the experiment.

    The experiment is created if it does not exist. Raises RequestError for an address without a
    scheme.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    import mlflow
    from mlflow.tracking import MlflowClient

    logging.disable(logging.INFO)  # alembic, which changes tables, sets its own level and handler
    if "://" not in uri and not uri.startswith("databricks"):
        raise errors.RequestError(f"not an address; write http://{uri} or sqlite:///FILE")
    # MLflow logs a model to the global address and experiment, not to those of a client
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    path = database(uri)
    place = None
    if path:
        if not path.is_file():
            create_database(path)
        # By default MLflow uses the current directory, which may be a temporary copy of DVC
        place = bind_artifacts(path, name)
    client = MlflowClient(uri, uri)
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name, place)
    client.set_experiment_tag(number, VIEW_TAG, json.dumps(VIEW))
    mlflow.set_experiment(experiment_id=number)
    return client, number


def create_database(path: Path) -> None:
    """Create the file of a local store.

    MLflow needs seconds for its tables. They are complete before the file has its name, so a
    process that is killed meanwhile leaves no half of a store.
    """
    from mlflow.tracking import MlflowClient

    with tempfile.TemporaryDirectory() as folder:
        complete = Path(folder) / "mlflow.db"
        MlflowClient(f"sqlite:///{complete}").search_experiments()
        if not path.is_file():  # another process may have done the same
            write_atomic(path, complete.read_bytes())


def bind_artifacts(path: Path, name: str) -> str:
    """Put the files of an experiment and its runs beside the local store `path`.

    Returns the address of that folder. MLflow stores whole paths. In a clone that was copied or
    moved, or that a container sees at another path, they name the old folder.
    """
    place = (path.resolve().parent / ARTIFACTS / name).as_uri()
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as store, store:
        query = "SELECT artifact_location FROM experiments WHERE name = ?"
        (old,) = next(store.execute(query, (name,)), (place,))
        # only the project's own folder of artifacts is renamed, in every table
        if old == place or not old.endswith(f"/{ARTIFACTS}/{place.rpartition('/')[2]}"):
            return place
        for table, column in PATHS:
            store.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?)"
                f" WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                (place, len(old) + 1, old, len(old) + 1, f"{old}/"),
            )
    return place


class MlflowRun:
    """One run in MLflow, found or created by the header of its log. Any event may be sent again."""

    def __init__(self, uri: str, header: Event) -> None:
        self._client, experiment = open_experiment(uri, header["experiment"])
        query = f"tags.`{KEY_TAG}` = '{header['run']}'"
        runs = self._client.search_runs([experiment], query, max_results=1)
        self.is_new = not runs
        if self.is_new:
            key = {KEY_TAG: header["run"]}
            runs = [self._client.create_run(experiment, header["time"], key, header["name"])]
        self.run_id = runs[0].info.run_id

    def send(self, events: List[Event]) -> None:
        """Send metrics, params and tags, then files, the model and the state of the run."""
        from mlflow.entities import Metric, Param, RunTag

        metrics: List[Metric] = []
        params: Dict[str, str] = {}
        tags: Dict[str, str] = {}
        for event in events:
            for name, value in event.get("metrics", {}).items():
                metrics.append(Metric(name, value, event["time"], event["step"]))
            params.update(event.get("params", {}))
            for name, text in event.get("tags", {}).items():
                tags[name if name.startswith(("mlflow.", TAGS)) else f"{TAGS}{name}"] = text
        self._client.log_batch(
            self.run_id,
            metrics,
            [Param(*item) for item in params.items()],
            [RunTag(*item) for item in tags.items()],
        )
        root = provenance.main_root()
        for event in events:
            if "artifact" in event:
                path = root / event["artifact"]
                send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
                send(self.run_id, str(path), event["folder"] or None)
            if "model" in event:
                self._register([str(root / name) for name in event["model"]], event["step"])
            if "compare" in event:
                self._compare_with_champion(root / event["compare"])
            if "end" in event:
                self._client.set_terminated(self.run_id, event["end"], event["time"])

    def _versions(self) -> List[Any]:
        """Return the versions of the registered model that this run has."""
        return [*self._client.search_model_versions(f"run_id = '{self.run_id}'")]

    def _register(self, files: List[str], step: int) -> None:
        """Log the weights as a model of the run, and register a version.

        The first version becomes champion. A model of a step that is registered is left as it is.
        """
        from mlflow import pyfunc
        from mlflow.models import Model

        described = describe_model(files)  # this comes first, to check the file
        if any(version.tags.get("step") == str(step) for version in self._versions()):
            return
        # log the model of the run
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # MLflow asks for an example of an input
            logged = Model.log(None, pyfunc, name=MODEL, run_id=self.run_id, step=step, **described)
        # make the registered model if it is missing, and its new version
        if not self._client.search_registered_models(f"name = '{MODEL}'"):
            self._client.create_registered_model(MODEL, description=ABOUT_MODEL)
        source = f"models:/{logged.model_id}"
        tags = {"step": str(step)}
        version = self._client.create_model_version(
            MODEL, source, self.run_id, tags, model_id=logged.model_id, await_creation_for=0
        ).version
        self._describe(version)
        champion = self._champion()
        if champion is None or champion.run_id == self.run_id:
            self._judge(version, True, "the first run")
        else:
            self._judge(version, False, "not yet evaluated")

    def _describe(self, version: str) -> None:
        """Write on the page of a version what it is: its AUC and its run."""
        run = self._client.get_run(self.run_id)
        name, _, result = str(run.info.run_name).partition(SEPARATOR)
        text = f"{result or 'Not yet evaluated'}, run {name}"
        self._client.update_model_version(MODEL, version, text)

    def _champion(self) -> Any:
        """Return the version with the alias, or None if there is none."""
        number = self._client.get_registered_model(MODEL).aliases.get(CHAMPION)
        return None if number is None else self._client.get_model_version(MODEL, number)

    def _judge(self, version: str, is_better: bool, reason: str) -> None:
        """Give the alias to a better version. Say on the page of the version how it compared."""
        if is_better:
            self._client.set_registered_model_alias(MODEL, CHAMPION, version)
        verdict = f"{'yes' if is_better else 'no'}: {reason}"
        self._client.set_model_version_tag(MODEL, version, CHAMPION, verdict)

    def _compare_with_champion(self, pairs: Path) -> None:
        """Give the alias to the run's model if it beats the champion on the same pairs."""
        versions = [int(version.version) for version in self._versions()]
        if not versions:
            return
        # find the latest version of this run, and the champion
        version = str(max(versions))
        self._describe(version)
        champion = self._champion()
        if champion is None or champion.run_id == self.run_id:
            return
        # compare on the pairs of the champion's evaluation, if it was evaluated
        path = f"{EVALUATION}/pairs.csv"
        files = [file.path for file in self._client.list_artifacts(champion.run_id, EVALUATION)]
        better = True
        reason = "that version was never evaluated"
        with tempfile.TemporaryDirectory() as folder:
            if path in files:
                theirs = Path(self._client.download_artifacts(champion.run_id, path, folder))
                better, reason = better_than(pairs, theirs)
        result = f"{reason}; compared with version {champion.version}"
        self._judge(version, better, result)
        if better:
            self._judge(champion.version, False, f"version {version} is better")
        best = version if better else champion.version
        say(f"{MODEL} version {best} is {CHAMPION}; version {version}: {result}")


def better_than(ours: Path, theirs: Path) -> Tuple[bool, str]:
    """Return whether a model is better than another one, and why, from the pairs.csv of both.

    It is better if the 95 % interval of the difference of AUC@5 on the same pairs lies above 0,
    with enough photographs.
    """
    import pandas

    from pipeline.evaluate import metrics

    tables = [pandas.read_csv(path, dtype=str).set_index("matcher") for path in (ours, theirs)]
    nearest, rows = ([table.loc[[name]] for table in tables] for name in ("nn", "superglue"))
    if not nearest[0].equals(nearest[1]):  # the same keypoints give the same nearest neighbours
        return False, "evaluated on other pairs"
    error = next(name for name in rows[0] if name.startswith("error_"))
    areas = [metrics.auc_by_pair(table[error].astype(float), LIMIT) for table in rows]
    scenes = rows[0].set_index("scene").index
    if scenes.nunique() < MIN_SCENES:
        return False, f"too few photographs to compare: {scenes.nunique()} of {MIN_SCENES}"
    gains = pandas.DataFrame({"gain": 100 * (areas[0] - areas[1])}, scenes)
    gain = metrics.summarize(gains, metrics.resample(gains)).loc["gain"]
    return gain.low > 0, (
        f"AUC@{LIMIT} {gain.value:+.1f} points, 95 % interval {gain.low:+.1f} .. {gain.high:+.1f},"
        f" {gain.pairs:.0f} pairs of {scenes.nunique()} photographs"
    )


def use_of_machine() -> Dict[str, float]:
    """Return the use of CPU, memory and NVIDIA's GPUs, under MLflow's names."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

    used: Dict[str, float] = {}
    for kind in (CPUMonitor, GPUMonitor):
        # without a driver or its library this raises errors of various types
        with contextlib.suppress(Exception):
            monitor = kind()
            monitor.collect_metrics()
            used.update(monitor.aggregate_metrics())
    return used


def describe_model(files: List[str]) -> Dict[str, Any]:
    """Return the arguments with which MLflow saves a model. `files` are the weights and their JSON.

    Raises RequestError if the weights cannot be read.
    """
    import superglue_sift
    from pipeline import served_model

    threshold = superglue_sift.Matcher.load(files[0], device="cpu").threshold
    pins = provenance.pin(("mlflow", "numpy", "opencv-python", "safetensors", "torch"))
    return {
        "python_model": str(served_model.__file__),
        "code_paths": [str(Path(superglue_sift.__file__).parent)],
        "artifacts": dict(zip((served_model.WEIGHTS, "description"), files)),
        "signature": served_model.signature(threshold),
        "pip_requirements": [f"{name}=={version}" for name, version in pins.items()],
    }


def show_pages(uri: str, host: str, port: int) -> int:
    """Become MLflow's server on the local store, and print the address of the table of runs.

    For another store, only print the address. Raises RequestError if the store does not answer.
    """
    try:
        _, experiment = open_experiment(uri, experiment_name())
    except Exception as error:  # a wrong address, or an error of MLflow, HTTP or a database
        raise errors.RequestError(f"{redact(uri)}: {reason_of(error)}") from None
    table = f"/#/experiments/{experiment}/runs?viewStateShareKey=results"
    # without this word MLflow 3.17 opens its page for chat models
    table += "&workflowType=machine_learning"
    if database(uri) is None:
        print(f"table of runs: {redact(uri)}{table}")
        return 0
    print(f"table of runs: http://127.0.0.1:{port}{table}")
    print("MLflow takes up to a minute to start; Ctrl-C ends it")
    sys.stdout.flush()
    # The address is in the environment, so that `ps` shows no password
    os.environ["MLFLOW_BACKEND_STORE_URI"] = uri
    # the server prints no line for each request
    os.environ.setdefault("MLFLOW_UVICORN_OPTS", "--log-level warning")
    server = ["mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    return os.execv(sys.executable, [sys.executable, "-m", *server])
