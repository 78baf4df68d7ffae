"""Stores the events of a run log in MLflow (3.1 and later)."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from pipeline.errors import RequestError
from pipeline.files import file_sha256
from pipeline.provenance import repro
from pipeline.tracking.run import EVALUATION, HEADLINE, HIDDEN, LEADING, RUN_ID, SEPARATOR, is_gone
from pipeline.tracking.run_log import Event
from pipeline.tracking.shipper import PermanentError, say
from pipeline.tracking.uploads import RETRIES, TIMEOUT, Uploads, files_below, size_of

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
METRICS_AT_ONCE = 1000  # MLflow's limits for one request
PARAMS_AT_ONCE = 100
DIGEST_LENGTH = 36
FINAL_ERRORS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE")
ENVIRONMENT = {
    RETRIES: "1",  # the shipper retries
    TIMEOUT: "5",  # for small requests; `uploads` sets more for files
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MlflowStore:
    """Stores events in MLflow. Sending an event again has no effect."""

    def __init__(self, uri: str) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._uri, self._error = uri, MlflowException
        # MLflow looks up a registered model's source with the global URI, not with the client's
        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self._uploads = Uploads(lambda: self._client.search_experiments(max_results=1))

    def open(self, header: Event, run_id: Optional[str]) -> Tuple[str, bool]:
        """Find or create the run; True if it is new to this store. Raises the client's errors."""
        experiment = self._experiment(header["experiment"])
        known = self._find(experiment, header["run"], run_id)
        if known is None:
            run_id, tags = None, {**header.get("tags", {}), KEY_TAG: header["run"]}
            known = self._client.create_run(experiment, header.get("time"), tags, header.get("name")).info.run_id
        if not header.get("attached"):
            self._claim(experiment, known, header)
        return known, run_id is None

    def _claim(self, experiment: str, run_id: str, header: Event) -> None:
        self._client.update_run(run_id, status="RUNNING")
        self._params(run_id, header.get("params", {}))
        running = self._client.search_runs([experiment], "attributes.status = 'RUNNING'", max_results=1000)
        for run in running:
            if run.info.run_id != run_id and is_gone(run.data.tags):
                self._client.set_terminated(run.info.run_id, "KILLED")

    def _experiment(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        if known is None:
            scheme, _, path = self._uri.partition(":///")
            # MLflow's default is the current directory, which may be a temporary copy of DVC
            place = (Path(path).resolve().parent / "mlartifacts" / name).as_uri() if scheme == "sqlite" else None
            tags = {"mlflow.experimentKind": "custom_model_development", VIEW_TAG: view()}
            try:
                return self._client.create_experiment(name, place, tags)
            except self._error:
                known = self._client.get_experiment_by_name(name)  # created by another process meanwhile
                if known is None:
                    raise
        if known.tags.get(VIEW_TAG) != view():
            self._client.set_experiment_tag(known.experiment_id, VIEW_TAG, view())
        return known.experiment_id

    def _find(self, experiment: str, key: str, run_id: Optional[str]) -> Optional[str]:
        if run_id:
            try:
                run = self._client.get_run(run_id)
                if run.info.lifecycle_stage == "active":
                    return run_id
            except self._error as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        runs = self._client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
        return runs[0].info.run_id if runs else None

    def _params(self, run_id: str, params: Dict[str, str]) -> None:
        from mlflow.entities import Param

        items = [Param(key, value) for key, value in params.items()]
        for at in range(0, len(items), PARAMS_AT_ONCE):
            try:
                self._client.log_batch(run_id, params=items[at : at + PARAMS_AT_ONCE])
            except self._error as error:
                if error.error_code not in FINAL_ERRORS:
                    raise  # else a resumed run changed a param, which keeps its first value

    def last_steps(self, run_id: str) -> Dict[str, int]:
        """The last step of each metric in the store."""
        names = self._client.get_run(run_id).data.metrics
        return {n: max(m.step for m in self._client.get_metric_history(run_id, n)) for n in names}

    def send(self, run_id: str, events: List[Event]) -> None:
        """Add events in order. Raises PermanentError if the store will never accept one of them."""
        from mlflow.entities import Metric

        try:
            measured = ((event, *point) for event in events for point in event.get("metrics", {}).items())
            self._points(run_id, [Metric(name, float(v), event["time"], event["step"]) for event, name, v in measured])
            for event in events:
                self._other(run_id, event)
        except RequestError as error:  # a model that MLflow 3.1 cannot load
            raise PermanentError(str(error)) from error
        except self._error as error:
            if error.error_code in FINAL_ERRORS:
                raise PermanentError(str(error)) from error
            raise

    def _points(self, run_id: str, points: List[Any]) -> None:
        for at in range(0, len(points), METRICS_AT_ONCE):
            self._client.log_batch(run_id, metrics=points[at : at + METRICS_AT_ONCE])

    def _other(self, run_id: str, event: Event) -> None:
        if "artifact" in event:
            self._artifact(run_id, Path(event["artifact"]), event.get("folder") or "")
        if "dataset" in event:
            self._dataset(run_id, event["dataset"])
        if "model" in event:
            self._model(run_id, event["model"])
        if "challenge" in event:
            self._compare_with_champion(run_id, event["challenge"])
        if "tags" in event and "run" not in event:
            self._tags(run_id, event["tags"])
        if "end" in event:
            self._client.set_terminated(run_id, event["end"], event.get("time"))

    def _tags(self, run_id: str, tags: Dict[str, str]) -> None:
        from mlflow.entities import RunTag

        items = [RunTag(key, value.replace(RUN_ID, run_id)) for key, value in tags.items()]
        self._client.log_batch(run_id, tags=items[:PARAMS_AT_ONCE])

    def _artifact(self, run_id: str, path: Path, folder: str) -> None:
        _check_readable(str(path))
        for file, inside in files_below(path):
            place = "/".join(filter(None, (folder, inside)))
            send = functools.partial(self._client.log_artifact, run_id, str(file), place or None)
            self._uploads.file(file, f"{run_id}/{place}", send)

    def _dataset(self, run_id: str, event: Event) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = json.dumps({"uri": event["source"], "digest": event["digest"]})
        short = event["digest"].rpartition(":")[2][:DIGEST_LENGTH]  # the store's limit; `source` has the whole digest
        data = Dataset(event["name"], short, "local", source, profile=json.dumps({"digest": event["digest"]}))
        tags = [InputTag("mlflow.data.context", event["context"])]
        self._client.log_inputs(run_id, datasets=[DatasetInput(data, tags)])

    def _model(self, run_id: str, event: Event) -> None:
        """Log the weights as a model of the run and register a version; the first one becomes `champion`."""
        name, tags = event["name"], {"step": str(event["step"])}
        _check_readable(*event["files"])
        _check_model(event["files"][0])
        self._same_weights(run_id, event["files"][0])
        done = self._client.search_model_versions(f"run_id = '{run_id}'")
        if any(version.tags.get("step") == tags["step"] for version in done):
            return
        model_id = self._logged_model(run_id, event)
        if not self._client.search_registered_models(f"name = '{name}'"):
            self._client.create_registered_model(name, description=USAGE.replace("NAME", name))
        source = f"models:/{model_id}"
        version = self._client.create_model_version(name, source, run_id, tags, model_id=model_id, await_creation_for=0)
        champion = self._champion(name)
        if champion is None or champion.run_id == run_id:
            self._client.set_registered_model_alias(name, CHAMPION, version.version)

    def _champion(self, name: str):
        """The version with the alias; None if there is none."""
        version = self._client.get_registered_model(name).aliases.get(CHAMPION)
        return None if version is None else self._client.get_model_version(name, version)

    def _compare_with_champion(self, run_id: str, event: Event) -> None:
        """Give the alias to the run's model if it beats the champion on the same pairs; print the result."""
        from pipeline.tracking.champion import better_than  # imports numpy

        name = event["name"]
        versions = self._client.search_model_versions(f"run_id = '{run_id}'")
        if not versions:
            return
        version = max(versions, key=lambda version: int(version.version)).version
        note = self._client.get_run(run_id).data.tags.get(NOTE_TAG, "")
        if note:
            self._client.update_model_version(name, version, note)
        champion = self._champion(name)
        if champion is None or champion.run_id == run_id:
            self._describe(name, version, note)
            return
        _check_readable(event["pairs"])
        path, holder = f"{EVALUATION}/pairs.csv", str(champion.run_id)
        evaluated = any(entry.path == path for entry in self._client.list_artifacts(holder, EVALUATION))
        with tempfile.TemporaryDirectory() as folder:
            theirs = Path(self._client.download_artifacts(holder, path, folder)) if evaluated else None
            better, reason = better_than(Path(event["pairs"]), theirs)
        if better:
            self._client.set_registered_model_alias(name, CHAMPION, version)
            self._describe(name, version, note)
        result = f"against version {champion.version}: {reason}"
        self._client.set_model_version_tag(name, version, CHAMPION, result)
        say(f"{name} version {version if better else champion.version} is {CHAMPION}; version {version} {result}")

    def _describe(self, name: str, version: Any, note: str) -> None:
        """Describe the registered model: its champion, with the first paragraph of its note, and the usage."""
        text = f"Version {version} is `{CHAMPION}`. {note.partition(chr(10))[0]}\n\n" if note else ""
        self._client.update_registered_model(name, text + USAGE.replace("NAME", name))

    def _same_weights(self, run_id: str, file: str) -> None:
        """Tag the run with the digest of its weights; copy the evaluation of earlier runs with the same weights.

        DVC does not evaluate the same weights again, so their metrics would be only in the other run. An evaluation of
        this run replaces the copy.
        """
        tags = {WEIGHTS_TAG: file_sha256(file)}
        alike = f"tags.`{WEIGHTS_TAG}` = '{tags[WEIGHTS_TAG]}' AND attributes.run_id != '{run_id}'"
        experiment, order = self._client.get_run(run_id).info.experiment_id, ["attributes.start_time ASC"]
        runs = self._client.search_runs([experiment], alike, max_results=1000, order_by=order)
        if runs:
            tags["weights.same_as"] = runs[0].info.run_id
        evaluated = [run for run in runs if _evaluation(run)]
        if evaluated and not _evaluation(self._client.get_run(run_id)):
            latest = max(evaluated, key=lambda run: self._last_point(run, _evaluation(run)[0]).timestamp)
            tags.update(self._copy_evaluation(run_id, latest))
            tags["evaluation.taken_from"] = latest.info.run_id
        self._tags(run_id, tags)

    def _last_point(self, run, name: str):
        return max(self._client.get_metric_history(run.info.run_id, name), key=lambda m: (m.step, m.timestamp))

    def _copy_evaluation(self, run_id: str, other) -> Dict[str, str]:
        """Copy metrics (with their times) and files of another run's evaluation. Returns its name and note as tags."""
        self._points(run_id, [self._last_point(other, name) for name in _evaluation(other)])
        if any(entry.path == EVALUATION for entry in self._client.list_artifacts(other.info.run_id)):
            with tempfile.TemporaryDirectory() as folder:
                copied = self._client.download_artifacts(other.info.run_id, EVALUATION, folder)
                self._client.log_artifacts(run_id, copied, EVALUATION)
        result = str(other.info.run_name).partition(SEPARATOR)[2]
        name = str(self._client.get_run(run_id).info.run_name).partition(SEPARATOR)[0]
        tags = {"mlflow.runName": f"{name}{SEPARATOR}{result}"} if result else {}
        note = other.data.tags.get(NOTE_TAG)
        return {**tags, NOTE_TAG: note.replace(other.info.run_id, run_id)} if note else tags

    def _logged_model(self, run_id: str, event: Event) -> str:
        """The id of the run's model of this step: complete, begun by an earlier try, or new."""
        from mlflow.entities import LoggedModelOutput

        experiment = self._client.get_run(run_id).info.experiment_id
        tags = {"step": str(event["step"]), WEIGHTS_TAG: file_sha256(event["files"][0])}
        known = self._client.search_logged_models([experiment], f"source_run_id = '{run_id}'")
        for model in known:
            if model.tags.get("step") == tags["step"] and model.status == "READY":
                return model.model_id
        begun = [model for model in known if model.status == "PENDING" and tags.items() <= model.tags.items()]
        create = self._client.create_logged_model
        model = begun[0] if begun else create(experiment, event["name"], run_id, tags, model_type="matcher")
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder) / "model", run_id, model.model_id, event["files"])
            send = functools.partial(self._client.log_model_artifacts, model.model_id, f"{folder}/model")
            self._uploads.attempt(f"models/{model.model_id}", size_of(Path(folder)), send)
        self._client.finalize_logged_model(model.model_id, "READY")
        self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, event["step"])])
        return model.model_id


def _check_readable(*paths: str) -> None:
    """Raises PermanentError if a file, or one in a folder, cannot be read: retries would block later events."""
    try:
        inside = (file for path in map(Path, paths) for file in (path, *path.rglob("*")))
        for file in itertools.filterfalse(Path.is_dir, inside):
            file.open("rb").close()
    except OSError as error:
        raise PermanentError(str(error)) from error


def _check_model(file: str) -> None:
    """Raises PermanentError if the model file is damaged, which not every version of MLflow checks."""
    from superglue_sift.weights import BadCheckpoint, load_model_file

    try:
        load_model_file(file)
    except (FileNotFoundError, BadCheckpoint) as error:
        raise PermanentError(str(error)) from error


def view() -> str:
    """Columns of the experiment's table at the address that `make ui` prints."""
    columns = ["attributes.`Created`", *(f"metrics.`{name}`" for name in COLUMNS)]
    columns += [f"params.`{name}`" for name in ("fetch.source", "train.steps", "train.lr")]
    # MLflow 3.1 shows an error if one of these keys is missing
    return json.dumps({
        "selectedColumns": columns, "orderByKey": "attributes.start_time", "orderByAsc": False, "searchFilter": "",
        "startTime": "ALL", "lifecycleFilter": "Active", "modelVersionFilter": "All Runs", "datasetsFilter": [],
        "runsPinned": [], "runsHidden": [], "runsHiddenMode": "FIRST_10_RUNS", "groupBy": None, "runsExpanded": {},
        "groupsExpanded": {}, "runsVisibilityMap": {}, "chartsSearchFilter": "",
    })  # fmt: skip


def _evaluation(run) -> List[str]:
    """Names of the metrics of the stage `evaluate` in a run."""
    return sorted(name for name in run.data.metrics if name in LEADING or name.rpartition("/")[0] == HEADLINE)


def save_model(folder: Path, run_id: str, model_id: str, files: List[str]) -> None:
    """Write an MLflow model: the weights (the first of `files`), their description, the library, `matcher_model`."""
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
