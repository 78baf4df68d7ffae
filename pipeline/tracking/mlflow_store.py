"""Stores the events of a run's log in MLflow, 3.1 and later."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, cast

from pipeline import provenance
from pipeline.tracking.log import Event
from pipeline.tracking.secrets import say

MODEL = "superglue-sift"  # in the model registry
EVALUATION = "test"  # folder of the files of the stage `evaluate` in a run
# Prefix of its metrics. MLflow orders charts by the alphabet: it comes after train and val.
HEADLINE = "verdict"
# Metrics without prefix: columns of MLflow's table of runs show their whole names.
LEADING = ("auc_5", "recall_at_p", "auc_5_gain")
RUN_ID = "{run_id}"  # in a tag: replaced when the run has its id
HIDDEN = "mlflow.superglue."  # prefix of tags that MLflow does not show
KEY_TAG = f"{HIDDEN}run_key"
CHAMPION = "champion"
# Columns of MLflow's table of runs at the address that `make ui` prints. MLflow 3.1 shows an error
# if one of the file's keys is missing.
VIEW = Path(__file__).with_name("results_view.json")
VIEW_TAG = "mlflow.sharedViewState.results"
AT_ONCE = {"metrics": 1000, "params": 100, "tags": 100}  # MLflow's limits for one request
TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
FILE_SECONDS = "300"  # for the answer to a file
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
    """One run in MLflow, found or created by the header of its log. Any event may be sent again."""

    def __init__(self, uri: str, header: Event) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        # MLflow finds artifacts and the source of a model with the global address, not the client's
        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
        self._client = MlflowClient(uri, uri)
        name = header["experiment"]
        experiment = self._client.get_experiment_by_name(name)
        if experiment:
            self._experiment = experiment.experiment_id
        else:
            scheme, _, path = uri.partition(":///")
            # MLflow's default is the current directory, which may be a temporary copy of DVC
            place = (Path(path).resolve().parent / "mlartifacts" / name).as_uri()
            self._experiment = self._client.create_experiment(
                name, place if scheme == "sqlite" else None
            )
        if experiment is None or experiment.tags.get(VIEW_TAG) != VIEW.read_text():
            self._client.set_experiment_tag(self._experiment, VIEW_TAG, VIEW.read_text())
        query = f"tags.`{KEY_TAG}` = '{header['run']}'"
        runs = self._client.search_runs([self._experiment], query, max_results=1)
        self.is_new = not runs
        if self.is_new:
            tags = {**header.get("tags", {}), KEY_TAG: header["run"]}
            run = self._client.create_run(
                self._experiment, header.get("time"), tags, header.get("name")
            )
            runs = [run]
        self.run_id = runs[0].info.run_id

    def send(self, events: List[Event]) -> None:
        """Add metrics, params, tags, data and the state of the run."""
        from mlflow.entities import Metric, Param, RunTag

        metrics = []
        params = []
        tags: Dict[str, str] = {}
        for event in events:
            for name, value in event.get("metrics", {}).items():
                metrics.append(Metric(name, float(value), event["time"], event["step"]))
            params += [Param(*item) for item in event.get("params", {}).items()]
            tags.update({} if "run" in event else event.get("tags", {}))
        run_tags = [RunTag(k, v.replace(RUN_ID, self.run_id)) for k, v in tags.items()]
        items = {"metrics": metrics, "params": params, "tags": run_tags}
        for kind, most in AT_ONCE.items():
            for at in range(0, len(items[kind]), most):
                part: Dict[str, Any] = {kind: items[kind][at : at + most]}
                self._client.log_batch(self.run_id, **part)
        for event in events:
            if "dataset" in event:
                self._log_dataset(event["dataset"])
            if "end" in event:
                self._client.set_terminated(self.run_id, event["end"], event["time"])

    def _log_dataset(self, event: Event) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = json.dumps({"uri": event["source"], "digest": event["digest"]})
        short = event["digest"].rpartition(":")[2][:36]  # MLflow's limit; `source` has all of it
        data = Dataset(event["name"], short, "local", source)
        inputs = [DatasetInput(data, [InputTag("mlflow.data.context", "training")])]
        self._client.log_inputs(self.run_id, datasets=inputs)

    def send_files(self, event: Event) -> None:
        """Send the files of an event, or compare its model."""
        before = os.environ[TIMEOUT]
        os.environ[TIMEOUT] = FILE_SECONDS
        try:
            if "artifact" in event:
                send = self._client.log_artifact
                if Path(event["artifact"]).is_dir():
                    send = self._client.log_artifacts
                send(self.run_id, event["artifact"], event["folder"] or None)
            if "model" in event:
                self._register(event["model"], event["step"])
            if "compare" in event:
                self._compare_with_champion(Path(event["compare"]))
        finally:
            os.environ[TIMEOUT] = before

    def _register(self, files: List[str], step: int) -> None:
        """Log the weights as a model of the run, and register a version. The first is champion."""
        from mlflow.entities import LoggedModelOutput

        from superglue_sift.network.weights import load_model_file

        load_model_file(files[0])  # not every version of MLflow checks it
        done = self._client.search_model_versions(f"run_id = '{self.run_id}'")
        if any(version.tags.get("step") == str(step) for version in done):
            return
        logged = self._client.create_logged_model(
            self._experiment, MODEL, self.run_id, model_type="matcher"
        )
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder) / "model", self.run_id, logged.model_id, files)
            self._client.log_model_artifacts(logged.model_id, f"{folder}/model")
        self._client.finalize_logged_model(logged.model_id, "READY")
        self._client.log_outputs(self.run_id, [LoggedModelOutput(logged.model_id, step)])
        if not self._client.search_registered_models(f"name = '{MODEL}'"):
            self._client.create_registered_model(MODEL)
        version = self._client.create_model_version(
            MODEL,
            f"models:/{logged.model_id}",
            self.run_id,
            {"step": str(step)},
            model_id=logged.model_id,
            await_creation_for=0,
        )
        champion = self._champion()
        if champion is None or champion.run_id == self.run_id:
            self._client.set_registered_model_alias(MODEL, CHAMPION, version.version)

    def _champion(self) -> Any:
        """The version with the alias; None if there is none."""
        number = self._client.get_registered_model(MODEL).aliases.get(CHAMPION)
        return None if number is None else self._client.get_model_version(MODEL, number)

    def _compare_with_champion(self, pairs: Path) -> None:
        """Give the alias to the run's model if it beats the champion on the same pairs."""
        from pipeline.tracking.champion import better_than  # imports numpy

        versions = self._client.search_model_versions(f"run_id = '{self.run_id}'")
        if not versions:
            return
        version = str(max(int(each.version) for each in versions))
        note = self._client.get_run(self.run_id).data.tags.get("mlflow.note.content", "")
        self._client.update_model_version(MODEL, version, note)
        champion = self._champion()
        if champion is None or champion.run_id == self.run_id:
            return
        path = f"{EVALUATION}/pairs.csv"
        files = [file.path for file in self._client.list_artifacts(champion.run_id, EVALUATION)]
        theirs = None
        with tempfile.TemporaryDirectory() as folder:
            if path in files:
                theirs = Path(self._client.download_artifacts(champion.run_id, path, folder))
            better, reason = better_than(pairs, theirs)
        if better:
            self._client.set_registered_model_alias(MODEL, CHAMPION, version)
        result = f"against version {champion.version}: {reason}"
        self._client.set_model_version_tag(MODEL, version, CHAMPION, result)
        best = version if better else champion.version
        say(f"{MODEL} version {best} is {CHAMPION}; version {version} {result}")


def make_monitor(record: Callable[[Dict[str, Any], int], None], last: Dict[str, int]) -> Any:
    """MLflow's monitor of CPU, memory, disk, network and GPUs, which calls `record`.

    last: the last step of each metric, which the monitor continues.
    """
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor("")
    monitor.mlflow_logger = cast(Any, SimpleNamespace(record_metrics=record))
    steps = [step for name, step in last.items() if name.startswith("system/")]
    monitor._logging_step = max(steps, default=-1) + 1
    return monitor


def save_model(folder: Path, run_id: str, model_id: str, files: List[str]) -> None:
    """Write an MLflow model. files: the weights, and their JSON."""
    from mlflow import pyfunc
    from mlflow.models import Model

    import superglue_sift
    from pipeline.tracking import matcher_model

    pins = provenance.pin(("mlflow", "numpy", "opencv-python", "safetensors", "torch"))
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
