"""The record of a run, which one thread sends to MLflow.

A stage opens a run (`open_run`, `attach`) and writes to it. Every event goes to `log.jsonl`, which
is the record and contains no password. A thread (`Sender`) sends the log to MLflow
(`mlflow_store`), so no server can delay or end the work.

    python -m pipeline.tracking resend    send what a server has missed
    python -m pipeline.tracking ui        MLflow's pages on the store of this clone
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import textwrap
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Tuple

from pipeline import errors, mlflow_store, provenance
from pipeline.mlflow_store import (
    EVALUATION,  # noqa: F401 (the prefix of the stage `evaluate`)
    OWN_STORE,
    SEPARATOR,
    Event,
    MlflowRun,
    database,
    place_of,
    reason_of,
    redact,
    say,
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
        line = redact(json.dumps(event, separators=(",", ":"), default=str)).encode()
        if self._stream is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.path, "ab")  # noqa: SIM115 (kept open)
            # The lock tells `resend` that this process writes. A network folder may have no locks.
            with contextlib.suppress(OSError):
                fcntl.flock(self._stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # A killed writer may have left a part of a line. The line ends here, and no reader
            # takes it.
            line = b"\n" + line
        self._stream.write(line + b"\n")
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):  # `append` has raised the error of a full disk
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

        Empty and damaged lines are left out, and so is a last line that is not complete yet.
        """
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as stream:
            stream.seek(offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                with contextlib.suppress(ValueError):
                    yield json.loads(line), offset

    def header(self) -> Event:
        """Return the event that describes the run, or {} if the file is empty or no log."""
        return next((event for event, _ in self.read() if "run" in event), {})

    def sent(self) -> Dict[str, int]:
        """Return how many bytes of the log each server has.

        A server that has only answered once has 0.
        """
        return {event["place"]: event["sent"] for event, _ in self.read() if "place" in event}


def find_log(folder: Path, training: Optional[str]) -> Optional[EventLog]:
    """Return the newest log of this training in a folder, or None."""
    # log.jsonl is the newest, and comes before log-TIME.jsonl in this order.
    for path in sorted(folder.glob("log*.jsonl"), reverse=True):
        log = EventLog(path)
        if log.header().get("training", "") == training:
            return log
    return None


# --- a run, as the stages use it


class Run:
    """A run whose events go to a log, and from there to a server.

    The server can neither block the work nor make it fail.

    `open_run` and `attach` create it. Without a log it does nothing, as on ranks other than the
    first. As a context manager it closes itself: as FINISHED, as FAILED on an exception, and as
    KILLED on Ctrl-C or sys.exit (by which a signal ends a stage).
    """

    def __init__(self, log: Optional[EventLog] = None, uri: str = "", owner: bool = False) -> None:
        """Start to send the log to the address `uri`.

        An `owner` also samples the use of the machine, and ends the run when it is closed.
        """
        # Without a log, events go nowhere.
        self._log = log or EventLog(Path(os.devnull))
        self._owner = owner
        self._warned = False
        self._last: Dict[str, int] = {}  # last step of each metric of the training
        self._sender: Optional[Sender] = None
        if log is None:
            return
        # A resumed training repeats steps that it has logged before.
        for event, _ in log.read() if owner else ():
            self._last.update(dict.fromkeys(event.get("metrics", ()), event.get("step", 0)))
        self._began = log.header()["time"]
        self._sender = Sender(log, uri, self.sample)
        self._sender.start()

    def log(self, metrics: Dict[str, Any], step: int) -> None:
        """Log metrics of one step by name.

        A value is a float or a tensor of one element, and may be NaN.

        A point that is not after the last one of its metric is in the log already, and is left out.
        """
        names = [name for name in metrics if step > self._last.get(name, -1)]
        if names:
            self._last.update(dict.fromkeys(names, step))
            points = {name: float(metrics[name]) for name in names}
            self._append({"metrics": points, "step": step, "time": now_ms()})

    def sample(self) -> None:
        """Log the use of CPU, memory and GPUs if the next sample is due. The sender calls it."""
        seconds = float(os.environ.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL") or 10)
        step = int((now_ms() - self._began) / 1000 / seconds)
        last = self._last.get("system/cpu_utilization_percentage", 0)
        # These must not become the first metric, by which MLflow compares runs.
        if self._owner and self._last and step > last:
            used = mlflow_store.use_of_machine()
            self.log({f"system/{name}": value for name, value in used.items()}, step)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Add a file, or all files of a folder, under `folder` of the run."""
        self._append({"artifact": mlflow_store.shorten(path), "folder": folder})

    def describe(self, result: str, note: str) -> None:
        """Append a result to the run's name, and show a Markdown note above its metrics."""
        name = f"{self._log.header().get('name', '')}{SEPARATOR}{result}"
        self.tags({"mlflow.runName": name, "mlflow.note.content": note})

    def model(self, *paths: Path, step: int = 0) -> None:
        """Register the model at the end of the run. `paths` are its weights and their JSON."""
        self._append({"model": [*map(mlflow_store.shorten, paths)], "step": step})

    def compare_with_champion(self, pairs: Path) -> None:
        """Compare the run's model with the `champion`, by the pairs.csv of its evaluation."""
        self._append({"compare": mlflow_store.shorten(pairs)})

    def tags(self, tags: Dict[str, str]) -> None:
        """Set further tags. All but MLflow's own tags get the prefix `superglue.`."""
        self._append({"tags": tags})

    def close(self, status: str = "FINISHED", patience: Optional[float] = None) -> bool:
        """End the run as FINISHED, FAILED or KILLED. Return whether everything reached the server.

        It waits ten minutes at most, and `patience` seconds (by default 6) if the server did not
        answer the last request. Then it names what has not arrived.
        """
        if self._sender is None:
            return True
        sender, self._sender = self._sender, None
        if self._owner:
            self._append({"end": status, "time": now_ms()})
        arrived = sender.stop(PATIENCE_SECONDS if patience is None else patience)
        self._log.close()
        return arrived

    def _append(self, event: Event) -> None:
        try:
            self._log.append(event)
        except OSError as error:
            if not self._warned:
                say(f"{self._log.path} cannot be written: {error}")
            self._warned = True

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close("FINISHED" if kind is None else ending(kind))


def ending(kind: Any) -> str:
    """Return FAILED or KILLED, from the type of the exception that ended the work."""
    return "KILLED" if issubclass(kind, (KeyboardInterrupt, SystemExit)) else "FAILED"


def tracking_uri(log: Optional[EventLog] = None) -> str:
    """Return the address for a new run, or for the run of a log.

    A run stays at the address where it has once arrived, since the environment may be that of a
    container. A new run goes to MLFLOW_TRACKING_URI. If that is not set, it goes to `mlflow.db` in
    the user's clone, also from a DVC experiment's copy. A SQLite file that is not here belongs to
    another machine or container, and does not count. Passwords come from the environment.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or OWN_STORE
    places = log.sent() if log else ()
    place = next((each for each in places if (database(each) or Path("/")).exists()), None)
    # The same address in the environment may have a password, so it is kept.
    if place not in (None, place_of(uri)):
        uri = place
    path = database(uri)
    return f"sqlite:///{path}" if path else uri


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
    # Open the log of the run to be continued, or a new log.jsonl; an old one gets another name.
    log = find_log(folder, training) if resume else None
    if log is None:
        log = EventLog(folder / "log.jsonl")
        if log.path.exists():
            log.path.rename(folder / f"log-{time.time_ns()}.jsonl")
    flat = {key: str(value) for key, value in flatten(params).items()}
    # Sections repeat the views that all stages share: `evaluate.views.x` is left out if it is
    # `views.x`.
    flat = {key: text for key, text in flat.items() if flat.get(key.partition(".")[2]) != text}
    # Collect tags of the project, and tags that MLflow shows as columns.
    git = provenance.git_state()
    stage = os.environ.get("DVC_STAGE") or "train"
    all_tags = {
        **(tags or {}),
        "git.dirty": git["dirty"],
        "world_size": os.environ.get("WORLD_SIZE", "1"),
        "params": json_digest(flat),
        "mlflow.source.name": f"pipeline.{stage}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git["commit"],
        "mlflow.user": os.environ.get("USER", str(os.getuid())),
    }
    uri = tracking_uri(log)
    # A resumed run keeps its header, from which its name and parameters come.
    if log.header():
        log.append({"tags": all_tags, "resumed": True})
    else:
        given = os.environ.get("MLFLOW_RUN_NAME") or os.environ.get("DVC_EXP_NAME") or name
        log.append(
            {
                "run": uuid.uuid4().hex,
                "training": training,
                "experiment": mlflow_store.experiment_name(),
                "name": given or time.strftime("%Y-%m-%d %H.%M"),
                "params": {**flat, **provenance.machine()},
                "tags": all_tags,
                "time": now_ms(),
            }
        )
    return Run(log, uri, True)


def attach(path: Path, training: Optional[str]) -> Run:
    """Continue the run of a training from another stage. Without such a run, do nothing.

    `path` is `log.jsonl` of the training, or of a later training in the same folder. The log of the
    training gets the events. Events that the server lacks are sent first. A server that lacks no
    event is not called. Closing does not change the run's state.
    """
    log = find_log(path.parent, training)
    return Run(log, tracking_uri(log)) if log else Run()


# --- the thread that sends

POLL_SECONDS = 2.0
LONGEST_CLOSE_SECONDS = 600.0  # longest time that a run waits for a server that answers
PATIENCE_SECONDS = 6.0  # how long a run waits for a server that does not answer
RESEND_PATIENCE_SECONDS = 60.0  # the same for `resend`
EVENTS_AT_ONCE = 100  # largest number of events in one request
FILES = {"artifact", "model", "compare"}  # events that send or need files
# MLflow will never accept events that it answers with one of these error codes.
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE")
# After an answer with one of these error codes, waiting does not help. A wrong login or a wrong
# host name gives such an answer, too.
CLOSED = (*REFUSALS, "PERMISSION_DENIED", "UNAUTHENTICATED", "ENDPOINT_NOT_FOUND")


class Sender(threading.Thread):
    """A thread that sends a log from the first event that the server lacks, until it is stopped.

    While no server answers, it tries again, so everything is sent at least once. MLflow identifies
    a point by (run, name, time, step, value), so it stores a point once. Events that a server
    refuses, and files that are missing or damaged, are named and left out, so that they hold up no
    other. A server that refuses the run ends the thread.
    """

    def __init__(self, log: EventLog, uri: str, sample: Callable[[], None]) -> None:
        """Prepare to send `log` to the server or local store `uri`, and to call `sample` often."""
        super().__init__(name="tracking", daemon=True)
        self.place = place_of(uri)
        self.error: Optional[str] = None  # reason why the last try failed
        self._has_warned = False  # whether a line says so, since something was sent
        self._log = log
        self._uri = uri
        self._sample = sample
        self._run: Optional[MlflowRun] = None
        # Everything in the log before this byte is sent or refused.
        self._offset = log.sent().get(self.place, 0)
        self._refused: Counter[str] = Counter()  # number of events by the reason
        self._stopping = threading.Event()
        self._given_up = threading.Event()

    def run(self) -> None:
        while not self._given_up.is_set():
            # Ask before reading the log, so that the run's last event is in it.
            last = self._stopping.is_set()
            try:
                if not last:
                    self._sample()
                self._send_log()
                if last and not self._refused:
                    self._log.append({"sent": self._offset, "place": self.place})
                if last:
                    return
            except Exception as error:  # whatever it is, the work continues
                self._fail(error)
            (self._given_up if last else self._stopping).wait(POLL_SECONDS)

    def _fail(self, error: Exception) -> None:
        """Say why a try failed, at first and at last. The next try opens the run again."""
        # Without MLflow, or with a wrong address, nothing can be sent.
        is_final = isinstance(error, (ImportError, errors.RequestError))
        is_final |= getattr(error, "error_code", "") in CLOSED
        what = "gets nothing" if is_final else "does not answer"
        if not self._has_warned or is_final:
            say(f"{self.place} {what} ({reason_of(error)}); the log keeps all")
        self._has_warned = True
        self.error = reason_of(error)
        self._run = None
        if is_final:
            self._given_up.set()

    def stop(self, patience: float) -> bool:
        """Send the rest, and wait as `Run.close` says. Return whether everything has arrived."""
        began = time.monotonic()
        self._stopping.set()
        while self.is_alive():
            if time.monotonic() > began + (patience if self.error else LONGEST_CLOSE_SECONDS):
                break
            self.join(0.1)
        # End the thread, and name what has not arrived.
        self._given_up.set()
        unsent = [event for event, _ in self._log.read(self._offset) if "sent" not in event]
        missing = [f"{count} refused ({reason})" for reason, count in self._refused.items()]
        missing += [f"{len(unsent)} entries"] if unsent else []
        if missing:
            named = textwrap.shorten(", ".join(missing), 600, placeholder=" ...")
            why = f" ({self.error})" if self.error else ""
            say(
                f"{self.place} does not have {named}{why}; {self._log.path} does. To send it later:"
                " python -m pipeline.tracking resend (--to URI: to another address)"
            )
        return not missing

    def _send_log(self) -> None:
        """Send all events, in batches, from the first one that the server lacks."""
        while not self._given_up.is_set():
            batch = list(itertools.islice(self._log.read(self._offset), EVENTS_AT_ONCE))
            events = [event for event, _ in batch]
            if all("sent" in event for event in events):
                return
            if self._run is None:
                self._run = MlflowRun(self._uri, self._log.header())
                self.error = None  # the server answers
                if self.place not in self._log.sent():
                    self._log.append({"sent": 0, "place": self.place})  # the server has answered
                if self._run.is_new:  # a new run gets all events
                    self._offset = 0
                    continue
            # Send points and tags together, and each file and the model by itself.
            groups = [[event for event in events if not FILES & event.keys()]]
            groups += [[event] for event in events if FILES & event.keys()]
            for group in groups:
                self._send(self._run, group)
            self._offset = batch[-1][1]

    def _send(self, run: MlflowRun, events: List[Event]) -> None:
        """Send events. What is refused is named and left out."""
        try:
            run.send(events)
            self._has_warned = False
        except Exception as error:
            # A text or the name of a file may be no Unicode.
            missing = isinstance(error, (FileNotFoundError, UnicodeError, errors.RequestError))
            if not missing and getattr(error, "error_code", "") not in REFUSALS:
                raise
            if len(events) > 1:  # find the event that is refused
                for event in events:
                    self._send(run, [event])
                return
            self._refused[reason_of(error)] += 1


# --- the commands


def main(argv: Optional[List[str]] = None) -> int:
    parser = errors.make_parser("pipeline.tracking", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
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
    # Resend the logs of all runs below the folder.
    logs = [log for log in map(EventLog, sorted(args.reports.rglob("log*.jsonl"))) if log.header()]
    results = [resend(log, args.to) for log in logs]
    print(f"{sum(results)} of {len(logs)} runs in {args.reports} are complete")
    return 0 if all(results) else 1


def resend(log: EventLog, to: Optional[str] = None) -> bool:
    """Send what is missing of one run. Return whether the server has all of it then."""
    if log.is_in_use():
        print(f"{log.path}: a process is writing it, and sends it itself")
        return True
    # The last of these events is `end` if the run was closed after it was opened or resumed.
    states = ["end" in event for event, _ in log.read() if {"end", "resumed", "run"} & event.keys()]
    if not states[-1]:
        log.append({"end": "KILLED", "time": now_ms()})  # the process of the run is gone
    return Run(log, to or tracking_uri(log)).close(patience=RESEND_PATIENCE_SECONDS)


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
