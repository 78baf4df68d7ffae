"""Stores the events of a run's log in MLflow (3.1 and later), and samples the machine with it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from pipeline.files import file_sha256
from pipeline.provenance import repro
from pipeline.tracking.log import Event
from pipeline.tracking.secrets import say

MODEL = "superglue-sift"  # in the model registry
SEPARATOR = " · "  # between a run's name and its result
EVALUATION = "test"  # folder of the files of the stage `evaluate` in a run
# Prefix of its metrics. MLflow orders charts by the alphabet: it comes after train and val.
HEADLINE = "verdict"
# Metrics without prefix: columns of MLflow's table of runs show their whole names.
LEADING = ("auc_5", "recall_at_p", "auc_5_gain")
RUN_ID = "{run_id}"  # in a tag: replaced when the run has its id
HIDDEN = "mlflow.superglue."  # prefix of tags that MLflow does not show
USAGE = """Two images in, matches out. `champion` is the best so far:

    import mlflow
    model = mlflow.pyfunc.load_model("models:/NAME@champion")
    model.predict([{"image0": "<base64 of a file>", "image1": "<base64 of a file>"}])

or `mlflow models serve -m models:/NAME@champion --env-manager local` and `POST /invocations`
with `{"dataframe_records": [{"image0": ..., "image1": ...}]}`.
"""
COLUMNS = (*LEADING, "val/f1")
VIEW_TAG = "mlflow.sharedViewState.results"
NOTE_TAG = "mlflow.note.content"
KEY_TAG = f"{HIDDEN}run_key"
CHAMPION = "champion"
WEIGHTS_TAG = f"{HIDDEN}weights.sha256"
BYTES_PER_SECOND = 50_000  # of the slowest network on which files arrive in the first try
METRICS_AT_ONCE = 1000  # MLflow's limits for one request
PARAMS_AT_ONCE = 100
DIGEST_LENGTH = 36
TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
ENVIRONMENT = {
    TIMEOUT: "5",  # seconds, for small requests
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the sender tries again
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MlflowStore:
    """One run in MLflow. Sending an event again has no effect."""

    def __init__(self, uri: str) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        # MLflow finds artifacts and the source of a model with the global address, not the client's
        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self._uri = uri
        self.run_id = ""
        self._sent: Set[Tuple[str, int, int]] = set()  # place, size and time of files
        self._models = tempfile.TemporaryDirectory()  # kept from try to try

    def open(self, header: Event) -> bool:
        """Find or create the run of a log. True if it is new to this store."""
        experiment = self._experiment(header["experiment"])
        known = self._client.search_runs(
            [experiment], f"tags.`{KEY_TAG}` = '{header['run']}'", max_results=1
        )
        if known:
            self.run_id = known[0].info.run_id
        else:
            tags = {**header.get("tags", {}), KEY_TAG: header["run"]}
            new = self._client.create_run(experiment, header.get("time"), tags, header.get("name"))
            self.run_id = new.info.run_id
        return not known

    def _experiment(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        if known is None:
            scheme, _, path = self._uri.partition(":///")
            # MLflow's default is the current directory, which may be a temporary copy of DVC
            place = (
                (Path(path).resolve().parent / "mlartifacts" / name).as_uri()
                if scheme == "sqlite"
                else None
            )
            tags = {"mlflow.experimentKind": "custom_model_development", VIEW_TAG: view()}
            return self._client.create_experiment(name, place, tags)
        if known.tags.get(VIEW_TAG) != view():
            self._client.set_experiment_tag(known.experiment_id, VIEW_TAG, view())
        return known.experiment_id

    def send(self, events: List[Event]) -> None:
        """Add metrics, params, tags, data and the state of the run, in order."""
        from mlflow.entities import Metric

        points = []
        for event in events:
            for name, value in event.get("metrics", {}).items():
                points.append(Metric(name, float(value), event["time"], event["step"]))
        for at in range(0, len(points), METRICS_AT_ONCE):
            self._client.log_batch(self.run_id, metrics=points[at : at + METRICS_AT_ONCE])
        for event in events:
            if "params" in event:
                self._begin(event["params"])
            if "tags" in event and "run" not in event:
                self._tag(event["tags"])
            if "dataset" in event:
                self._log_dataset(event["dataset"])
            if "end" in event:
                self._client.set_terminated(self.run_id, event["end"], event.get("time"))

    def _begin(self, params: Dict[str, str]) -> None:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client.update_run(self.run_id, status="RUNNING")
        items = [Param(key, value) for key, value in params.items()]
        for at in range(0, len(items), PARAMS_AT_ONCE):
            try:
                self._client.log_batch(self.run_id, params=items[at : at + PARAMS_AT_ONCE])
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise  # else a resumed run changed a parameter, which keeps its first value

    def _tag(self, tags: Dict[str, str]) -> None:
        from mlflow.entities import RunTag

        items = [RunTag(key, value.replace(RUN_ID, self.run_id)) for key, value in tags.items()]
        self._client.log_batch(self.run_id, tags=items)

    def _log_dataset(self, event: Event) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = json.dumps({"uri": event["source"], "digest": event["digest"]})
        short = event["digest"].rpartition(":")[2][:DIGEST_LENGTH]  # `source` has the whole digest
        profile = json.dumps({"digest": event["digest"]})
        data = Dataset(event["name"], short, "local", source, profile=profile)
        tags = [InputTag("mlflow.data.context", "training")]
        self._client.log_inputs(self.run_id, datasets=[DatasetInput(data, tags)])

    def send_files(self, event: Event, patience: float) -> None:
        """Send the files of an event, or compare its model.

        Uploads may take `patience` times as long as those of a first try. This process sends a file
        once to a place, so a further try continues where one failed.
        """
        if "artifact" in event:
            place = self._client.get_run(self.run_id).info.artifact_uri
            self._upload(Path(event["artifact"]), str(place), event.get("folder") or "", patience)
        if "model" in event:
            self._register(event["model"], patience)
        if "compare" in event:
            self._compare_with_champion(event["compare"])

    def _upload(self, path: Path, place: str, folder: str, patience: float) -> None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        store = get_artifact_repository(place)
        for file in files_below(path):
            inside = file.parent.relative_to(path).parts if path.is_dir() else ()
            target = "/".join(filter(None, (folder, *inside)))
            about = file.stat()
            key = (f"{place}/{target}/{file.name}", about.st_size, about.st_mtime_ns)
            if key not in self._sent:
                with request_timeout(patience * seconds_for(about.st_size)):
                    store.log_artifact(str(file), target or None)
                self._sent.add(key)

    def _register(self, event: Event, patience: float) -> None:
        """Log the weights as a model of the run, and register a version. The first is champion."""
        from superglue_sift.weights import load_model_file

        load_model_file(event["files"][0])  # not every version of MLflow checks it
        name = event["name"]
        tags = {"step": str(event["step"]), WEIGHTS_TAG: file_sha256(Path(event["files"][0]))}
        self._tag({WEIGHTS_TAG: tags[WEIGHTS_TAG]})
        done = self._client.search_model_versions(f"run_id = '{self.run_id}'")
        if any(version.tags.get("step") == tags["step"] for version in done):
            return
        model_id = self._log_model(event, tags, patience)
        if not self._client.search_registered_models(f"name = '{name}'"):
            self._client.create_registered_model(name, description=USAGE.replace("NAME", name))
        version = self._client.create_model_version(
            name, f"models:/{model_id}", self.run_id, tags, model_id=model_id, await_creation_for=0
        )
        champion = self._champion(name)
        if champion is None or champion.run_id == self.run_id:
            self._client.set_registered_model_alias(name, CHAMPION, version.version)

    def _log_model(self, event: Event, tags: Dict[str, str], patience: float) -> str:
        """The id of the run's model of this step: complete, begun by an earlier try, or new."""
        from mlflow.entities import LoggedModelOutput

        experiment = self._client.get_run(self.run_id).info.experiment_id
        known = self._client.search_logged_models([experiment], f"source_run_id = '{self.run_id}'")
        same = [model for model in known if tags.items() <= model.tags.items()]
        if same:
            model = same[0]
        else:
            model = self._client.create_logged_model(
                experiment, event["name"], self.run_id, tags, model_type="matcher"
            )
        if model.status == "READY":
            return model.model_id
        folder = Path(self._models.name) / model.model_id
        if not (folder / "MLmodel").exists():
            save_model(folder, self.run_id, model.model_id, event["files"])
        self._upload(folder, model.artifact_location, "", patience)
        self._client.finalize_logged_model(model.model_id, "READY")
        self._client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, event["step"])])
        return model.model_id

    def _champion(self, name: str) -> Optional[Any]:
        """The version with the alias; None if there is none."""
        version = self._client.get_registered_model(name).aliases.get(CHAMPION)
        return None if version is None else self._client.get_model_version(name, version)

    def _compare_with_champion(self, event: Event) -> None:
        """Give the alias to the run's model if it beats the champion on the same pairs."""
        from pipeline.tracking.champion import better_than  # imports numpy

        name = event["name"]
        versions = self._client.search_model_versions(f"run_id = '{self.run_id}'")
        if not versions:
            return
        version = max(versions, key=lambda version: int(version.version)).version
        note = self._client.get_run(self.run_id).data.tags.get(NOTE_TAG, "")
        self._client.update_model_version(name, version, note)
        champion = self._champion(name)
        if champion is None or champion.run_id == self.run_id:
            self._describe(name, version, note)
            return
        files = self._client.list_artifacts(champion.run_id, EVALUATION)
        path = f"{EVALUATION}/pairs.csv"
        theirs = None
        with tempfile.TemporaryDirectory() as folder:
            if any(file.path == path for file in files):
                theirs = Path(self._client.download_artifacts(champion.run_id, path, folder))
            better, reason = better_than(Path(event["pairs"]), theirs)
        if better:
            self._client.set_registered_model_alias(name, CHAMPION, version)
            self._describe(name, version, note)
        result = f"against version {champion.version}: {reason}"
        self._client.set_model_version_tag(name, version, CHAMPION, result)
        best = version if better else champion.version
        say(f"{name} version {best} is {CHAMPION}; version {version} {result}")

    def _describe(self, name: str, version: Any, note: str) -> None:
        """Describe the registered model: its champion, the first line of its note, and the
        usage.
        """
        text = f"Version {version} is `{CHAMPION}`. {note.splitlines()[0]}\n\n" if note else ""
        self._client.update_registered_model(name, text + USAGE.replace("NAME", name))


class Machine:
    """Samples CPU, memory, disk, network and GPUs by MLflow's monitors, every 10 s by default."""

    def __init__(self, last_steps: Dict[str, int]) -> None:
        """last_steps: of the metrics so far, to continue their steps."""
        from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        self._monitor = SystemMetricsMonitor("")
        self._interval = MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() or 10.0
        self._step = max(
            (s + 1 for n, s in last_steps.items() if n.startswith("system/")), default=0
        )
        self._last = time.monotonic()

    def sample(self, record: Callable[[Dict[str, Any], int], None]) -> None:
        """Call `record(metrics, step)` when the next sample is due."""
        if time.monotonic() < self._last + self._interval:
            return
        self._last = time.monotonic()
        with contextlib.suppress(Exception):  # a driver that fails: of various types
            self._monitor.collect_metrics()
            metrics = self._monitor.aggregate_metrics()
            record({f"system/{name}": value for name, value in metrics.items()}, self._step)
            self._step += 1
            for monitor in self._monitor.monitors:
                monitor.clear_metrics()


def files_below(path: Path) -> List[Path]:
    """The file itself, or all files of a folder."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def seconds_for(size: int) -> float:
    """Seconds that an upload of `size` bytes may take."""
    return size / BYTES_PER_SECOND


@contextlib.contextmanager
def request_timeout(seconds: float) -> Iterator[None]:
    """Within, MLflow's requests may take `seconds` more."""
    before = os.environ[TIMEOUT]
    os.environ[TIMEOUT] = str(math.ceil(float(before) + seconds))
    try:
        yield
    finally:
        os.environ[TIMEOUT] = before


def view() -> str:
    """Columns of the experiment's table at the address that `make ui` prints."""
    columns = [f"metrics.`{name}`" for name in COLUMNS]
    columns += [f"params.`{name}`" for name in ("fetch.source", "train.steps", "train.lr")]
    # MLflow 3.1 shows an error if one of these keys is missing
    return json.dumps(
        {
            "selectedColumns": columns,
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
    )


def save_model(folder: Path, run_id: str, model_id: str, files: List[str]) -> None:
    """Write an MLflow model. files: the weights, and their JSON."""
    from mlflow import pyfunc
    from mlflow.models import Model

    import superglue_sift
    from pipeline.tracking import matcher_model

    pins = repro.pinned(("mlflow", "numpy", "opencv-python", "safetensors", "torch"))
    pyfunc.save_model(
        folder,
        python_model=str(matcher_model.__file__),
        code_paths=[str(Path(superglue_sift.__file__).parent)],
        artifacts=dict(zip((matcher_model.WEIGHTS, "description"), files)),
        signature=matcher_model.signature(),
        input_example=matcher_model.input_example(),
        pip_requirements=[f"{name}=={version}" for name, version in pins.items()],
        mlflow_model=Model(run_id=run_id, model_id=model_id),
    )
