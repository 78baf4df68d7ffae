"""A run as the stages use it: log metrics, add files, close. Nothing here blocks or raises."""

from __future__ import annotations

import atexit
import os
import re
import socket
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from pipeline.tracking.run_log import Event, now_ms, storable
from pipeline.tracking.shipper import LogQueue, Uploader, say, wait_limit
from pipeline.tracking.system_metrics import Sampler
from pipeline.tracking.uploads import seconds_for, size_of

MODEL = "superglue-sift"  # in the model registry
SEPARATOR = " · "  # between a run's name and its result
EVALUATION = "test"  # folder of the files of the stage `evaluate` in a run
# Prefix of its metrics. MLflow orders charts by the alphabet: it comes after train and val.
HEADLINE = "verdict"
# Metrics without prefix: columns of MLflow's table of runs show their whole names.
LEADING = ("auc_5", "auc_5_aligned", "auc_5_gain")
RUN_ID = "{run_id}"  # in a tag: replaced when the run has its id
HIDDEN = "mlflow.superglue."  # prefix of tags that MLflow does not show
PROCESS = f"{HIDDEN}process."


class NullRun:
    """A run that does nothing: for ranks other than the first, and without tracking."""

    run_id: Optional[str] = None
    name = ""

    def log(self, metrics: Dict[str, Any], step: int) -> None:
        """Metrics of one step: name -> number (floats, tensors of one element), also NaN and infinity.

        Points that the log had before the run was resumed are left out.
        """

    def artifact(self, path: Any, folder: str = "") -> None:
        """Add a file, or all files of a folder, under `folder` of the run; it is read when it is sent."""
        self._append({"artifact": str(Path(path).resolve()), "folder": folder})

    def dataset(self, name: str, digest: str, source: str = "", context: str = "training") -> None:
        """Record the data of the run; `digest` is its full hash."""
        self._append({"dataset": {"name": name, "digest": digest, "source": source, "context": context}})

    def describe(self, result: str, note: str) -> None:
        """Append a result to the run's name, and show a Markdown note above its metrics; RUN_ID in it is replaced."""
        name = self.name.partition(SEPARATOR)[0]
        self.tags({"mlflow.runName": f"{name}{SEPARATOR}{result}", "mlflow.note.content": note})

    def compare_with_champion(self, pairs: Any, name: str = MODEL) -> None:
        """Compare the run's model, by the pairs.csv of its evaluation, with the `champion` of those named `name`."""
        self._append({"challenge": {"name": name, "pairs": str(Path(pairs).resolve())}})

    def model(self, *paths: Any, name: str = MODEL, step: int = 0) -> None:
        """Register the trained model under `name`. paths: its weights, and the JSON next to them."""
        files = [str(Path(path).resolve()) for path in paths]
        self._append({"model": {"name": name, "files": files, "step": int(step)}})

    def tags(self, tags: Dict[str, Any]) -> None:
        """Set further tags."""
        self._append({"tags": {str(key): str(value) for key, value in tags.items()}})

    def close(self, status: str = "FINISHED", wait: Optional[float] = None) -> bool:
        """End the run as FINISHED, FAILED or KILLED; True if everything has reached the server.

        Waits a bounded time: `wait` seconds, or 20 s for a server and 60 s for a local store (none without MLflow), and
        after FINISHED one more second per 50 kB of files for a server that answers. Prints what has not arrived; the
        log keeps it, and the next run in the same folder sends it.
        """
        return True

    def _append(self, event: Event) -> None:
        pass

    def __enter__(self) -> NullRun:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close("FINISHED" if kind is None else ending(kind))


class Run(NullRun):
    """An open run. Everything goes to the local log; an `Uploader` sends it from there.

    Created by `tracking.open_run` and `tracking.attach`. As a context manager it closes itself: FINISHED, FAILED on an
    exception, KILLED on Ctrl-C or sys.exit (by which a signal ends a stage).
    """

    def __init__(self, queue: LogQueue, queues: List[LogQueue], make_sink: Callable[[], object]) -> None:
        """queue: of its own log; queues: all, in the order of sending."""
        self._queue, self._log, self._uri = queue, queue.log, queue.tracking_uri
        self._sampler: Optional[Sampler] = None
        self._known = self._log.last_steps()
        self._has_metrics = bool(self._known)
        self.name = self._log.header().get("name", "")
        self._warned = self._closed = False
        self._uploader = Uploader(queues, make_sink, redacted(self._uri))
        self._uploader.start()
        atexit.register(self.close, "FAILED")  # for a stage that ended without closing

    @property
    def run_id(self) -> str:
        """MLflow's id if known, else a local key; `resume_run_id` takes either."""
        return self._queue.run_id or self._log.header().get("run_id") or self._log.header()["run"]

    def log(self, metrics: Dict[str, Any], step: int) -> None:
        try:
            kept = {str(k): storable(v) for k, v in metrics.items() if step > self._known.get(str(k), -1)}
        except (TypeError, ValueError) as error:
            self._warn(f"a metric is not a number: {error}")
            return
        if kept:
            self._append({"metrics": kept, "step": int(step), "time": now_ms()})
            self._has_metrics = True

    def sample_system(self) -> None:
        """Log CPU, memory, disk, network and GPUs, starting after the first other metric.

        MLflow shows metrics in the order of their first points, and compares runs by the first metric.
        """
        steps = [step for name, step in self._known.items() if name.startswith("system/")]
        self._sampler = Sampler(self._log_sample, max(steps) + 1 if steps else 0)
        self._sampler.start()

    def _log_sample(self, metrics: Dict[str, float], step: int) -> None:
        if self._has_metrics:
            self.log(metrics, step)

    def close(self, status: str = "FINISHED", wait: Optional[float] = None) -> bool:
        if self._closed:
            return True
        self._closed = True
        atexit.unregister(self.close)
        if self._sampler is not None:
            self._sampler.stop()
        if not self._log.header().get("attached"):
            self._append({"end": status, "time": now_ms()})
        more = self._upload_seconds if wait is None and status == "FINISHED" else lambda: 0.0
        arrived = self._uploader.stop(wait_limit(self._uri) if wait is None else wait, more)
        self._log.close()
        if not arrived and not self._uploader.missing:
            reason = f" ({self._uploader.error})" if self._uploader.error else ""
            say(
                f"{len(self._queue.unsent())} entries have not reached {redacted(self._uri)}{reason}; "
                f"{self._log.path} keeps them, and the next run there sends them"
            )
        return arrived

    def _upload_seconds(self) -> float:
        """How long the files that are on their way may take; says so."""
        if not self._uri.startswith(("http://", "https://")):
            return 0.0
        events = [event for queue in self._uploader.queues for event in queue.unsent()]
        size = sum(size_of(file) for event in events for file in files_of(event))
        if size:
            say(f"{size / 1e6:.1f} MB are on their way to {redacted(self._uri)}, for at most {seconds_for(size):.0f} s")
        return seconds_for(size)

    def _append(self, event: Event) -> None:
        try:
            self._log.append(event)
        except OSError as error:
            self._warn(f"{self._log.path} cannot be written: {error}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            say(text)
        self._warned = True


def files_of(event: Event) -> List[Path]:
    """The files and folders that an event carries."""
    named = [event["artifact"]] if "artifact" in event else event.get("model", {}).get("files", [])
    return [Path(name) for name in named]


def ending(kind: Any) -> str:
    """FAILED or KILLED, from the exception that ended the work."""
    return "KILLED" if issubclass(kind, (KeyboardInterrupt, SystemExit)) else "FAILED"


def redacted(uri: str) -> str:
    """The URI without user name and password."""
    return re.sub("://[^/]*@", "://", uri, count=1)


def process_tags() -> Dict[str, str]:
    """Tags by which `is_gone` recognizes this process later, on this machine."""
    pid = os.getpid()
    tags = {"host": socket.gethostname(), "space": _process_space(), "pid": str(pid), "started": _start_time(pid) or ""}
    return {PROCESS + name: value for name, value in tags.items()}


def is_gone(tags: Dict[str, str]) -> bool:
    """Whether the process of `process_tags` has ended. False if unknown (another machine)."""
    host, space, pid, started = (tags.get(PROCESS + name, "") for name in ("host", "space", "pid", "started"))
    if host != socket.gethostname():
        return False
    mine = _process_space()
    if space.partition(" ")[0] != mine.partition(" ")[0]:
        return True  # the machine has been rebooted since
    return space == mine and pid.isdigit() and _start_time(int(pid)) != started


def _process_space() -> str:
    """Boot id and process namespace, within which process ids are valid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "unknown unknown"


def _start_time(pid: int) -> Optional[str]:
    """Clock ticks from boot to the start of a process; None if there is none of that id, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
