"""Send the events of a run to MLflow 3.1 or later, and choose the best model there."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import sys
import tempfile
import textwrap
import urllib.parse
import urllib.request
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

# The login stands in front of the name of a server or a database.
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
    """Return the message of an error on one line of at most 300 characters, without passwords."""
    return textwrap.shorten(redact(str(error)) or type(error).__name__, 300, placeholder="...")


def readable(text: str) -> str:
    """Return a text with escapes in place of what is not Unicode, such as bytes of a file's name.

    Neither a database nor a server takes such a text.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# --- MLflow, 3.1 and later

ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds; a server may store a file elsewhere meanwhile
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the sender tries again
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
WORKFLOW = "machine_learning"  # the kind of MLflow's pages
ABOUT_MODEL = (
    "SuperGlue on SIFT keypoints. Each version is the best model of one training. The alias"
    f" `{CHAMPION}` belongs to the first version, until another one is better on the same pairs of"
    " photographs: the 95 % interval of the difference of AUC@5 lies above 0, over"
    f" {MIN_SCENES} photographs or more. A version's tag `{CHAMPION}` says how it compared."
)


def give_home() -> None:
    """Set HOME for a user who has no home, as `docker run --user` may start one.

    MLflow looks there for settings of its own, and fails without a home.
    """
    try:
        Path.home()
    except (RuntimeError, KeyError):
        os.environ["HOME"] = tempfile.gettempdir()


def open_store(uri: str) -> Any:
    """Open the server or local store, and return a client.

    Raises:
        RequestError: For an address without a scheme.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    give_home()
    import mlflow
    from mlflow.tracking import MlflowClient

    logging.disable(logging.INFO)  # alembic, which changes tables, sets its own level and handler
    if "://" not in uri and not uri.startswith("databricks"):
        raise errors.RequestError(f"not an address; write http://{uri} or sqlite:///FILE")
    # MLflow logs a model to the global address and experiment, not to those of a client.
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    path = database(uri)
    if path and not path.is_file():
        create_database(path)
    return MlflowClient(uri, uri)


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


def artifacts_folder(uri: str, name: str) -> Optional[Path]:
    """Return the folder for the files of an experiment, beside a local store.

    Return None for a server. By default MLflow uses the current directory, which may be a temporary
    copy of DVC.
    """
    path = database(uri)
    return path.resolve().parent / ARTIFACTS / name.replace("/", "_") if path else None


def folder_elsewhere(experiment: Any, here: Optional[Path]) -> Optional[Path]:
    """Return the folder of an experiment's files if it is that of a clone at another path.

    `here` is the folder of this clone. A link from the other folder to it makes them the same.
    """
    location = urllib.parse.urlsplit(experiment.artifact_location)
    folder = Path(urllib.request.url2pathname(location.path))
    # Any other folder was chosen by the person who made the experiment.
    is_ours = location.scheme == "file" and folder.parent.name == ARTIFACTS
    is_here = here is None or os.path.realpath(folder) == os.path.realpath(here)
    return folder if is_ours and not is_here else None


def hint_at_files(folder: Path, here: Path) -> str:
    """Say where the files of runs are that a clone at another path has made."""
    clone = folder.parents[1]
    hint = f"the files of runs that were made in {clone} are there"
    if folder.exists():
        return hint
    link = f"mkdir -p {shlex.quote(str(clone))} && ln -s {shlex.quote(str(here.parent))}"
    return f"{hint}. If you moved the clone, let MLflow find them: {link} {shlex.quote(str(clone))}"


def is_deleted(experiment: Any) -> bool:
    """Return whether an experiment was deleted, which MLflow keeps until it is restored."""
    return experiment is not None and experiment.lifecycle_stage == "deleted"


def find_experiment(client: Any, uri: str, name: str) -> str:
    """Return the id of an experiment, which is created if it does not exist.

    MLflow stores the whole path of an experiment's files. In a clone that was copied or moved, or
    that a container sees at another path, this is not the path of the clone. Its new runs then get
    an experiment of their own, "NAME in FOLDER".

    In place of a deleted experiment, that of MLFLOW_EXPERIMENT_NAME is taken. Raises RequestError
    if it is not set to another one.
    """
    experiment = client.get_experiment_by_name(name)
    other = os.environ.get("MLFLOW_EXPERIMENT_NAME") or name
    if other != name and is_deleted(experiment):
        return find_experiment(client, uri, other)
    here = artifacts_folder(uri, name)
    elsewhere = experiment and folder_elsewhere(experiment, here)
    if here and elsewhere:
        name = f"{name} in {here.parents[1]}"
        experiment = client.get_experiment_by_name(name)
    if experiment is None:
        if here and elsewhere:
            say(f"new runs are in the experiment {name}; {hint_at_files(elsewhere, here)}")
        return client.create_experiment(name, here.as_uri() if here else None)
    number = experiment.experiment_id
    if is_deleted(experiment):
        store = f"MLFLOW_TRACKING_URI={shlex.quote(place_of(uri))}"
        restore = f"{store} mlflow experiments restore --experiment-id {number}"
        raise errors.RequestError(
            f"the experiment {name} is deleted. To restore it, type {restore}; for another"
            " experiment, set MLFLOW_EXPERIMENT_NAME"
        )
    return number


class MlflowRun:
    """One run in MLflow, found or created by the header of its log. Any event may be sent again."""

    def __init__(self, uri: str, header: Event) -> None:
        self._client = open_store(uri)  # it prepares the environment in which MLflow is imported
        import mlflow

        experiment = find_experiment(self._client, uri, readable(header["experiment"]))
        mlflow.set_experiment(experiment_id=experiment)
        query = f"tags.`{KEY_TAG}` = '{header['run']}'"
        runs = self._client.search_runs([experiment], query, max_results=1)
        self.is_new = not runs
        if self.is_new:
            key = {KEY_TAG: header["run"]}
            name = readable(header["name"])
            runs = [self._client.create_run(experiment, header["time"], key, name)]
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
            [Param(name, readable(text)) for name, text in params.items()],
            [RunTag(name, readable(text)) for name, text in tags.items()],
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

        It becomes champion if there is none. A model of a step that is registered is left as it is.
        """
        from mlflow import pyfunc
        from mlflow.models import Model

        described = describe_model(files)  # this comes first, to check the file
        if any(version.tags.get("step") == str(step) for version in self._versions()):
            return
        # Log the model of the run.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # MLflow asks for an example of an input
            logged = Model.log(None, pyfunc, name=MODEL, run_id=self.run_id, step=step, **described)
        # Make the registered model if it is missing, and its new version.
        if not self._client.search_registered_models(f"name = '{MODEL}'"):
            self._client.create_registered_model(MODEL, description=ABOUT_MODEL)
        source = f"models:/{logged.model_id}"
        tags = {"step": str(step)}
        version = self._client.create_model_version(
            MODEL, source, self.run_id, tags, model_id=logged.model_id, await_creation_for=0
        ).version
        self._describe(version)
        if self._champion() is None:
            self._judge(version, True, f"no version was {CHAMPION}")
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
        """Give the alias to the run's latest version if it beats the champion on the same pairs."""
        versions = [int(version.version) for version in self._versions()]
        if not versions:
            return
        version = str(max(versions))
        self._describe(version)
        champion = self._champion()
        if champion is None or str(champion.version) == version:
            return
        # Compare on the pairs of the champion's evaluation.
        with tempfile.TemporaryDirectory() as folder:
            theirs = self._evaluation_of(champion, folder)
            if theirs is None:
                better = False
                reason = f"the run of version {champion.version} has no {EVALUATION}/pairs.csv"
            else:
                better, reason = better_than(pairs, theirs)
                reason += f"; compared with version {champion.version}"
        self._judge(version, better, reason)
        if better:
            self._judge(champion.version, False, f"version {version} is better")
            say(f"{MODEL} version {version} is the new {CHAMPION}: {reason}")
        else:
            stays = f"{MODEL} version {champion.version} stays {CHAMPION}"
            say(f"{stays}; version {version} does not replace it: {reason}")

    def _evaluation_of(self, version: Any, folder: str) -> Optional[Path]:
        """Download the pairs.csv of the evaluation of a version's run to `folder`.

        Return None if the run was not evaluated, or if its files are gone.
        """
        from mlflow.exceptions import MlflowException

        path = f"{EVALUATION}/pairs.csv"
        try:
            files = [file.path for file in self._client.list_artifacts(version.run_id, EVALUATION)]
            if path not in files:
                return None
            return Path(self._client.download_artifacts(version.run_id, path, folder))
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None  # the run was deleted for good


def better_than(ours: Path, theirs: Path) -> Tuple[bool, str]:
    """Return whether a model is better than another one, and why, from the pairs.csv of both.

    It is better if the 95 % interval of the difference of AUC@5 on the same pairs lies above 0,
    with enough photographs.
    """
    import pandas

    from pipeline.evaluate import metrics

    tables = [pandas.read_csv(path, dtype=str).set_index("matcher") for path in (ours, theirs)]
    # Versions of this project may have other columns.
    columns = tables[0].columns.intersection(tables[1].columns)
    if any({"nn", "superglue"} - set(table.index) for table in tables) or "scene" not in columns:
        return False, "evaluated by another version of this project"
    nearest, rows = ([table.loc[[name]] for table in tables] for name in ("nn", "superglue"))
    # The same keypoints give the same nearest neighbours.
    if not nearest[0][columns].equals(nearest[1][columns]):
        return False, "evaluated on other pairs"
    error = next(name for name in rows[0] if name.startswith("error_"))
    areas = [metrics.compute_pair_aucs(table[error].astype(float), LIMIT) for table in rows]
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
        # Without a driver or its library this raises errors of various types.
        with contextlib.suppress(Exception):
            monitor = kind()
            monitor.collect_metrics()
            used.update(monitor.aggregate_metrics())
    return used


def describe_model(files: List[str]) -> Dict[str, Any]:
    """Return the arguments with which MLflow saves a model. `files` are the weights and their JSON.

    Raises:
        RequestError: If the weights cannot be read.
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


def describe_pages(uri: str, server: str) -> List[str]:
    """Return the addresses of the runs and of their curves at the address `server`, one a line.

    Runs that were made at another path have an experiment of their own. A line says where its files
    are.
    """
    client = open_store(uri)
    name = experiment_name()
    here = artifacts_folder(uri, name)
    experiments = client.search_experiments()
    experiments = [one for one in experiments if f"{one.name} in ".startswith(f"{name} in ")]
    if not experiments:
        experiments = [client.get_experiment(find_experiment(client, uri, name))]
    lines = []
    for experiment in sorted(experiments, key=lambda one: bool(folder_elsewhere(one, here))):
        # Without this word MLflow 3.17 opens its page for chat models.
        page = f"{server}/#/experiments/{experiment.experiment_id}/runs?workflowType={WORKFLOW}"
        elsewhere = folder_elsewhere(experiment, here)
        where = f" of {elsewhere.parents[1]}" if elsewhere else ""
        lines.append(f"table of runs{where}: {page}")
        lines.append(f"curves{where}, below `train` and `val`: {page}&compareRunsMode=CHART")
        if elsewhere and here:
            lines.append(hint_at_files(elsewhere, here))
    return lines


def show_pages(uri: str, host: str, port: int) -> int:
    """Become MLflow's server on the local store, and print the addresses of its pages.

    For another store, only print the addresses. Raises RequestError if the store does not answer.
    """
    try:
        pages = describe_pages(uri, f"http://127.0.0.1:{port}" if database(uri) else redact(uri))
    except Exception as error:  # a wrong address, or an error of MLflow, HTTP or a database
        raise errors.RequestError(f"{redact(uri)}: {reason_of(error)}") from None
    print(*pages, sep="\n")
    if database(uri) is None:
        return 0
    print("MLflow takes up to a minute to start; Ctrl-C ends it")
    sys.stdout.flush()
    # The address is in the environment, so that `ps` shows no password.
    os.environ["MLFLOW_BACKEND_STORE_URI"] = uri
    # The server prints no line for each request.
    os.environ.setdefault("MLFLOW_UVICORN_OPTS", "--log-level warning")
    server = ["mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    return os.execv(sys.executable, [sys.executable, "-m", *server])
