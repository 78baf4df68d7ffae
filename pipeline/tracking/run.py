"""A run as the stages use it: open, log, add files, close. Nothing here blocks or raises."""

from __future__ import annotations

import atexit
import math
import os
import time
import uuid
from pathlib import Path
from typing import Any, Dict, Optional

from pipeline import provenance
from pipeline.params import flatten
from pipeline.tracking.log import Event, EventLog, find_log, now_ms, take_log
from pipeline.tracking.mlflow_store import HIDDEN
from pipeline.tracking.secrets import redact, say
from pipeline.tracking.sender import Sender

EXPERIMENT = "superglue-sift"
SEPARATOR = " · "  # between a run's name and its result
# Of provenance: parameters of the run
MACHINE = ("version.", "image.", "host", "platform", "processor", "gpus")


class NullRun:
    """A run that does nothing: for ranks other than the first, and without tracking."""

    def log(self, metrics: Dict[str, Any], step: int) -> None:
        """Log metrics of one step: name -> number (floats, tensors of one element), also NaN.

        Points that the log had before the run was resumed are left out.
        """

    def artifact(self, path: Path, folder: str = "") -> None:
        """Add a file, or all files of a folder, under `folder` of the run. Sent at the end."""
        self._append({"artifact": str(path.resolve()), "folder": folder})

    def dataset(self, name: str, digest: str, source: str = "") -> None:
        """Record the data of the run. `digest` is its full hash."""
        self._append({"dataset": {"name": name, "digest": digest, "source": source}})

    def describe(self, result: str, note: str) -> None:
        """Append a result to the run's name, and show a Markdown note above its metrics."""

    def compare_with_champion(self, pairs: Path) -> None:
        """Compare the run's model with the `champion`, by the pairs.csv of its evaluation."""
        self._append({"compare": str(pairs.resolve())})

    def model(self, *paths: Path, step: int = 0) -> None:
        """Register the model at the end. paths: its weights, and their JSON."""
        self._append({"model": [str(path.resolve()) for path in paths], "step": step})

    def tags(self, tags: Dict[str, str]) -> None:
        """Set further tags. RUN_ID in a value is replaced by MLflow's id of the run."""
        self._append({"tags": tags})

    def close(self, status: str = "FINISHED", wait: Optional[float] = None) -> bool:
        """End the run as FINISHED, FAILED or KILLED. True if everything has reached the server.

        Waits at most `wait` seconds (default: `Sender.stop`) and names what has not arrived.
        """
        return True

    def _append(self, event: Event) -> None:
        pass

    def __enter__(self) -> NullRun:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close("FINISHED" if kind is None else ending(kind))


class Run(NullRun):
    """An open run: everything goes to its log, and a thread sends the log.

    Created by `open_run` and `attach`. As a context manager it closes itself as FINISHED, as FAILED
    on an exception, and as KILLED on Ctrl-C or sys.exit (by which a signal ends a stage).
    """

    def __init__(self, log: EventLog, uri: str, owner: bool) -> None:
        """owner: sample the use of the machine, and end the run when it is closed."""
        self._log = log
        self._owner = owner
        # Of a resumed training, points that are known already; another stage may run again
        self._known = log.last_steps() if owner else {}
        self._warned = False
        self.key = log.header()["run"]
        self._sender: Optional[Sender] = Sender(log, uri, self.log if owner else None)
        self._sender.start()
        atexit.register(self.close, "FAILED")  # for a stage that ends without closing

    def log(self, metrics: Dict[str, Any], step: int) -> None:
        points = {}
        try:
            for name, value in metrics.items():
                if step > self._known.get(name, -1):
                    number = float(value)
                    # JSON has no NaN and no infinity: as text
                    points[name] = number if math.isfinite(number) else str(number)
        except (TypeError, ValueError) as error:
            self._warn(f"a metric is not a number: {error}")
        else:
            if points:
                self._append({"metrics": points, "step": int(step), "time": now_ms()})

    def describe(self, result: str, note: str) -> None:
        name = f"{self._log.header().get('name', '')}{SEPARATOR}{result}"
        self.tags({"mlflow.runName": name, "mlflow.note.content": note})

    def close(self, status: str = "FINISHED", wait: Optional[float] = None) -> bool:
        if self._sender is None:
            return True
        sender = self._sender
        self._sender = None
        atexit.unregister(self.close)
        if self._owner:
            self._append({"end": status, "time": now_ms()})
        arrived = sender.stop(wait)
        self._log.close()
        return arrived

    def _append(self, event: Event) -> None:
        try:
            self._log.append(event)
        except OSError as error:
            self._warn(f"{self._log.path} cannot be written: {error}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            say(text)
        self._warned = True


def ending(kind: Any) -> str:
    """FAILED or KILLED, from the exception that ended the work."""
    return "KILLED" if issubclass(kind, (KeyboardInterrupt, SystemExit)) else "FAILED"


def tracking_uri(stored: str = "") -> str:
    """The address to use: that of a run, `stored` without its password, or the default.

    The default is MLFLOW_TRACKING_URI, else `mlflow.db` in the user's clone (also from a DVC
    experiment's copy). A run's own address comes first, since the environment may be an image's.
    A file that is not there belongs to another machine or container, and does not count.
    """
    default = (
        os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{provenance.main_root() / 'mlflow.db'}"
    )
    scheme, _, path = stored.partition(":///")
    is_lost = not stored or (scheme == "sqlite" and not Path(path).is_file())
    return default if is_lost or stored == redact(default) else stored


def open_run(
    folder: Path,
    params: Dict[str, Any],
    tags: Optional[Dict[str, str]] = None,
    resume: Optional[str] = None,
    enabled: bool = True,
    training: str = "",
    name: str = "",
) -> NullRun:
    """Open a run, or continue an interrupted one.

    `folder` gets `log.jsonl`, in which `attach` and `known_run` find the run of this `training`.
    The run's name is `name`, or the time. `params` may be nested: {"train": {"lr": 1}} becomes
    `train.lr`. `resume` is `.key` of the interrupted run. With `enabled=False` (every rank but the
    first) it does nothing.
    """
    if not enabled:
        return NullRun()
    log = take_log(folder, resume)
    about = provenance.tags()
    machine = {key: value for key, value in about.items() if key.startswith(MACHINE)}
    tags = {
        **(tags or {}),
        # hidden, as they would push a run's description down the page
        **{f"{HIDDEN}{key}": value for key, value in about.items() if key not in machine},
        "mlflow.source.name": f"pipeline.{about.get('dvc.stage', 'train')}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": about["git.commit"],
        "mlflow.user": os.environ.get("USER", str(os.getuid())),
    }
    uri = tracking_uri(log.header().get("tracking_uri", ""))
    if log.header():
        log.append({"tags": tags, "resumed": True})
    else:
        given = os.environ.get("MLFLOW_RUN_NAME") or os.environ.get("DVC_EXP_NAME") or name
        log.append(
            {
                "run": resume or uuid.uuid4().hex,
                "training": training,
                "tracking_uri": uri,
                "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT,
                "name": given or time.strftime("%Y-%m-%d %H.%M"),
                "params": {**{k: str(value) for k, value in flatten(params).items()}, **machine},
                "tags": tags,
                "time": now_ms(),
            }
        )
    return Run(log, uri, True)


def known_run(folder: Path, training: str) -> Optional[str]:
    """`resume` of a resumed training; None if its run is unknown (another clone or machine)."""
    log = find_log(folder, "training", training)
    return log.header()["run"] if log else None


def attach(path: Path, training: Optional[str]) -> NullRun:
    """Continue the run of a training from another stage; without one, do nothing.

    path: `log.jsonl` of the training or of a later one in the same folder. Its log gets the events.
    What the server does not have of it is sent first; if it has all, and nothing is added, it is
    not called. Closing does not change the run's state.
    """
    log = find_log(path.parent, "training", training) if training else None
    return Run(log, tracking_uri(log.header()["tracking_uri"]), False) if log else NullRun()
