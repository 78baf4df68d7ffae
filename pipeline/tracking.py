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
import errno
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
from pipeline.files import json_digest
from pipeline.mlflow_store import (
    EVALUATION,  # noqa: F401 (the prefix of the stage `evaluate`)
    OWN_STORE,
    SEPARATOR,
    TAGS,
    Event,
    Store,
    database,
    error_code,
    place_of,
    reason_of,
    redact,
    say,
    shorten,
)
from pipeline.params import flatten

# Tags of provenance that are left out. MLflow shows them elsewhere, or they are no input of a run.
SHOWN = ("git.commit", "dvc.stage", "dvc.lock.sha256")
# Tags of provenance that begin like this become parameters of a run
MACHINE = ("version.", "image.", "host", "platform", "processor", "gpus")

# --- the log


def now_ms() -> int:
    """Return the milliseconds since 1970, MLflow's unit of time."""
    return int(time.time() * 1000)


class EventLog:
    """An append-only file of JSON lines, one event each. Any thread may append.

    An event is the header (`run`), `metrics`, `artifact`, `dataset`, `model`, `compare`, `tags`,
    `end` (the state of the run), or `sent`. `sent` is the number of bytes of the log that the
    server `place` has completely. The header names the training, as checkpoints and models do, so
    metrics find their run also after `dvc checkout` of an older model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: Optional[BinaryIO] = None

    def append(self, event: Event) -> None:
        """Append one event. Raises OSError if it cannot be written."""
        line = json.dumps(redact(event), separators=(",", ":"), default=str).encode() + b"\n"
        if self._stream is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (kept open)
            # the lock tells `resend` that this process writes
            with contextlib.suppress(OSError):
                fcntl.flock(self._stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            size = self.path.stat().st_size
            if size and os.pread(self._stream.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line  # a killed writer left a part of a line, which no reader takes
        if self._stream.write(line) < len(line):
            self.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def is_in_use(self) -> bool:
        """Return whether a process of this machine has the file open for writing."""
        with open(self.path, "rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:  # a network file system may have no locks
                return False
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

    def last_steps(self) -> Dict[str, int]:
        """Return the last step logged under each metric's name."""
        last: Dict[str, int] = {}
        for event, _ in self.read():
            for name in event.get("metrics", ()):
                last[name] = max(last.get(name, 0), event["step"])
        return last


def find_log(folder: Path, key: str, value: Optional[str]) -> Optional[EventLog]:
    """Return the newest log in a folder whose header has this value under `key`, or None."""
    logs = sorted(folder.glob("log*.jsonl"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    found = (log for log in map(EventLog, logs) if value and log.header().get(key) == value)
    return next(found, None)


def take_log(folder: Path, run: Optional[str]) -> EventLog:
    """Return `log.jsonl` for a run, with its events so far. The log of another run stays beside
    it."""
    path = folder / "log.jsonl"
    known = find_log(folder, "run", run)
    if known is None or known.path != path:
        if path.exists():
            path.rename(folder / f"log-{path.stat().st_mtime_ns}.jsonl")
        if known is not None:
            known.path.rename(path)
    return EventLog(path)


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
        self._sender: Optional[Sender] = None
        if log is not None:
            # A resumed training repeats steps, whose points are in the log already
            self._known = log.last_steps() if owner else {}
            self.key = log.header()["run"]
            self._sender = Sender(log, uri, self.log if owner else None)
            self._sender.start()
            atexit.register(self.close, "FAILED")  # a stage may end without closing the run

    def log(self, metrics: Dict[str, Any], step: int) -> None:
        """Log metrics of one step by name: floats or tensors of one element, also NaN.

        Points that the log had before the run was resumed are left out.
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

    def artifact(self, path: Path, folder: str = "") -> None:
        """Add a file, or all files of a folder, under `folder` of the run. They are sent at the
        end."""
        self._append({"artifact": shorten(path), "folder": folder})

    def dataset(self, name: str, digest: str, source: str = "") -> None:
        """Record the data of the run. `digest` is its full hash."""
        self._append({"dataset": {"name": name, "digest": digest, "source": source}})
        self.tags({"data": digest})

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

    def close(self, status: str = "FINISHED", wait: Optional[float] = None) -> bool:
        """End the run as FINISHED, FAILED or KILLED. Return whether everything reached the server.

        It waits at most `wait` seconds (see `Sender.stop` for the default), and then names what has
        not arrived.
        """
        if self._sender is None or self._log is None:
            return True
        sender, self._sender = self._sender, None
        atexit.unregister(self.close)
        if self._owner:
            self._append({"end": status, "time": now_ms()})
        arrived = sender.stop(wait)
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
    began = log.header().get("tracking_uri", "") if log else ""
    reached = [*log.sent()] if log else []
    known = [began] if began in reached else reached[-1:]
    for place in (*known, began if current == OWN_STORE else ""):
        if place == place_of(current):
            break
        path = database(place)
        if place and (path is None or path.is_file()):
            current = place
            break
    path = database(current)
    return f"sqlite:///{path}" if path else current


def open_run(
    folder: Path,
    params: Dict[str, Any],
    tags: Optional[Dict[str, str]] = None,
    resume: Optional[str] = None,
    enabled: bool = True,
    training: str = "",
    name: str = "",
) -> Run:
    """Open a run, or continue an interrupted one.

    `folder` gets `log.jsonl`, in which `attach` and `known_run` find the run of this `training`.
    The run's name is `name`, or the time. `params` may be nested: {"train": {"lr": 1}} becomes
    `train.lr`. `resume` is `.key` of the interrupted run. With `enabled=False` (on every rank but
    the first) the run does nothing.
    """
    if not enabled:
        return Run()
    # parameters of the run: the sections, without what repeats, and the machine
    log = take_log(folder, resume)
    flat = {key: str(value) for key, value in flatten(params).items()}
    # Sections repeat the views that all stages share: `evaluate.views.x` is left out if it is
    # `views.x`
    flat = {key: text for key, text in flat.items() if flat.get(key.partition(".")[2]) != text}
    about = provenance.tags()
    machine = {key: value for key, value in about.items() if key.startswith(MACHINE)}
    # tags of the run, of MLflow and of provenance
    all_tags = {
        **(tags or {}),
        **{key: value for key, value in about.items() if key not in (*machine, *SHOWN)},
        "params": json_digest(flat),
        "mlflow.source.name": f"pipeline.{about.get('dvc.stage', 'train')}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": about["git.commit"],
        "mlflow.user": os.environ.get("USER", str(os.getuid())),
    }
    uri = tracking_uri(log)
    if log.header():
        log.append({"tags": prefixed(all_tags), "resumed": True})
    else:
        given = os.environ.get("MLFLOW_RUN_NAME") or os.environ.get("DVC_EXP_NAME") or name
        log.append(
            {
                "run": resume or uuid.uuid4().hex,
                "training": training,
                "tracking_uri": place_of(uri),
                "experiment": mlflow_store.experiment_name(),
                "name": given or time.strftime("%Y-%m-%d %H.%M"),
                "params": {**flat, **machine},
                "tags": prefixed(all_tags),
                "time": now_ms(),
            }
        )
    return Run(log, uri, True)


def known_run(folder: Path, training: str) -> Optional[str]:
    """Return `resume` for a resumed training, or None if its run is on another clone or machine."""
    log = find_log(folder, "training", training)
    return log.header()["run"] if log else None


def attach(path: Path, training: Optional[str]) -> Run:
    """Continue the run of a training from another stage. Without such a run, do nothing.

    `path` is `log.jsonl` of the training, or of a later training in the same folder. The log of the
    training gets the events. What the server lacks is sent first. If it lacks nothing and nothing
    is added, it is not called. Closing does not change the run's state.
    """
    log = find_log(path.parent, "training", training)
    return Run(log, tracking_uri(log)) if log else Run()


# --- the thread that sends

POLL_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 10.0  # longest time between two tries while no server answers
EVENTS_AT_ONCE = 500
FILE_TRIES = 3
BYTES_PER_SECOND = 50_000  # the slowest network on which files still arrive before the work ends
FILES = {"artifact", "model", "compare"}  # keys of events that send files, or that need sent files
# Error codes of answers that mean that MLflow will never accept the event
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE")
# Answers before the first event that no wait will change: wrong address, login or host name
CLOSED = (*REFUSALS, "PERMISSION_DENIED", "UNAUTHENTICATED", "ENDPOINT_NOT_FOUND")


class Sender(threading.Thread):
    """A thread that sends a log from the first event that the server lacks, until it is stopped.

    Points and tags are sent while the run is open. Files and the model are sent when it ends. What
    fails is tried again, so everything is sent at least once. MLflow identifies a point by (run,
    name, time, step, value), so it stores a point once. What a server refuses for ever ends the
    thread.
    """

    def __init__(
        self,
        log: EventLog,
        uri: str,
        record: Optional[Callable[[Dict[str, Any], int], None]] = None,
    ) -> None:
        """Prepare to send `log` to the server or local store `uri`.

        `record` is `Run.log`, to record the use of this machine. If it is None, the use is not
        sampled.
        """
        super().__init__(name="tracking", daemon=True)
        self.place = place_of(uri)
        self.error: Optional[str] = None  # reason why the last try failed
        self._log = log
        self._uri = uri
        self._record = record
        self._monitors: List[Any] = []
        self._sampled = time.monotonic()
        self._store: Optional[Store] = None
        self._marked = log.sent().get(self.place, 0)
        self._offset = self._marked  # everything in the log before this byte is sent, except files
        self._files: List[Event] = []  # events with files, which are sent when the run ends
        self._refused: List[str] = []
        self._wake = threading.Event()
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
            self._wake.wait(pause)
            self._wake.clear()

    def stop(self, wait: Optional[float] = None) -> bool:
        """Send the rest. Return whether everything has arrived. If not, a line names what is
        missing.

        It waits `wait` seconds. By default it waits 6 s if the server did not answer the last
        request, and otherwise 20 s (60 s for a local store, which may have to be created), and one
        more second for each 50 kB of files.
        """
        # the time that the files take on a slow network
        size = sum(path.stat().st_size for event in self._waiting() for path in _paths(event))
        limit = (20.0 if self._uri.startswith("http") else 60.0) + size / BYTES_PER_SECOND
        began = time.monotonic()
        self._stopping.set()
        self._wake.set()
        while self.is_alive():
            seconds = wait if wait is not None else 6.0 if self.error else limit
            if time.monotonic() > began + seconds:
                break
            self.join(0.1)
        # end the thread, and name what has not arrived
        self._given_up.set()
        missing = textwrap.shorten(", ".join(self._name_unsent()), 600, placeholder=" ...")
        if missing:
            why = f" ({self.error})" if self.error else ""
            say(
                f"{self.place} does not have {missing}{why}; {self._log.path} does. To"
                " send it later: python -m pipeline.tracking resend (--to URI: to another address)"
            )
        return not missing

    def _waiting(self) -> List[Event]:
        rest = (event for event, _ in self._log.read(self._offset))
        return [*self._files, *(event for event in rest if "sent" not in event)]

    def _name_unsent(self) -> List[str]:
        waiting = self._waiting()
        files = [event for event in waiting if FILES & event.keys()]
        others = len(waiting) - len(files)
        return [*([f"{others} entries"] if others else []), *self._refused, *map(_name, files)]

    def _try(self, last: bool) -> bool:
        """Send what the log has, and files if it is the last time. Return False to be called
        again."""
        try:
            if self._record and not last:
                self._sample(self._record)
            self._send_log()
            if last:
                self._send_files()
                if self._offset != self._marked and not self._name_unsent():
                    self._log.append({"sent": self._offset, "place": self.place})
        except ImportError as error:  # without MLflow nothing can be sent
            self.error = str(error)
            self._given_up.set()
        except Exception as error:  # whatever it is, the work continues
            final = isinstance(error, errors.RequestError)
            final |= error_code(error) in (CLOSED if self._store is None else REFUSALS)
            what = "refuses the run" if final else "does not answer"
            if self.error is None or final:
                say(f"{self.place} {what} ({reason_of(error)}); the log keeps all")
            self.error = reason_of(error)
            if final:
                self._given_up.set()
            return False
        return True

    def _send_log(self) -> None:
        while not self._given_up.is_set():
            batch = list(itertools.islice(self._log.read(self._offset), EVENTS_AT_ONCE))
            events = [event for event, _ in batch]
            if all("sent" in event for event in events):
                return
            if self._store is None:
                self._store = Store(self._uri, self._log.header())
                if self.place not in self._log.sent():
                    self._log.append({"sent": 0, "place": self.place})  # the server has answered
                if self._store.is_new:  # a new run gets all events
                    self._offset = 0
                    continue
            self._send(self._store, [event for event in events if not FILES & event.keys()])
            self._files += [event for event in events if FILES & event.keys()]
            self._offset = batch[-1][1]
            if self.error is not None:
                self.error = None
                say(f"{self.place} answers again")

    def _send(self, store: Store, events: List[Event]) -> None:
        """Send events. A refused event is named and left out, unless the run itself is deleted."""
        try:
            store.send(events)
        except Exception as error:
            if error_code(error) not in REFUSALS or not store.is_active():
                raise
            if len(events) == 1:
                self._refused.append(f"{_name(events[0])} ({reason_of(error)})")
                return
            # one of several events is refused: find it by sending each alone
            for event in events:
                self._send(store, [event])

    def _send_files(self) -> None:
        """Send files and models, each by itself, so that a refused one holds up no other."""
        for _ in range(FILE_TRIES):
            for event in list(self._files):
                if self._given_up.is_set() or self._store is None:
                    return
                try:
                    self._store.send_files(event)
                    self._files.remove(event)
                    self.error = None
                except Exception as error:  # errors of MLflow, HTTP or an object store
                    self.error = reason_of(error)
            if not self._files:
                return
            self._given_up.wait(1.0)

    def _sample(self, record: Callable[[Dict[str, Any], int], None]) -> None:
        """Log the use of CPU, memory and GPUs if the next sample is due."""
        seconds = float(os.environ.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL") or 10)
        if time.monotonic() < self._sampled + seconds:
            return
        last = self._log.last_steps()
        if not last:  # these must not become the first metric, by which MLflow compares runs
            return
        self._sampled = time.monotonic()
        self._monitors = self._monitors or mlflow_store.make_monitors()
        used = {}
        for monitor in self._monitors:
            # a driver that fails raises errors of various types
            with contextlib.suppress(Exception):
                monitor.collect_metrics()
                used.update(monitor.aggregate_metrics())
                monitor.clear_metrics()
        steps = [step for name, step in last.items() if name.startswith("system/")]
        record(
            {f"system/{name}": value for name, value in used.items()}, max(steps, default=-1) + 1
        )


def _paths(event: Event) -> List[Path]:
    """Return the files that an event sends and that exist."""
    names = event.get("model") or [event.get("artifact")]
    paths = [provenance.main_root() / name for name in names if name]
    found = [file for path in paths for file in (path, *path.rglob("*"))]
    return [file for file in found if file.is_file()]


def _name(event: Event) -> str:
    """Say what an event is, for messages."""
    if "artifact" in event:
        return Path(event["artifact"]).name
    if "model" in event:
        return f"the model {Path(event['model'][0]).name}"
    if "compare" in event:
        return "the comparison with the champion"
    return ", ".join(event.get("metrics", event))


# --- the commands


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tracking")
    commands = parser.add_subparsers(dest="command", required=True)
    # what can be typed
    send = commands.add_parser("resend", help="send what a server has missed")
    send.add_argument("--reports", type=Path, default=Path("reports"), help="folder with the logs")
    send.add_argument("--wait", type=float, default=3600, help="seconds for each run")
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
    results = [resend(log, args.wait, args.to) for log in logs]
    print(f"{sum(results)} of {len(logs)} runs in {args.reports} are complete")
    return 0 if all(results) else 1


def resend(log: EventLog, wait: float, to: Optional[str] = None) -> bool:
    """Send what is missing of one run. Return whether the server has all of it then."""
    if log.is_in_use():
        print(f"{log.path}: a process is writing it, and sends it itself")
        return True
    # Whether the state of the run was set after it was opened or resumed for the last time
    states = ["end" in event for event, _ in log.read() if {"end", "resumed", "run"} & event.keys()]
    if not states[-1]:
        log.append({"end": "KILLED", "time": now_ms()})  # the process of the run is gone
    return Run(log, to or tracking_uri(log)).close(wait=wait)


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
