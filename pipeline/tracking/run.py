"""A run as the stages use it: log metrics, add files, close. Nothing here blocks or raises."""

from __future__ import annotations

import atexit
import math
from pathlib import Path
from typing import Any, Dict, Optional

from pipeline.tracking.log import Event, EventLog, now_ms
from pipeline.tracking.mlflow_store import MODEL, SEPARATOR
from pipeline.tracking.secrets import say
from pipeline.tracking.sender import Sender


class NullRun:
    """A run that does nothing: for ranks other than the first, and without tracking."""

    key: Optional[str] = None  # by which the run is found again
    name = ""

    def log(self, metrics: Dict[str, Any], step: int) -> None:
        """Log metrics of one step: name -> number (floats, tensors of one element), also NaN.

        Points that the log had before the run was resumed are left out.
        """

    def artifact(self, path: Any, folder: str = "") -> None:
        """Add a file, or all files of a folder, under `folder` of the run. Sent at the end."""
        self._append({"artifact": str(Path(path).resolve()), "folder": folder})

    def dataset(self, name: str, digest: str, source: str = "") -> None:
        """Record the data of the run. `digest` is its full hash."""
        self._append({"dataset": {"name": name, "digest": digest, "source": source}})

    def describe(self, result: str, note: str) -> None:
        """Append a result to the run's name, and show a Markdown note above its metrics."""
        name = self.name.partition(SEPARATOR)[0]
        self.tags({"mlflow.runName": f"{name}{SEPARATOR}{result}", "mlflow.note.content": note})

    def compare_with_champion(self, pairs: Any, name: str = MODEL) -> None:
        """Compare the run's model with the `champion`, by the pairs.csv of its evaluation."""
        self._append({"compare": {"name": name, "pairs": str(Path(pairs).resolve())}})

    def model(self, *paths: Any, name: str = MODEL, step: int = 0) -> None:
        """Register the model under `name` at the end. paths: its weights, and their JSON."""
        files = [str(Path(path).resolve()) for path in paths]
        self._append({"model": {"name": name, "files": files, "step": int(step)}})

    def tags(self, tags: Dict[str, Any]) -> None:
        """Set further tags. RUN_ID in a value is replaced by MLflow's id of the run."""
        self._append({"tags": {str(key): str(value) for key, value in tags.items()}})

    def close(self, status: str = "FINISHED", wait: Optional[float] = None) -> bool:
        """End the run as FINISHED, FAILED or KILLED. True if everything has reached the server.

        Waits at most `wait` seconds (default: `Sender.stop`) and names what has not arrived.
        """
        return True

    def _append(self, event: Event) -> None:
        pass

    def __enter__(self) -> NullRun:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close("FINISHED" if kind is None else ending(kind))


class Run(NullRun):
    """An open run: everything goes to its log, and a thread sends the log.

    Created by `tracking.open_run` and `tracking.attach`. As a context manager it closes itself as
    FINISHED, as FAILED on an exception, and as KILLED on Ctrl-C or sys.exit (by which a signal ends
    a stage).
    """

    def __init__(self, log: EventLog, uri: str, owner: bool, system_metrics: bool = False) -> None:
        """owner: closing it ends the run. system_metrics: sample the machine."""
        self._log = log
        self._owner = owner
        self._known = log.last_steps()
        self._has_metrics = bool(self._known)
        self._warned = False
        self.key = log.header().get("run")
        self.name = log.header().get("name", "")
        self._sender: Optional[Sender] = Sender(log, uri, self._sample if system_metrics else None)
        self._sender.start()
        atexit.register(self.close, "FAILED")  # for a stage that ends without closing

    def log(self, metrics: Dict[str, Any], step: int) -> None:
        new = {name: value for name, value in metrics.items() if step > self._known.get(name, -1)}
        try:
            numbers = {name: float(value) for name, value in new.items()}
        except (TypeError, ValueError) as error:
            self._warn(f"a metric is not a number: {error}")
            return
        if numbers:
            # JSON has no NaN and no infinity: as text
            kept = {
                n: value if math.isfinite(value) else str(value) for n, value in numbers.items()
            }
            self._append({"metrics": kept, "step": int(step), "time": now_ms()})
            self._has_metrics = True

    def _sample(self, metrics: Dict[str, Any], step: int) -> None:
        """Log the use of the machine, but not first: MLflow compares runs by that metric."""
        if self._has_metrics:
            self.log(metrics, step)

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
