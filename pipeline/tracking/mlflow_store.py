"""Puts the events of a run log into MLflow (3.1 and later). With `matcher_model` the only file that knows MLflow."""

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
from pipeline.tracking.uploads import RETRIES, TIMEOUT, Uploads, files_below

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
    RETRIES: "1",  # the shipper tries again by itself
    TIMEOUT: "5",  # of small requests; `uploads` gives files more
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MlflowStore:
    """Puts events into an MLflow store. Safe to repeat: what has arrived once is not added again."""

    def __init__(self, uri: str) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._uri, self._error = uri, MlflowException
        # a registered model's source is looked up through the process's own default, whatever the client was given
        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self._uploads = Uploads(lambda: self._client.search_experiments(max_results=1))

    def open(self, header: Event, run_id: Optional[str]) -> Tuple[str, bool]:
        """Find the run or make it; True when it is new to this store. Raises whatever the client raises."""
        experiment = self._experiment(header["experiment"])
        found = self._find(experiment, header["run"], run_id)
        if found is None:
            run_id, tags = None, {**header.get("tags", {}), KEY_TAG: header["run"]}
            found = self._client.create_run(experiment, header.get("time"), tags, header.get("name")).info.run_id
        if not header.get("attached"):
            self._claim(experiment, found, header)
        return found, run_id is None

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
            # MLflow's default lies in the current directory, which may be an experiment's passing copy.
            place = (Path(path).resolve().parent / "mlartifacts" / name).as_uri() if scheme == "sqlite" else None
            tags = {"mlflow.experimentKind": "custom_model_development", VIEW_TAG: view()}
            try:
                return self._client.create_experiment(name, place, tags)
            except self._error:
                known = self._client.get_experiment_by_name(name)  # another process was faster
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
        found = self._client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
        return found[0].info.run_id if found else None

    def _params(self, run_id: str, params: Dict[str, str]) -> None:
        from mlflow.entities import Param

        items = [Param(key, value) for key, value in params.items()]
        for at in range(0, len(items), PARAMS_AT_ONCE):
            try:
                self._client.log_batch(run_id, params=items[at : at + PARAMS_AT_ONCE])
            except self._error as error:
                if error.error_code not in FINAL_ERRORS:
                    raise  # a param that a resumed run has changed keeps its first value

    def last_steps(self, run_id: str) -> Dict[str, int]:
        """The last step the store has under each metric's name."""
        names = self._client.get_run(run_id).data.metrics
        return {n: max(m.step for m in self._client.get_metric_history(run_id, n)) for n in names}

    def send(self, run_id: str, events: List[Event]) -> None:
        """Add events in order. Raises PermanentError when the store will never take one of them."""
        from mlflow.entities import Metric

        try:
            measured = ((event, *point) for event in events for point in event.get("metrics", {}).items())
            self._points(run_id, [Metric(name, float(v), event["time"], event["step"]) for event, name, v in measured])
            for event in events:
                self._other(run_id, event)
        except RequestError as error:  # a model that does not load, which MLflow 3.1 tries
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

        own = [RunTag(key, value.replace(RUN_ID, run_id)) for key, value in tags.items()]
        self._client.log_batch(run_id, tags=own[:PARAMS_AT_ONCE])

    def _artifact(self, run_id: str, path: Path, folder: str) -> None:
        _check_readable(str(path))
        for file, inside in files_below(path):
            place = "/".join(filter(None, (folder, inside)))
            send = functools.partial(self._client.log_artifact, run_id, str(file), place or None)
            self._uploads.file(file, f"{run_id}/{place}", send)

    def _dataset(self, run_id: str, event: Event) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = json.dumps({"uri": event["source"], "digest": event["digest"]})
        short = event["digest"].rpartition(":")[2][:DIGEST_LENGTH]  # the store holds no more, `source` does
        data = Dataset(event["name"], short, "local", source, profile=json.dumps({"digest": event["digest"]}))
        tags = [InputTag("mlflow.data.context", event["context"])]
        self._client.log_inputs(run_id, datasets=[DatasetInput(data, tags)])

    def _model(self, run_id: str, event: Event) -> None:
        """The weights as a logged model of the run and as a version of the registered one; the first is `champion`."""
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
        """The version with the alias, None where there is none."""
        version = self._client.get_registered_model(name).aliases.get(CHAMPION)
        return None if version is None else self._client.get_model_version(name, version)

    def _compare_with_champion(self, run_id: str, event: Event) -> None:
        """Give the alias to the run's model where it beats its holder on the same pairs; say what was found."""
        from pipeline.tracking.champion import better_than  # numpy and more, for this alone

        name = event["name"]
        own = self._client.search_model_versions(f"run_id = '{run_id}'")
        if not own:
            return
        version = max(own, key=lambda one: int(one.version)).version
        note = self._client.get_run(run_id).data.tags.get(NOTE_TAG, "")
        if note:
            self._client.update_model_version(name, version, note)
        champion = self._champion(name)
        if champion is None or champion.run_id == run_id:
            self._describe(name, version, note)
            return
        _check_readable(event["pairs"])
        path, holder = f"{EVALUATION}/pairs.csv", str(champion.run_id)
        there = any(one.path == path for one in self._client.list_artifacts(holder, EVALUATION))
        with tempfile.TemporaryDirectory() as folder:
            theirs = Path(self._client.download_artifacts(holder, path, folder)) if there else None
            better, found = better_than(Path(event["pairs"]), theirs)
        if better:
            self._client.set_registered_model_alias(name, CHAMPION, version)
            self._describe(name, version, note)
        found = f"against version {champion.version}: {found}"
        self._client.set_model_version_tag(name, version, CHAMPION, found)
        say(f"{name} version {version if better else champion.version} is {CHAMPION}; version {version} {found}")

    def _describe(self, name: str, version: Any, note: str) -> None:
        """Open the registered model's page with the verdict on its champion, the first paragraph of that one's note."""
        found = f"Version {version} is `{CHAMPION}`. {note.partition(chr(10))[0]}\n\n" if note else ""
        self._client.update_registered_model(name, found + USAGE.replace("NAME", name))

    def _same_weights(self, run_id: str, file: str) -> None:
        """Tag the run with the digest of its weights; take over the evaluation of earlier runs that have the same.

        DVC does not evaluate weights again that it has evaluated: without this their metrics would stand in
        another run. An evaluation that does run adds its own later and replaces them, or has before.
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
            tags.update(self._take_over(run_id, latest))
            tags["evaluation.taken_from"] = latest.info.run_id
        self._tags(run_id, tags)

    def _last_point(self, run, name: str):
        return max(self._client.get_metric_history(run.info.run_id, name), key=lambda m: (m.step, m.timestamp))

    def _take_over(self, run_id: str, other) -> Dict[str, str]:
        """Copy metrics and files of another run's evaluation, with the times at which they were made; its words."""
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
        """The id of the run's model of this step: one that is there, whole or begun by an earlier try, or a new one."""
        from mlflow.entities import LoggedModelOutput

        experiment = self._client.get_run(run_id).info.experiment_id
        tags = {"step": str(event["step"]), WEIGHTS_TAG: file_sha256(event["files"][0])}
        known = self._client.search_logged_models([experiment], f"source_run_id = '{run_id}'")
        for model in known:
            if model.tags.get("step") == tags["step"] and model.status == "READY":
                return model.model_id
        begun = [one for one in known if one.status == "PENDING" and tags.items() <= one.tags.items()]
        create = self._client.create_logged_model
        model = begun[0] if begun else create(experiment, event["name"], run_id, tags, model_type="matcher")
        there = self._files_there(model.model_id) if begun else {}
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder) / "model", run_id, model.model_id, event["files"])
            self._model_files(model.model_id, Path(folder) / "model", there)
        self._client.finalize_logged_model(model.model_id, "READY")
        self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, event["step"])])
        return model.model_id

    def _files_there(self, model_id: str, below: Optional[str] = None) -> Dict[str, int]:
        """Path and bytes of each file that the store has of a logged model."""
        found: Dict[str, int] = {}
        for entry in self._client.list_logged_model_artifacts(model_id, below):
            if entry.is_dir:
                found.update(self._files_there(model_id, entry.path))
            else:
                found[entry.path] = int(entry.file_size or 0)
        return found

    def _model_files(self, model_id: str, folder: Path, there: Dict[str, int]) -> None:
        """Send what is not `there`, the largest file last, so that a try that ends early leaves less to the next."""
        missing = []
        for file, _ in files_below(folder):
            size = file.stat().st_size
            if there.get(file.relative_to(folder).as_posix()) != size:
                missing.append((size, file))
        for size, file in sorted(missing):
            with tempfile.TemporaryDirectory() as alone:  # MLflow 3.1 takes folders alone
                place = Path(alone) / file.relative_to(folder)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, place)
                send = functools.partial(self._client.log_model_artifacts, model_id, alone)
                self._uploads.attempt(f"models/{model_id}/{file.name}", size, send)


def _check_readable(*paths: str) -> None:
    """PermanentError where a file, or one of a folder, cannot be read: trying again would hold up all that follows."""
    try:
        inside = (file for path in map(Path, paths) for file in (path, *path.rglob("*")))
        for file in itertools.filterfalse(Path.is_dir, inside):
            file.open("rb").close()
    except OSError as error:
        raise PermanentError(str(error)) from error


def _check_model(file: str) -> None:
    """PermanentError where it is no whole model file: not every version of MLflow would notice."""
    from superglue_sift.weights import BadCheckpoint, load_model_file

    try:
        load_model_file(file)
    except (FileNotFoundError, BadCheckpoint) as error:
        raise PermanentError(str(error)) from error


def view() -> str:
    """Columns of the experiment's table for whoever opens the address that `make ui` names."""
    found = ["attributes.`Created`", *(f"metrics.`{name}`" for name in COLUMNS)]
    found += [f"params.`{name}`" for name in ("fetch.source", "train.steps", "train.lr")]
    # MLflow 3.1 shows nothing but an error where one of these is missing
    return json.dumps({
        "selectedColumns": found, "orderByKey": "attributes.start_time", "orderByAsc": False, "searchFilter": "",
        "startTime": "ALL", "lifecycleFilter": "Active", "modelVersionFilter": "All Runs", "datasetsFilter": [],
        "runsPinned": [], "runsHidden": [], "runsHiddenMode": "FIRST_10_RUNS", "groupBy": None, "runsExpanded": {},
        "groupsExpanded": {}, "runsVisibilityMap": {}, "chartsSearchFilter": "",
    })  # fmt: skip


def _evaluation(run) -> List[str]:
    """Names of the metrics of the stage `evaluate` in a run."""
    return sorted(name for name in run.data.metrics if name in LEADING or name.rpartition("/")[0] == HEADLINE)


def save_model(folder: Path, run_id: str, model_id: str, files: List[str]) -> None:
    """An MLflow model made of files: the weights (the first of `files`), the library, and the code that joins them."""
    from mlflow import pyfunc
    from mlflow.models import Model

    import superglue_sift
    from pipeline.tracking import matcher_model

    pins, names = repro.versions(), ("mlflow", "numpy", "opencv-python", "safetensors", "torch")
    pyfunc.save_model(
        folder,
        python_model=str(matcher_model.__file__),
        code_paths=[str(Path(superglue_sift.__file__).parent)],
        artifacts=dict(zip((matcher_model.WEIGHTS, "description"), files)),
        signature=matcher_model.signature(),
        input_example=matcher_model.input_example(),
        pip_requirements=[f"{name}=={pins[name].partition('+')[0]}" for name in names if name in pins],
        mlflow_model=Model(run_id=run_id, model_id=model_id),
    )
