"""The record of a run, which one thread sends to MLflow.

A stage opens a run (`open_run`, `attach`) and writes to it. Every event goes to `log.jsonl`, which
is the record and contains no password. A thread (`Sender`) sends the log to MLflow
(`mlflow_store`), so no server can delay or end the work.

    python -m pipeline.tracking resend    send what a server has missed
    python -m pipeline.tracking ui        MLflow's pages on the store of this clone
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import itertools
import json
import math
import os
import textwrap
import threading
import time
import uuid
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Tuple

from pipeline import errors, mlflow_store, provenance
from pipeline.mlflow_store import (
    EVALUATION,  # noqa: F401 (the prefix of the stage `evaluate`)
    OWN_STORE,
    SEPARATOR,
    TAGS,
    Event,
    Store,
    database,
    place_of,
    reason_of,
    redact,
    say,
    shorten,
)
from pipeline.params import flatten
from superglue_sift.files import json_digest

# --- the log


def now_ms() -> int:
    """Return the milliseconds since 1970, MLflow's unit of time."""
    return int(time.time() * 1000)


class EventLog:
    """An append-only file of JSON lines, one event each. Any thread may append.

    An event is the header (`run`), `metrics`, `artifact`, `model`, `compare`, `tags`, `end` (the
    state of the run), or `sent`. `sent` is the number of bytes of the log that the server `place`
    has completely. The header names the training, as checkpoints and models do, so metrics find
    their run also after `dvc checkout` of an older model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: Optional[BinaryIO] = None

    def append(self, event: Event) -> None:
        """Append one event. Raises OSError if it cannot be written."""
        line = json.dumps(redact(event), separators=(",", ":"), default=str).encode() + b"\n"
        if self._stream is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.path, "a+b")  # noqa: SIM115 (kept open)
            # The file is opened when there is something to write, so that a run of another rank
            # leaves no file. The lock tells `resend` that this process writes. A network folder
            # may have no locks.
            with contextlib.suppress(OSError):
                fcntl.flock(self._stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            size = self.path.stat().st_size
            if size and os.pread(self._stream.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line  # a killed writer left a part of a line, which no reader takes
        self._stream.write(line)
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):  # of a full disk, which `append` has raised
                self._stream.close()
            self._stream = None

    def is_in_use(self) -> bool:
        """Return whether a process of this machine has the file open for writing."""
        with open(self.path, "rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return isinstance(error, BlockingIOError)
        return False

    def read(self, offset: int = 0) -> Iterator[Tuple[Event, int]]:
        """Yield the events from byte `offset`, each with the offset of its end.

        A partial last line is left out, and a damaged line is {}.
        """
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as stream:
            stream.seek(offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                event: Any = {}
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                yield (event if isinstance(event, dict) else {}), offset

    def header(self) -> Event:
        """Return the first event, or {} if the file is empty or no log."""
        first = next((event for event, _ in self.read()), {})
        return first if "run" in first else {}

    def sent(self) -> Dict[str, int]:
        """Return how many bytes each server has completely, 0 for one that has only answered
        once."""
        return {event["place"]: event["sent"] for event, _ in self.read() if "place" in event}


def find_log(folder: Path, training: Optional[str]) -> Optional[EventLog]:
    """Return the newest log of this training in a folder, or None."""
    logs = sorted(folder.glob("log*.jsonl"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    found = (log for log in map(EventLog, logs) if log.header().get("training") == training)
    return next(found, None) if training else None


# --- a run, as the stages use it


class Run:
    """A run whose events go to a log, and from there to a server. Nothing here blocks or raises.

    `open_run` and `attach` create it. Without a log it does nothing, as on ranks other than the
    first. As a context manager it closes itself: as FINISHED, as FAILED on an exception, and as
    KILLED on Ctrl-C or sys.exit (by which a signal ends a stage).
    """

    def __init__(self, log: Optional[EventLog] = None, uri: str = "", owner: bool = False) -> None:
        """Start to send the log to the address `uri`.

        An `owner` also samples the use of the machine, and ends the run when it is closed.
        """
        self._log = log
        self._owner = owner
        self._warned = False
        self._sampled = time.monotonic()
        self._known: Dict[str, int] = {}  # last step of each metric before this process
        self._sender: Optional[Sender] = None
        if log is None:
            return
        # what a resumed training has logged before
        for event, _ in log.read():
            for name in event.get("metrics", ()) if owner else ():
                self._known[name] = max(self._known.get(name, 0), event["step"])
        # whether there is a point of the training, and the last sample of the machine
        self._has_points = bool(self._known)
        samples = [step for name, step in self._known.items() if name.startswith("system/")]
        self._samples = max(samples, default=-1)
        self.key = log.header()["run"]
        self._sender = Sender(log, uri, self.sample if owner else None)
        self._sender.start()
        atexit.register(self.close, "FAILED")  # a stage may end without closing the run

    def log(self, metrics: Dict[str, Any], step: int) -> None:
        """Log metrics of one step by name: floats or tensors of one element, also NaN.

        A resumed training repeats steps. Points that the log has already are left out.
        """
        if self._log is None:
            return
        points = {}
        try:
            for name, value in metrics.items():
                if step > self._known.get(name, -1):
                    number = float(value)
                    # JSON has no NaN and no infinity, so they are written as text
                    points[name] = number if math.isfinite(number) else str(number)
        except (TypeError, ValueError) as error:
            self._warn(f"a metric is not a number: {error}")
        else:
            if points:
                self._append({"metrics": points, "step": int(step), "time": now_ms()})
                self._has_points = True

    def sample(self) -> None:
        """Log the use of CPU, memory and GPUs if the next sample is due. The sender calls it."""
        seconds = float(os.environ.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL") or 10)
        # these must not become the first metric, by which MLflow compares runs
        if self._has_points and time.monotonic() >= self._sampled + seconds:
            self._sampled = time.monotonic()
            self._samples += 1
            used = mlflow_store.use_of_machine()
            self.log({f"system/{name}": value for name, value in used.items()}, self._samples)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Add a file, or all files of a folder, under `folder` of the run. They are sent at the
        end."""
        self._append({"artifact": shorten(path), "folder": folder})

    def describe(self, result: str, note: str) -> None:
        """Append a result to the run's name, and show a Markdown note above its metrics."""
        if self._log is not None:
            name = f"{self._log.header().get('name', '')}{SEPARATOR}{result}"
            self.tags({"mlflow.runName": name, "mlflow.note.content": note})

    def model(self, *paths: Path, step: int = 0) -> None:
        """Register the model at the end of the run. `paths` are its weights and their JSON."""
        self._append({"model": [shorten(path) for path in paths], "step": step})

    def compare_with_champion(self, pairs: Path) -> None:
        """Compare the run's model with the `champion`, by the pairs.csv of its evaluation."""
        self._append({"compare": shorten(pairs)})

    def tags(self, tags: Dict[str, str]) -> None:
        """Set further tags. All but MLflow's own tags get the prefix `superglue.`."""
        self._append({"tags": prefixed(tags)})

    def close(self, status: str = "FINISHED", patience: float = 6.0) -> bool:
        """End the run as FINISHED, FAILED or KILLED. Return whether everything reached the server.

        It waits ten minutes at most, and `patience` seconds if the server did not answer the last
        request. Then it names what has not arrived.
        """
        if self._sender is None or self._log is None:
            return True
        sender, self._sender = self._sender, None
        atexit.unregister(self.close)
        if self._owner:
            self._append({"end": status, "time": now_ms()})
        arrived = sender.stop(patience)
        self._log.close()
        return arrived

    def _append(self, event: Event) -> None:
        if self._log is None:
            return
        try:
            self._log.append(event)
        except OSError as error:
            self._warn(f"{self._log.path} cannot be written: {error}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            say(text)
        self._warned = True

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close("FINISHED" if kind is None else ending(kind))


def prefixed(tags: Dict[str, str]) -> Dict[str, str]:
    return {key if key.startswith("mlflow.") else f"{TAGS}{key}": tags[key] for key in tags}


def ending(kind: Any) -> str:
    """Return FAILED or KILLED, from the type of the exception that ended the work."""
    return "KILLED" if issubclass(kind, (KeyboardInterrupt, SystemExit)) else "FAILED"


def tracking_uri(log: Optional[EventLog] = None) -> str:
    """Return the address for a new run, or for the run of a log.

    A run stays where it has once arrived, since the environment may be that of an image. Otherwise
    MLFLOW_TRACKING_URI counts, then the address that the run began with, then `mlflow.db` in the
    user's clone (also from a DVC experiment's copy). A file that is not there belongs to another
    machine or container, and does not count. Passwords come from the environment.
    """
    current = os.environ.get("MLFLOW_TRACKING_URI") or OWN_STORE
    places = [*log.sent()] if log else []
    if log and current == OWN_STORE:
        places.append(log.header().get("tracking_uri", OWN_STORE))
    # Take the first place that exists. It may be the current one, which then keeps its password.
    exists = (place for place in places if (database(place) or Path("/")).exists())
    place = next(exists, current)
    if place != place_of(current):
        current = place
    path = database(current)
    return f"sqlite:///{path}" if path else current


def open_run(
    folder: Path,
    params: Dict[str, Any],
    training: str,
    resume: bool = False,
    tags: Optional[Dict[str, str]] = None,
    enabled: bool = True,
    name: str = "",
) -> Run:
    """Open a run of a training, or continue its interrupted run.

    `folder` gets `log.jsonl`, in which `attach` finds the run of this `training`. The log of
    another run stays beside it. The run's name is `name`, or the time. `params` may be nested:
    {"train": {"lr": 1}} becomes `train.lr`. If `resume`, the last run of the training is continued,
    unless its log is on another clone or machine. With `enabled=False` (on every rank but the
    first) the run does nothing.
    """
    if not enabled:
        return Run()
    # the log of this run becomes log.jsonl, and that of another run gets a name of its own
    log = EventLog(folder / "log.jsonl")
    known = find_log(folder, training) if resume else None
    if known is None or known.path != log.path:
        if log.path.exists():
            log.path.rename(folder / f"log-{log.path.stat().st_mtime_ns}.jsonl")
        if known is not None:
            known.path.rename(log.path)
    # parameters of the run: the sections, and the machine
    flat = {key: str(value) for key, value in flatten(params).items()}
    # sections repeat the views that all stages share: `evaluate.views.x` is left out if it is
    # `views.x`
    flat = {key: text for key, text in flat.items() if flat.get(key.partition(".")[2]) != text}
    # tags of the project, and tags that MLflow shows as columns
    git = provenance.git_state()
    stage = os.environ.get("DVC_STAGE") or "train"
    experiment = os.environ.get("DVC_EXP_NAME")
    all_tags = {
        **(tags or {}),
        **({"dvc.exp_name": experiment} if experiment else {}),
        "git.dirty": git["dirty"],
        "world_size": os.environ.get("WORLD_SIZE", "1"),
        "params": json_digest(flat),
        "mlflow.source.name": f"pipeline.{stage}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git["commit"],
        "mlflow.user": os.environ.get("USER", str(os.getuid())),
    }
    uri = tracking_uri(log)
    # a resumed run keeps its header, from which its name and address come
    if log.header():
        log.append({"tags": prefixed(all_tags), "resumed": True})
    else:
        given = os.environ.get("MLFLOW_RUN_NAME") or experiment or name
        log.append(
            {
                "run": uuid.uuid4().hex,
                "training": training,
                "tracking_uri": place_of(uri),
                "experiment": mlflow_store.experiment_name(),
                "name": given or time.strftime("%Y-%m-%d %H.%M"),
                "params": {**flat, **provenance.machine()},
                "tags": prefixed(all_tags),
                "time": now_ms(),
            }
        )
    return Run(log, uri, True)


def attach(path: Path, training: Optional[str]) -> Run:
    """Continue the run of a training from another stage. Without such a run, do nothing.

    `path` is `log.jsonl` of the training, or of a later training in the same folder. The log of the
    training gets the events. What the server lacks is sent first. If it lacks nothing and nothing
    is added, it is not called. Closing does not change the run's state.
    """
    log = find_log(path.parent, training)
    return Run(log, tracking_uri(log)) if log else Run()


# --- the thread that sends

POLL_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 10.0  # longest time between two tries while no server answers
LONGEST_CLOSE_SECONDS = 600.0  # longest time that a run waits for a server that answers
RESEND_PATIENCE_SECONDS = 60.0  # how long `resend` waits for a server that does not answer
EVENTS_AT_ONCE = 100
# Error codes of answers that mean that MLflow will never accept these events
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE")
# Answers before the first event that no wait will change: wrong address, login or host name
CLOSED = (*REFUSALS, "PERMISSION_DENIED", "UNAUTHENTICATED", "ENDPOINT_NOT_FOUND")


class Sender(threading.Thread):
    """A thread that sends a log from the first event that the server lacks, until it is stopped.

    While no server answers, it tries again, so everything is sent at least once. MLflow identifies
    a point by (run, name, time, step, value), so it stores a point once. Events that a server
    refuses, and files that are missing or damaged, are named and left out, so that they hold up no
    other. A server that refuses the run from the start ends the thread.
    """

    def __init__(
        self, log: EventLog, uri: str, sample: Optional[Callable[[], None]] = None
    ) -> None:
        """Prepare to send `log` to the server or local store `uri`, and to call `sample` often."""
        super().__init__(name="tracking", daemon=True)
        self.place = place_of(uri)
        self.error: Optional[str] = None  # reason why the last try failed
        self._log = log
        self._uri = uri
        self._sample = sample
        self._store: Optional[Store] = None
        self._marked = log.sent().get(self.place, 0)
        self._offset = self._marked  # everything in the log before this byte is sent or refused
        self._refused: List[str] = []
        self._stopping = threading.Event()
        self._given_up = threading.Event()

    def run(self) -> None:
        pause = POLL_SECONDS
        while not self._given_up.is_set():
            # read it first, so that the run's last event is in the log
            last = self._stopping.is_set()
            if self._try(last):
                if last:
                    return
                pause = POLL_SECONDS
            else:
                pause = 1.0 if last else min(2 * pause, LONGEST_PAUSE_SECONDS)
            (self._given_up if last else self._stopping).wait(pause)

    def stop(self, patience: float) -> bool:
        """Send the rest, and wait as `Run.close` says. Return whether everything has arrived."""
        began = time.monotonic()
        self._stopping.set()
        while self.is_alive():
            if time.monotonic() > began + (patience if self.error else LONGEST_CLOSE_SECONDS):
                break
            self.join(0.1)
        # end the thread, and name what has not arrived
        self._given_up.set()
        rest = (event for event, _ in self._log.read(self._offset))
        unsent = [event for event in rest if "sent" not in event]
        entries = sum(not _paths(event) for event in unsent)
        missing = [f"{entries} entries"] if entries else []
        missing += [*self._refused, *(path.name for event in unsent for path in _paths(event))]
        if missing:
            named = textwrap.shorten(", ".join(missing), 600, placeholder=" ...")
            why = f" ({self.error})" if self.error else ""
            say(
                f"{self.place} does not have {named}{why}; {self._log.path} does. To send it later:"
                " python -m pipeline.tracking resend (--to URI: to another address)"
            )
        return not missing

    def _try(self, last: bool) -> bool:
        """Send what the log has. Return False to be called again."""
        try:
            if self._sample and not last:
                self._sample()
            self._send_log()
            if last and self._offset != self._marked and not self._refused:
                self._log.append({"sent": self._offset, "place": self.place})
        except ImportError as error:  # without MLflow nothing can be sent
            self.error = str(error)
            self._given_up.set()
        except Exception as error:  # whatever it is, the work continues
            final = isinstance(error, errors.RequestError)
            final |= self._store is None and getattr(error, "error_code", "") in CLOSED
            what = "refuses the run" if final else "does not answer"
            if self.error is None or final:
                say(f"{self.place} {what} ({reason_of(error)}); the log keeps all")
            self.error = reason_of(error)
            if final:
                self._given_up.set()
            return False
        return True

    def _send_log(self) -> None:
        """Send all events, in batches, from the first one that the server lacks."""
        while not self._given_up.is_set():
            batch = list(itertools.islice(self._log.read(self._offset), EVENTS_AT_ONCE))
            events = [event for event, _ in batch]
            if all("sent" in event for event in events):
                return
            if self._store is None:
                self._store = Store(self._uri, self._log.header())
                self.error = None
                if self.place not in self._log.sent():
                    self._log.append({"sent": 0, "place": self.place})  # the server has answered
                if self._store.is_new:  # a new run gets all events
                    self._offset = 0
                    continue
            # points and tags, then files and the model, each by itself
            self._send(self._store.send, [event for event in events if not _paths(event)])
            for event in filter(_paths, events):
                self._send(self._store.send_files, event, *_paths(event))
            self._offset = batch[-1][1]

    def _send(self, send: Callable[[Any], None], events: Any, *paths: Path) -> None:
        """Send events, or the files `paths`. What is refused is named and left out."""
        try:
            send(events)
            self.error = None
        except Exception as error:
            missing = isinstance(error, (FileNotFoundError, errors.RequestError))
            if not missing and getattr(error, "error_code", "") not in REFUSALS:
                raise
            names = ", ".join(path.name for path in paths) or f"{len(events)} entries"
            self._refused.append(f"{names} ({reason_of(error)})")


def _paths(event: Event) -> List[Path]:
    """Return the files and folders that an event sends or needs, [] for other events."""
    names = event.get("model") or [event.get("artifact") or event.get("compare")]
    return [provenance.main_root() / name for name in names if name]


# --- the commands


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tracking")
    commands = parser.add_subparsers(dest="command", required=True)
    # what can be typed
    send = commands.add_parser("resend", help="send what a server has missed")
    send.add_argument("--reports", type=Path, default=Path("reports"), help="folder with the logs")
    send.add_argument("--to", metavar="URI", help="another address than that of each run")
    pages = commands.add_parser("ui", help="MLflow's pages on the store of this clone")
    pages.add_argument("--host", default="127.0.0.1", help="0.0.0.0: also for other machines")
    pages.add_argument("--port", type=int, default=5000)
    args = parser.parse_args(argv)
    if args.command == "ui":
        return mlflow_store.show_pages(tracking_uri(), args.host, args.port)
    if not args.reports.is_dir():
        raise errors.RequestError(f"{args.reports}: no such folder; --reports names another")
    # the logs of all runs below the folder
    logs = [log for log in map(EventLog, sorted(args.reports.rglob("log*.jsonl"))) if log.header()]
    results = [resend(log, args.to) for log in logs]
    print(f"{sum(results)} of {len(logs)} runs in {args.reports} are complete")
    return 0 if all(results) else 1


def resend(log: EventLog, to: Optional[str] = None) -> bool:
    """Send what is missing of one run. Return whether the server has all of it then."""
    if log.is_in_use():
        print(f"{log.path}: a process is writing it, and sends it itself")
        return True
    # Whether the state of the run was set after it was opened or resumed for the last time
    states = ["end" in event for event, _ in log.read() if {"end", "resumed", "run"} & event.keys()]
    if not states[-1]:
        log.append({"end": "KILLED", "time": now_ms()})  # the process of the run is gone
    return Run(log, to or tracking_uri(log)).close(patience=RESEND_PATIENCE_SECONDS)


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
