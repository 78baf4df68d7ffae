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
import math
import os
import textwrap
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Tuple

from pipeline import errors, mlflow_store, provenance
from pipeline.errors import RequestError
from pipeline.mlflow_store import (
    CLONE_STORE,
    EVALUATION,  # noqa: F401 (the prefix of the stage `evaluate`)
    SEPARATOR,
    Event,
    MlflowRun,
    format_address,
    format_error,
    get_database_path,
    print_message,
    redact,
)
from pipeline.params import flatten
from superglue_sift.files import compute_json_digest

SAMPLING_INTERVAL = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"  # A variable of the environment

# --- the log


def get_time_ms() -> int:
    """Return the present time in milliseconds since 1970, MLflow's unit."""
    return int(time.time() * 1000)


class EventLog:
    """An append-only file of JSON lines, one event each. Any thread may append.

    An event is the header (`run`), `metrics`, `artifact`, `model`, `compare`, `tags`, `end` (the
    state of the run), or `sent`. `sent` is the number of bytes of the log that the server at the
    address `place` has completely. The header names the training, as checkpoints and models do, so
    metrics find their run also after `dvc checkout` of an older model.

    Attributes:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: Optional[BinaryIO] = None

    def append(self, event: Event) -> None:
        """Append one event to the file.

        Raises:
            OSError: If the file cannot be written.
        """
        line = redact(json.dumps(event, separators=(",", ":"), default=str)).encode()
        if self._stream is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.path, "ab")  # noqa: SIM115 (it stays open)
            # The lock tells `resend` that this process writes. A network folder may have no locks.
            with contextlib.suppress(OSError):
                fcntl.flock(self._stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # A killed writer may have left a part of a line, which ends here. `read` leaves it out.
            line = b"\n" + line
        self._stream.write(line + b"\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file, and give its lock back."""
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

    def read_header(self) -> Event:
        """Read the event that describes the run, or {} if the file is empty or no log."""
        return next((event for event, _ in self.read() if "run" in event), {})

    def read_sent(self) -> Dict[str, int]:
        """Read how many bytes of the log each server has, by its address.

        A server that has answered, but got no event yet, has 0.
        """
        return {event["place"]: event["sent"] for event, _ in self.read() if "place" in event}


def find_log(folder: Path, training: Optional[str]) -> Optional[EventLog]:
    """Find the newest log of a training in a folder. Return None if there is none."""
    # log.jsonl is the newest, and comes before log-TIME.jsonl in this order.
    for path in sorted(folder.glob("log*.jsonl"), reverse=True):
        log = EventLog(path)
        if log.read_header().get("training", "") == training:
            return log
    return None


# --- a run, as the stages use it


class Run:
    """A run whose events go to a log, and from there to a server.

    The server can neither block the work nor make it fail. `open_run` and `attach` create the run.
    Without a log it does nothing, as on ranks other than the first. As a context manager it closes
    itself: as FINISHED, as FAILED on an exception, and as KILLED on Ctrl-C or sys.exit (by which a
    signal ends a stage).
    """

    def __init__(self, log: Optional[EventLog] = None, uri: str = "", owner: bool = False) -> None:
        """Start to send the log to a server.

        Args:
            log: the log of the run. If None, the run does nothing.
            uri: the address of the server or local store.
            owner: whether this process has the run's training. It also samples the use of the
                machine, and ends the run when it is closed.
        """
        # Without a log, events go nowhere.
        self._log = log or EventLog(Path(os.devnull))
        self._owner = owner
        self._warned = False
        self._last_steps: Dict[str, int] = {}  # Last step of each metric of the training
        self._sender: Optional[Sender] = None
        if log is None:
            return
        # A resumed training repeats steps that it has logged before.
        for event, _ in log.read() if owner else ():
            self._last_steps.update(dict.fromkeys(event.get("metrics", ()), event.get("step", 0)))
        self._began = log.read_header()["time"]
        self._sender = Sender(log, uri, self.sample_machine_use)
        self._sender.start()

    def log_metrics(self, metrics: Dict[str, Any], step: int) -> None:
        """Log metrics of one step.

        A point that is not after the last one of its metric is in the log already, and is left out.

        Args:
            metrics: the values by name. A value is a float or a tensor of one element, and may be
                NaN.
            step: the step of the training.
        """
        names = [name for name in metrics if step > self._last_steps.get(name, -1)]
        if names:
            self._last_steps.update(dict.fromkeys(names, step))
            points = {name: float(metrics[name]) for name in names}
            self._append({"metrics": points, "step": step, "time": get_time_ms()})

    def sample_machine_use(self) -> None:
        """Log the use of CPU, memory and GPUs if the next sample is due.

        The sender calls this method often.
        """
        step = int((get_time_ms() - self._began) / 1000 / read_sampling_interval())
        last = self._last_steps.get("system/cpu_utilization_percentage", 0)
        # This use must not become the first metric, by which MLflow compares runs.
        if self._owner and self._last_steps and step > last:
            use = mlflow_store.measure_machine_use()
            self.log_metrics({f"system/{name}": value for name, value in use.items()}, step)

    def add_artifact(self, path: Path, folder: str = "") -> None:
        """Add a file, or all files of a folder, to the folder `folder` of the run's artifacts."""
        self._append({"artifact": mlflow_store.shorten_path(path), "folder": folder})

    def describe(self, result: str, note: str) -> None:
        """Append a result to the run's name, and show a note in Markdown above its metrics."""
        name = f"{self._log.read_header().get('name', '')}{SEPARATOR}{result}"
        self.set_tags({"mlflow.runName": name, "mlflow.note.content": note})

    def register_model(self, *paths: Path, step: int = 0) -> None:
        """Register a model of the run. `paths` are its weights and their JSON."""
        self._append({"model": [*map(mlflow_store.shorten_path, paths)], "step": step})

    def compare_with_champion(self, pairs: Path) -> None:
        """Compare the run's model with the `champion`, by the pairs.csv of its evaluation."""
        self._append({"compare": mlflow_store.shorten_path(pairs)})

    def set_tags(self, tags: Dict[str, str]) -> None:
        """Set further tags of the run. All but MLflow's own tags get the prefix `superglue.`."""
        self._append({"tags": tags})

    def close(self, status: str = "FINISHED", patience: Optional[float] = None) -> bool:
        """End the run, and wait until everything has reached the server.

        A line names what has not arrived.

        Args:
            status: FINISHED, FAILED or KILLED.
            patience: seconds to wait if the server did not answer the last request (default: 6). A
                server that answers is waited for ten minutes at most.

        Returns:
            Whether everything has reached the server.
        """
        if self._sender is None:
            return True
        sender = self._sender
        self._sender = None
        if self._owner:
            self._append({"end": status, "time": get_time_ms()})
        arrived = sender.stop(PATIENCE_SECONDS if patience is None else patience)
        self._log.close()
        return arrived

    def _append(self, event: Event) -> None:
        try:
            self._log.append(event)
        except OSError as error:
            if not self._warned:
                print_message(f"{self._log.path} cannot be written: {error}")
            self._warned = True

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close("FINISHED" if kind is None else get_end_status(kind))


def get_end_status(kind: Any) -> str:
    """Return FAILED or KILLED, from the type of the exception that ended the work."""
    return "KILLED" if issubclass(kind, (KeyboardInterrupt, SystemExit)) else "FAILED"


def choose_uri(log: Optional[EventLog] = None) -> str:
    """Choose the address of a new run (`log` is None), or of the run of a log.

    A run stays at the address where it has once arrived, since the environment may be that of a
    container. A new run goes to MLFLOW_TRACKING_URI. If that is not set, it goes to `mlflow.db` in
    the user's clone, also from a DVC experiment's copy. A SQLite file that is missing belongs to
    another machine or container, and does not count. Passwords come from the environment.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or CLONE_STORE
    addresses = log.read_sent() if log else ()
    usable = (
        address for address in addresses if (get_database_path(address) or Path("/")).exists()
    )
    address = next(usable, None)
    # If the environment has the same address, perhaps with a password, that one is used.
    if address not in (None, format_address(uri)):
        uri = address
    path = get_database_path(uri)
    return f"sqlite:///{path}" if path else uri


def read_sampling_interval() -> float:
    """Return the time between two samples of the machine's use in seconds, as for MLflow.

    Raises:
        RequestError: If the environment variable SAMPLING_INTERVAL is no number above 0.
    """
    text = os.environ.get(SAMPLING_INTERVAL) or "10"
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if 0 < seconds < math.inf:
            return seconds
    raise RequestError(f"environment {SAMPLING_INTERVAL}={text!r}: must be seconds above 0")


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

    Args:
        folder: the folder that gets `log.jsonl`. The log of another run stays beside it.
        params: the parameters of the run. They may be nested: {"train": {"lr": 1}} becomes
            `train.lr`.
        training: the identity of the training, by which `attach` finds the run.
        resume: whether to continue the last run of the training, unless its log is on another
            clone or machine.
        tags: further tags of the run.
        enabled: False on every rank but the first, where the run does nothing.
        name: the name of the run. If "", the run is named by the time.
    """
    if not enabled:
        return Run()
    # Open the log of the run to be continued, or a new log.jsonl; an old one gets another name.
    log = find_log(folder, training) if resume else None
    if log is None:
        log = EventLog(folder / "log.jsonl")
        if log.path.exists():
            log.path.rename(folder / f"log-{time.time_ns()}.jsonl")
    flat_params = {key: str(value) for key, value in flatten(params).items()}
    # Sections repeat the views that all stages share: `evaluate.views.x` is left out if it is
    # `views.x`.
    flat_params = {
        key: text
        for key, text in flat_params.items()
        if flat_params.get(key.partition(".")[2]) != text
    }
    # Collect tags of the project, and tags that MLflow shows as columns.
    git = provenance.read_git_state()
    stage = os.environ.get("DVC_STAGE") or "train"
    all_tags = {
        **(tags or {}),
        "git.dirty": git["dirty"],
        "world_size": os.environ.get("WORLD_SIZE", "1"),
        "params": compute_json_digest(flat_params),
        "mlflow.source.name": f"pipeline.{stage}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git["commit"],
        "mlflow.user": os.environ.get("USER", str(os.getuid())),
    }
    uri = choose_uri(log)
    # A resumed run keeps its header, from which its name and parameters come.
    if log.read_header():
        log.append({"tags": all_tags, "resumed": True})
    else:
        name = os.environ.get("MLFLOW_RUN_NAME") or os.environ.get("DVC_EXP_NAME") or name
        log.append(
            {
                "run": uuid.uuid4().hex,
                "training": training,
                "experiment": mlflow_store.get_experiment_name(),
                "name": name or time.strftime("%Y-%m-%d %H.%M"),
                "params": {**flat_params, **provenance.describe_machine()},
                "tags": all_tags,
                "time": get_time_ms(),
            }
        )
    return Run(log, uri, owner=True)


def attach(path: Path, training: Optional[str]) -> Run:
    """Continue the run of a training from another stage. Without such a run, do nothing.

    The log of the training gets the events. Events that the server lacks are sent first. A server
    that lacks no event is not called. Closing does not change the run's state.

    Args:
        path: `log.jsonl` of the training, or of a later training in the same folder.
        training: the identity of the training, from the description of its model.
    """
    log = find_log(path.parent, training)
    return Run(log, choose_uri(log)) if log else Run()


# --- the thread that sends

POLL_SECONDS = 2.0
LONGEST_CLOSE_SECONDS = 600.0  # Longest time that a run waits for a server that answers
PATIENCE_SECONDS = 6.0  # How long a run waits for a server that does not answer
RESEND_PATIENCE_SECONDS = 60.0  # How long `resend` waits for a server that does not answer
EVENTS_AT_ONCE = 100  # Largest number of events in one request
FILE_EVENTS = {"artifact", "model", "compare"}  # Events that send or need files
# MLflow will never accept events that it answers with one of these error codes.
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE")
# After one of these error codes, waiting does not help. A wrong login or a wrong host name gives
# such a code, too.
FINAL_ERRORS = (*REFUSALS, "PERMISSION_DENIED", "UNAUTHENTICATED", "ENDPOINT_NOT_FOUND")


class Sender(threading.Thread):
    """A thread that sends a log from the first event that the server lacks, until it is stopped.

    While no server answers, the thread tries again, so everything is sent at least once. MLflow
    identifies a point by (run, name, time, step, value), so it stores a point once. Events that a
    server refuses, and files that are missing or damaged, are named and left out, so that they hold
    up no other event. The thread ends if the server refuses the run.

    Attributes:
        address: the address of the server, without a password.
        error: the reason why the last try failed, or None.
    """

    def __init__(self, log: EventLog, uri: str, sample: Callable[[], None]) -> None:
        """Prepare to send a log.

        Args:
            log: the log of the run.
            uri: the address of the server or local store.
            sample: a function that is called before each try, `Run.sample_machine_use`.
        """
        super().__init__(name="tracking", daemon=True)
        self.address = format_address(uri)
        self.error: Optional[str] = None
        self._has_warned = False  # Whether a line has told the error since the last success
        self._log = log
        self._uri = uri
        self._sample = sample
        self._run: Optional[MlflowRun] = None
        # Everything in the log before this byte is sent or refused.
        self._offset = log.read_sent().get(self.address, 0)
        self._refused: Counter[str] = Counter()  # Number of refused events by the reason
        self._stopping = threading.Event()
        self._given_up = threading.Event()

    def run(self) -> None:
        """Send the log again and again, until `stop` is called or the server refuses the run."""
        while not self._given_up.is_set():
            # Ask before reading the log, so that the run's last event is in it.
            is_last = self._stopping.is_set()
            try:
                if not is_last:
                    self._sample()
                self._send_log()
                if is_last and not self._refused:
                    self._log.append({"sent": self._offset, "place": self.address})
                if is_last:
                    return
            except Exception as error:  # Whatever the error is, the work continues
                self._fail(error)
            (self._given_up if is_last else self._stopping).wait(POLL_SECONDS)

    def _fail(self, error: Exception) -> None:
        """Handle the error of a try. The next try opens the run again.

        A line tells the first error after a success, and an error after which there is no try.
        """
        # Without MLflow, or with a wrong address, nothing can be sent.
        is_final = isinstance(error, (ImportError, errors.RequestError))
        is_final |= getattr(error, "error_code", "") in FINAL_ERRORS
        state = "gets nothing" if is_final else "does not answer"
        if not self._has_warned or is_final:
            print_message(f"{self.address} {state} ({format_error(error)}); the log keeps all")
        self._has_warned = True
        self.error = format_error(error)
        self._run = None
        if is_final:
            self._given_up.set()

    def stop(self, patience: float) -> bool:
        """Send the remaining events, and end the thread. Return whether everything has arrived.

        `patience` is the time in seconds to wait for a server that did not answer the last request.
        """
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
            names = textwrap.shorten(", ".join(missing), 600, placeholder=" ...")
            reason = f" ({self.error})" if self.error else ""
            print_message(
                f"{self.address} does not have {names}{reason}; {self._log.path} does. To send it"
                " later: python -m pipeline.tracking resend (--to URI: to another address)"
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
                self._run = MlflowRun(self._uri, self._log.read_header())
                self.error = None  # The server answers
                # The log tells that this server has answered, for `choose_uri`.
                if self.address not in self._log.read_sent():
                    self._log.append({"sent": 0, "place": self.address})
                # A new run gets all events.
                if self._run.is_new:
                    self._offset = 0
                    continue
            # Send points and tags together, and each file and the model by itself.
            groups = [[event for event in events if not FILE_EVENTS & event.keys()]]
            groups += [[event] for event in events if FILE_EVENTS & event.keys()]
            for group in groups:
                self._send(self._run, group)
            self._offset = batch[-1][1]

    def _send(self, run: MlflowRun, events: List[Event]) -> None:
        """Send events. An event that is refused is counted by its reason, and left out."""
        try:
            run.send(events)
            self._has_warned = False
        except Exception as error:
            # A text or the name of a file may be no Unicode.
            missing = isinstance(error, (FileNotFoundError, UnicodeError, errors.RequestError))
            if not missing and getattr(error, "error_code", "") not in REFUSALS:
                raise
            # Send one event after the other, to find the one that is refused.
            if len(events) > 1:
                for event in events:
                    self._send(run, [event])
                return
            self._refused[format_error(error)] += 1


# --- the commands


def main(argv: Optional[List[str]] = None) -> int:
    """Send what servers have missed, or start MLflow's pages. Return the exit code."""
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
        return mlflow_store.serve_pages(choose_uri(), args.host, args.port)
    if not args.reports.is_dir():
        raise errors.RequestError(f"{args.reports}: no such folder; --reports names another")
    # Resend the logs of all runs below the folder.
    logs = [
        log for log in map(EventLog, sorted(args.reports.rglob("log*.jsonl"))) if log.read_header()
    ]
    results = [resend(log, args.to) for log in logs]
    print(f"{sum(results)} of {len(logs)} runs in {args.reports} are complete")
    return 0 if all(results) else 1


def resend(log: EventLog, to: Optional[str] = None) -> bool:
    """Send what a server has missed of one run. Return whether it has the whole run then.

    Args:
        log: the log of the run.
        to: the address of the server. If None, that of the run is used.
    """
    if log.is_in_use():
        print(f"{log.path}: a process is writing it, and sends it itself")
        return True
    # The last of these events is `end` if the run was closed after it was opened or resumed.
    states = ["end" in event for event, _ in log.read() if {"end", "resumed", "run"} & event.keys()]
    if not states[-1]:
        log.append({"end": "KILLED", "time": get_time_ms()})  # The process of the run is gone
    return Run(log, to or choose_uri(log)).close(patience=RESEND_PATIENCE_SECONDS)


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
