"""The one thread that sends a run's log to MLflow. The log is its queue.

Points and tags are sent while the run is open; files and the model when it ends. What fails is
tried again, so everything is sent at least once. MLflow identifies a point by (run, name, time,
step, value), so it stores a point once.
"""

from __future__ import annotations

import contextlib
import itertools
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from pipeline.tracking.log import Event, EventLog
from pipeline.tracking.mlflow_store import MlflowStore, make_monitor
from pipeline.tracking.secrets import redact, say

POLL_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 10.0
EVENTS_AT_ONCE = 500
FILE_TRIES = 3
BYTES_PER_SECOND = 50_000  # of the slowest network on which files arrive before the work ends
FILES = {"artifact", "model", "compare"}  # keys of events that send files, or that need sent files
# MLflow will never accept what it answers so
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE")
Record = Callable[[Dict[str, Any], int], None]


class Sender(threading.Thread):
    """Sends a log from the first event that the server does not have, until stopped.

    Args:
        uri: the server, or a local store.
        record: `Run.log`, to record the use of this machine; None: it is not sampled.
    """

    def __init__(self, log: EventLog, uri: str, record: Optional[Record] = None) -> None:
        super().__init__(name="tracking", daemon=True)
        self.place = redact(uri)
        self.error: Optional[str] = None  # why the last try failed
        self._log = log
        self._uri = uri
        self._record = record
        self._monitor: Any = None
        self._sampled = time.monotonic()
        self._store: Optional[MlflowStore] = None
        self._marked = log.sent(self.place)
        self._offset = self._marked  # of the log, up to which all but files is sent
        self._files: List[Event] = []  # whose turn comes when the run ends
        self._refused: List[str] = []
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._given_up = threading.Event()

    def run(self) -> None:
        pause = POLL_SECONDS
        while not self._given_up.is_set():
            last = self._stopping.is_set()  # read first: the run's last event is in the log by then
            if self._try(last):
                if last:
                    return
                pause = POLL_SECONDS
            else:
                pause = 1.0 if last else min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._wake.wait(pause)
            self._wake.clear()

    def stop(self, wait: Optional[float] = None) -> bool:
        """Send the rest. True if all has arrived; else what is missing is named.

        Waits `wait` seconds. Default: 6 s for a server that did not answer the last request; else
        20 s (60 s for a local store, which may have to be created), and one more for each 50 kB of
        files.
        """
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
        self._given_up.set()
        missing = self._name_unsent()
        if missing:
            why = f" ({self.error})" if self.error else ""
            say(
                f"{self.place} does not have {', '.join(missing)}{why}; {self._log.path} does. "
                "To send it later: python -m pipeline.tracking resend"
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
        """Send what the log has, files only at last. False if the server does not answer."""
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
        except Exception as error:  # of any kind: the work continues
            if self.error is None:
                say(f"{self.place} does not answer ({_reason(error)}); the log keeps all")
            self.error = _reason(error)
            return False
        return True

    def _send_log(self) -> None:
        while not self._given_up.is_set():
            batch = list(itertools.islice(self._log.read(self._offset), EVENTS_AT_ONCE))
            events = [event for event, _ in batch]
            if all("sent" in event for event in events):
                return
            if self._store is None:
                self._store = MlflowStore(self._uri, self._log.header())
                if self._store.is_new:  # it gets all events
                    self._offset = 0
                    continue
            self._send(self._store, [event for event in events if not FILES & event.keys()])
            self._files += [event for event in events if FILES & event.keys()]
            self._offset = batch[-1][1]
            if self.error is not None:
                self.error = None
                say(f"{self.place} answers again")

    def _send(self, store: MlflowStore, events: List[Event]) -> None:
        try:
            store.send(events)
        except Exception as error:
            if getattr(error, "error_code", "") not in REFUSALS:
                raise
            if len(events) == 1:
                self._refused.append(f"{_name(events[0])} ({_reason(error)})")
                return
            for event in events:
                self._send(store, [event])

    def _send_files(self) -> None:
        """Send files and models, each for itself: one that is refused holds up no other."""
        for _ in range(FILE_TRIES):
            for event in list(self._files):
                if self._given_up.is_set() or self._store is None:
                    return
                try:
                    self._store.send_files(event)
                    self._files.remove(event)
                    self.error = None
                except Exception as error:  # of MLflow, HTTP, an object store
                    self.error = _reason(error)
            if not self._files:
                return
            self._given_up.wait(1.0)

    def _sample(self, record: Record) -> None:
        """Log the use of CPU, memory, disk, network and GPUs when the next sample is due."""
        if self._monitor is None:
            self._monitor = make_monitor(record, self._log.last_steps())
        # Not first: MLflow compares runs by their first metric
        is_due = time.monotonic() > self._sampled + self._monitor.sampling_interval
        if is_due and self._log.last_steps():
            self._sampled = time.monotonic()
            with contextlib.suppress(Exception):  # a driver that fails: of various types
                self._monitor.collect_metrics()
                self._monitor.publish_metrics(self._monitor.aggregate_metrics())


def _paths(event: Event) -> List[Path]:
    """The files that an event sends and that are there."""
    paths = [Path(name) for name in event.get("model") or [event.get("artifact")] if name]
    found = [file for path in paths for file in (path, *path.rglob("*"))]
    return [file for file in found if file.is_file()]


def _name(event: Event) -> str:
    """What an event is, for messages."""
    if "artifact" in event:
        return Path(event["artifact"]).name
    if "model" in event:
        return f"the model {Path(event['model'][0]).name}"
    return (
        "the comparison with the champion"
        if "compare" in event
        else ", ".join(event.get("metrics", event))
    )


def _reason(error: Exception) -> str:
    return textwrap.shorten(redact(str(error)) or type(error).__name__, 200, placeholder="...")
