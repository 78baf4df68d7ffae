"""Send the events of a run to MLflow 3.1 or later, and choose the best model there.

Only this module calls MLflow's servers and stores. Its model is in `served_model`.
"""

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

MODEL = "superglue-sift"  # Name of the model in the registry, and of the experiment
CHAMPION = "champion"  # Alias of the best version
EVALUATION = "test"  # Prefix of the evaluation's metrics, and folder of its files
MIN_SCENES = 6  # Photographs that a comparison needs, as in the evaluation
LIMIT = 5  # px, the limit of the AUC that decides
SEPARATOR = " · "  # It stands between the name of a run and its result
TAG_PREFIX = "superglue."  # The names of the project's tags begin with this
KEY_TAG = f"{TAG_PREFIX}run_key"  # The tag by which a run is found, from the header of its log
CLONE_STORE = "sqlite:///mlflow.db"  # The store of a clone
ARTIFACTS = "mlartifacts"  # Folder of the files of all runs, beside a local store

Event = Dict[str, Any]  # A line of the log (`tracking.EventLog`)


# --- no password is printed, stored or sent

# A login stands in front of the name of a server or a database.
_LOGIN = re.compile(r"(?<=://)[^/\s'\"<>][^\s'\"<>]*@")


def redact(text: str) -> str:
    """Return a text without the logins in its addresses."""
    return _LOGIN.sub("", text)


def print_message(text: str) -> None:
    """Print one line to stderr, without logins."""
    print(f"tracking: {redact(text)}", file=sys.stderr, flush=True)


# --- addresses


def get_database_path(uri: str) -> Optional[Path]:
    """Return the file of a SQLite address, or None for the address of a server.

    The address of a SQLite file is relative to the user's clone.
    """
    scheme, _, path = uri.partition(":///")
    return provenance.find_clone() / path if scheme == "sqlite" and path else None


def shorten_path(path: Path) -> str:
    """Return a path as logs have it: a path in the user's clone is relative to the clone."""
    path = path.resolve()
    root = provenance.find_clone().resolve()
    return str(path.relative_to(root) if root in path.parents else path)


def format_address(uri: str) -> str:
    """Return an address as logs name it, without a password.

    The name of a clone's store has no folder, because a clone may be copied or moved.
    """
    if get_database_path(uri) == get_database_path(CLONE_STORE):
        return CLONE_STORE
    return redact(uri)


def get_experiment_name() -> str:
    """Return MLFLOW_EXPERIMENT_NAME, or the name of the project's experiment if it is not set."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or MODEL


def format_error(error: Exception) -> str:
    """Return the message of an error on one line of at most 300 characters, without passwords."""
    return textwrap.shorten(redact(str(error)) or type(error).__name__, 300, placeholder="...")


def escape_surrogates(text: str) -> str:
    """Replace what is not Unicode by escapes, for example bytes of a file's name.

    Neither a database nor a server takes a text that is not Unicode.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# --- MLflow, 3.1 and later

ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # Seconds; a server may store a file elsewhere meanwhile
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # The sender tries again
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
WORKFLOW = "machine_learning"  # The kind of MLflow's pages
ABOUT_MODEL = (
    "SuperGlue on SIFT keypoints. Each version is the best model of one training. The alias"
    f" `{CHAMPION}` belongs to the first version, until another one is better on the same pairs of"
    " photographs: the 95 % interval of the difference of AUC@5 lies above 0, over"
    f" {MIN_SCENES} photographs or more. A version's tag `{CHAMPION}` says how it compared."
)


def set_missing_home() -> None:
    """Set HOME for a user who has no home, as `docker run --user` may start one.

    MLflow looks there for settings of its own, and fails without a home.
    """
    try:
        Path.home()
    except (RuntimeError, KeyError):
        os.environ["HOME"] = tempfile.gettempdir()


def open_store(uri: str) -> Any:
    """Open a server or a local store, and return its `MlflowClient`.

    A local store is created if it does not exist. MLflow's environment variables are set.

    Raises:
        RequestError: If the address has no scheme.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    set_missing_home()
    import mlflow
    from mlflow.tracking import MlflowClient

    logging.disable(logging.INFO)  # Alembic, which changes tables, sets its own level and handler
    if "://" not in uri and not uri.startswith("databricks"):
        raise errors.RequestError(f"not an address; write http://{uri} or sqlite:///FILE")
    # MLflow logs a model to the global address and experiment, and not to those of a client.
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    path = get_database_path(uri)
    if path and not path.is_file():
        create_database(path)
    return MlflowClient(uri, uri)


def create_database(path: Path) -> None:
    """Create the file of a local store.

    MLflow needs seconds for its tables. They are complete before the file gets its name, so a
    process that is killed meanwhile leaves no half of a store.
    """
    from mlflow.tracking import MlflowClient

    with tempfile.TemporaryDirectory() as folder:
        complete = Path(folder) / "mlflow.db"
        MlflowClient(f"sqlite:///{complete}").search_experiments()
        if not path.is_file():  # Another process may have done the same
            write_atomic(path, complete.read_bytes())


def get_artifacts_folder(uri: str, name: str) -> Optional[Path]:
    """Return the folder for the files of an experiment, or None if `uri` is that of a server.

    The folder is beside the local store. MLflow's default would be the current directory, which may
    be a copy of the clone that DVC makes for a while (`dvc exp run --temp`).

    Args:
        uri: the address of the server or local store.
        name: the name of the experiment.
    """
    path = get_database_path(uri)
    return path.resolve().parent / ARTIFACTS / name.replace("/", "_") if path else None


def find_other_clone_folder(experiment: Any, own_folder: Optional[Path]) -> Optional[Path]:
    """Return the folder of an experiment's files if it is that of a clone at another path.

    Args:
        experiment: an experiment of MLflow.
        own_folder: the folder of this clone, from `get_artifacts_folder`. A link from the other
            folder to this one makes them the same.

    Returns:
        The folder, or None if the files are in this clone, on a server, or in a folder that the
        maker of the experiment chose.
    """
    location = urllib.parse.urlsplit(experiment.artifact_location)
    folder = Path(urllib.request.url2pathname(location.path))
    # Any other folder was chosen by the person who made the experiment.
    is_of_clone = location.scheme == "file" and folder.parent.name == ARTIFACTS
    is_own = own_folder is None or os.path.realpath(folder) == os.path.realpath(own_folder)
    return folder if is_of_clone and not is_own else None


def describe_other_clone_folder(folder: Path, own_folder: Path) -> str:
    """Say where the files of another clone's runs are, and how MLflow finds those of a moved clone.

    Args:
        folder: the folder from `find_other_clone_folder`.
        own_folder: the folder of this clone, from `get_artifacts_folder`.
    """
    clone = folder.parents[1]
    hint = f"the files of runs that were made in {clone} are there"
    if folder.exists():
        return hint
    link = f"mkdir -p {shlex.quote(str(clone))} && ln -s {shlex.quote(str(own_folder.parent))}"
    return f"{hint}. If you moved the clone, let MLflow find them: {link} {shlex.quote(str(clone))}"


def is_deleted(experiment: Any) -> bool:
    """Return whether an experiment is deleted. MLflow keeps it, so that it can be restored."""
    return experiment is not None and experiment.lifecycle_stage == "deleted"


def find_experiment(client: Any, uri: str, name: str) -> str:
    """Return the id of an experiment, which is created if it does not exist.

    MLflow stores the whole path of an experiment's files. In a clone that was copied or moved, or
    that a container sees at another path, this is not the path of the clone. Its new runs then get
    an experiment of their own, "NAME in FOLDER". In place of a deleted experiment, that of
    MLFLOW_EXPERIMENT_NAME is taken.

    Args:
        client: the client from `open_store`.
        uri: the address of the server or store.
        name: name of the experiment.

    Raises:
        RequestError: If the experiment is deleted, and MLFLOW_EXPERIMENT_NAME names no other one.
    """
    experiment = client.get_experiment_by_name(name)
    variable = os.environ.get("MLFLOW_EXPERIMENT_NAME") or name
    if variable != name and is_deleted(experiment):
        return find_experiment(client, uri, variable)
    own_folder = get_artifacts_folder(uri, name)
    other_folder = experiment and find_other_clone_folder(experiment, own_folder)
    if own_folder and other_folder:
        name = f"{name} in {own_folder.parents[1]}"
        experiment = client.get_experiment_by_name(name)
    if experiment is None:
        if own_folder and other_folder:
            hint = describe_other_clone_folder(other_folder, own_folder)
            print_message(f"new runs are in the experiment {name}; {hint}")
        return client.create_experiment(name, own_folder.as_uri() if own_folder else None)
    number = experiment.experiment_id
    if is_deleted(experiment):
        store = f"MLFLOW_TRACKING_URI={shlex.quote(format_address(uri))}"
        restore = f"{store} mlflow experiments restore --experiment-id {number}"
        raise errors.RequestError(
            f"the experiment {name} is deleted. To restore it, type {restore}; for another"
            " experiment, set MLFLOW_EXPERIMENT_NAME"
        )
    return number


class MlflowRun:
    """One run in MLflow, to which events are sent. Any event may be sent again.

    Attributes:
        run_id: MLflow's id of the run.
        is_new: whether this object has created the run.
    """

    def __init__(self, uri: str, header: Event) -> None:
        """Find or create the run that the header of a log describes.

        `uri` is the address of the server or store.
        """
        self._client = open_store(uri)  # It prepares the environment in which MLflow is imported
        import mlflow

        experiment = find_experiment(self._client, uri, escape_surrogates(header["experiment"]))
        mlflow.set_experiment(experiment_id=experiment)
        query = f"tags.`{KEY_TAG}` = '{header['run']}'"
        runs = self._client.search_runs([experiment], query, max_results=1)
        self.is_new = not runs
        if self.is_new:
            key = {KEY_TAG: header["run"]}
            name = escape_surrogates(header["name"])
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
                has_prefix = name.startswith(("mlflow.", TAG_PREFIX))
                tags[name if has_prefix else f"{TAG_PREFIX}{name}"] = text
        self._client.log_batch(
            self.run_id,
            metrics,
            [Param(name, escape_surrogates(text)) for name, text in params.items()],
            [RunTag(name, escape_surrogates(text)) for name, text in tags.items()],
        )
        root = provenance.find_clone()
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
        """Return this run's versions of the registered model."""
        return [*self._client.search_model_versions(f"run_id = '{self.run_id}'")]

    def _register(self, files: List[str], step: int) -> None:
        """Log the weights as a model of the run, and register a version.

        The version becomes champion if there is none. Nothing is done if this run has registered a
        model of this step already. `files` are the weights and their JSON.
        """
        from mlflow import pyfunc
        from mlflow.models import Model

        arguments = describe_model(files)  # This comes first, to check the file
        if any(version.tags.get("step") == str(step) for version in self._versions()):
            return
        # Log the model of the run.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # MLflow asks for an example of an input
            logged = Model.log(None, pyfunc, name=MODEL, run_id=self.run_id, step=step, **arguments)
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
        """Write the AUC and the run of a version on its page."""
        run = self._client.get_run(self.run_id)
        name, _, result = str(run.info.run_name).partition(SEPARATOR)
        text = f"{result or 'Not yet evaluated'}, run {name}"
        self._client.update_model_version(MODEL, version, text)

    def _champion(self) -> Any:
        """Return the version with the alias, or None if there is none."""
        number = self._client.get_registered_model(MODEL).aliases.get(CHAMPION)
        return None if number is None else self._client.get_model_version(MODEL, number)

    def _judge(self, version: str, is_better: bool, reason: str) -> None:
        """Give the alias to a version that is better. Write the reason on its page in any case."""
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
            champion_pairs = self._download_pairs(champion, folder)
            if champion_pairs is None:
                is_better = False
                reason = f"the run of version {champion.version} has no {EVALUATION}/pairs.csv"
            else:
                is_better, reason = judge_against_champion(pairs, champion_pairs)
                reason += f"; compared with version {champion.version}"
        self._judge(version, is_better, reason)
        if is_better:
            self._judge(champion.version, False, f"version {version} is better")
            print_message(f"{MODEL} version {version} is the new {CHAMPION}: {reason}")
        else:
            stays = f"{MODEL} version {champion.version} stays {CHAMPION}"
            print_message(f"{stays}; version {version} does not replace it: {reason}")

    def _download_pairs(self, version: Any, folder: str) -> Optional[Path]:
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
            return None  # The run was deleted for good


def judge_against_champion(pairs: Path, champion_pairs: Path) -> Tuple[bool, str]:
    """Decide by two evaluations whether a model is better than the champion.

    The model is better if the 95 % interval of the difference of AUC@5 on the same pairs lies above
    0, over MIN_SCENES photographs or more.

    Args:
        pairs: the pairs.csv of the model.
        champion_pairs: the pairs.csv of the champion.

    Returns:
        Whether the model is better, and the reason in words.
    """
    import pandas

    from pipeline.evaluate import metrics

    files = (pairs, champion_pairs)
    tables = [pandas.read_csv(path, dtype=str).set_index("matcher") for path in files]
    # Versions of this project may have other columns.
    columns = tables[0].columns.intersection(tables[1].columns)
    has_matchers = all({"nn", "superglue"} <= set(table.index) for table in tables)
    if not has_matchers or "scene" not in columns:
        return False, "evaluated by another version of this project"
    nearest, rows = ([table.loc[[name]] for table in tables] for name in ("nn", "superglue"))
    # The same keypoints give the same nearest neighbours.
    if not nearest[0][columns].equals(nearest[1][columns]):
        return False, "evaluated on other pairs"
    error = next(name for name in rows[0] if name.startswith("error_"))
    aucs = [metrics.compute_pair_aucs(table[error].astype(float), LIMIT) for table in rows]
    scenes = rows[0].set_index("scene").index
    if scenes.nunique() < MIN_SCENES:
        return False, f"too few photographs to compare: {scenes.nunique()} of {MIN_SCENES}"
    gains = pandas.DataFrame({"gain": 100 * (aucs[0] - aucs[1])}, scenes)
    gain = metrics.summarize(gains, metrics.resample_scenes(gains)).loc["gain"]
    return gain.low > 0, (
        f"AUC@{LIMIT} {gain.value:+.1f} points, 95 % interval {gain.low:+.1f} .. {gain.high:+.1f},"
        f" {gain.pairs:.0f} pairs of {scenes.nunique()} photographs"
    )


def measure_machine_use() -> Dict[str, float]:
    """Measure the use of CPU, memory and NVIDIA's GPUs. Return the values by MLflow's names."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

    values: Dict[str, float] = {}
    for kind in (CPUMonitor, GPUMonitor):
        # Without a driver or its library this raises errors of various types.
        with contextlib.suppress(Exception):
            monitor = kind()
            monitor.collect_metrics()
            values.update(monitor.aggregate_metrics())
    return values


def describe_model(files: List[str]) -> Dict[str, Any]:
    """Return the arguments with which MLflow saves a model.

    `files` are the paths of the weights and of their JSON.

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
        "signature": served_model.make_signature(threshold),
        "pip_requirements": [f"{name}=={version}" for name, version in pins.items()],
    }


def find_page_addresses(uri: str, server: str) -> List[str]:
    """Return the addresses of the pages of runs and of their curves, one a line.

    Runs that were made by a clone at another path have an experiment of their own. A line says
    where the files of these runs are.

    Args:
        uri: the address of the server or local store.
        server: the address of the pages.
    """
    client = open_store(uri)
    name = get_experiment_name()
    own_folder = get_artifacts_folder(uri, name)
    experiments = [
        experiment
        for experiment in client.search_experiments()
        if f"{experiment.name} in ".startswith(f"{name} in ")
    ]
    if not experiments:
        experiments = [client.get_experiment(find_experiment(client, uri, name))]
    # The experiment of this clone comes first.
    other_folders = [find_other_clone_folder(experiment, own_folder) for experiment in experiments]
    rows = sorted(zip(experiments, other_folders), key=lambda row: row[1] is not None)
    lines = []
    for experiment, other_folder in rows:
        # Without this word MLflow 3.17 opens its page for chat models.
        page = f"{server}/#/experiments/{experiment.experiment_id}/runs?workflowType={WORKFLOW}"
        clone = f" of {other_folder.parents[1]}" if other_folder else ""
        lines.append(f"table of runs{clone}: {page}")
        lines.append(f"curves{clone}, below `train` and `val`: {page}&compareRunsMode=CHART")
        if other_folder and own_folder:
            lines.append(describe_other_clone_folder(other_folder, own_folder))
    return lines


def serve_pages(uri: str, host: str, port: int) -> int:
    """Become MLflow's server on the local store, and print the addresses of its pages.

    For a server, only print the addresses.

    Args:
        uri: the address of the server or local store.
        host: the address at which a local server listens.
        port: its port.

    Returns:
        0 for a server. For a local store this process becomes MLflow's server, and does not return.

    Raises:
        RequestError: If the server or store does not answer.
    """
    is_local = get_database_path(uri) is not None
    try:
        pages = find_page_addresses(uri, f"http://127.0.0.1:{port}" if is_local else redact(uri))
    except Exception as error:  # A wrong address, or an error of MLflow, HTTP or a database
        raise errors.RequestError(f"{redact(uri)}: {format_error(error)}") from None
    print(*pages, sep="\n")
    if not is_local:
        return 0
    print("MLflow takes up to a minute to start; Ctrl-C ends it")
    sys.stdout.flush()
    # The address is in the environment, so that `ps` shows no password.
    os.environ["MLFLOW_BACKEND_STORE_URI"] = uri
    # The server prints no line for each request.
    os.environ.setdefault("MLFLOW_UVICORN_OPTS", "--log-level warning")
    server = ["mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    return os.execv(sys.executable, [sys.executable, "-m", *server])
