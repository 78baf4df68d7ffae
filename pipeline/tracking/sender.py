"""The one thread that sends a run's log to MLflow. The log is its queue.

Points and tags are sent while the run is open; files and the model when it ends. What fails is
tried again, so everything is sent at least once. MLflow identifies a point by (run, name, time,
step, value), so it stores a point once.
"""

from __future__ import annotations

import itertools
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from pipeline.tracking.log import Event, EventLog
from pipeline.tracking.mlflow_store import Machine, MlflowStore, files_below, seconds_for
from pipeline.tracking.secrets import redact, say

POLL_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 10.0
EVENTS_AT_ONCE = 500
FILE_TRIES = 3
FILES = ("artifact", "model", "compare")  # keys of events that send files, or that need sent files
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
        self._store: Any = None
        self._machine: Optional[Machine] = None
        self._marked = log.sent(self.place)
        self._offset = self._marked  # of the log, up to which all but files is sent
        self._files: List[Event] = []  # whose turn comes when the run ends
        self._refused: List[str] = []
        self._bytes = 0  # of the files, once their turn has come
        self._missing = False  # a package, so that nothing can be sent
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._given_up = threading.Event()

    def run(self) -> None:
        pause = POLL_SECONDS
        while not self._given_up.is_set():
            last = self._stopping.is_set()  # read first: the run's last event is in the log by then
            ok = self._try(last)
            if self._missing or (last and ok):
                return
            pause = POLL_SECONDS if ok else min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._wake.wait(min(pause, 1.0) if last else pause)
            self._wake.clear()

    def stop(self, wait: Optional[float] = None) -> bool:
        """Send the rest. True if all has arrived; else what is missing is named.

        Waits `wait` seconds. Default: 20 s for a server, 60 s to create a local store, 6 s for a
        server that did not answer the last request; and for files, while it answers, one more
        second for each 50 kB.
        """
        is_server = self._uri.startswith(("http://", "https://"))
        limit = (6.0 if self.error else 20.0 if is_server else 60.0) if wait is None else wait
        began = time.monotonic()
        self._stopping.set()
        self._wake.set()
        while self.is_alive():
            more = seconds_for(self._bytes) if wait is None and not self.error else 0.0
            if time.monotonic() > began + limit + more:
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

    def _name_unsent(self) -> List[str]:
        waiting = [event for event, _ in self._log.read(self._offset) if "sent" not in event]
        files = [*self._files, *filter(_has_files, waiting)]
        others = sum(not _has_files(event) for event in waiting)
        count = [f"{others} entries"] if others else []
        return [*count, *self._refused, *map(_name, files)]

    def _try(self, last: bool) -> bool:
        """Send what the log has, files only at last. False if the server does not answer."""
        try:
            if self._record and not last:
                self._sample(self._record)
            self._send_log()
            if last and self._files:
                self._send_files()
            if self._offset != self._marked and last and not self._name_unsent():
                self._log.append({"sent": self._offset, "place": self.place})
        except ImportError as error:
            self._missing = True
            self.error = str(error)
            return False
        except Exception as error:  # of any kind: the work continues
            if self.error is None:
                say(f"{self.place} does not answer ({_reason(error)}); the log keeps all")
            self.error = _reason(error)
            return False
        return True

    def _send_log(self) -> None:
        while not self._given_up.is_set():
            batch = list(itertools.islice(self._log.read(self._offset), EVENTS_AT_ONCE))
            if all("sent" in event for event, _ in batch):
                return
            if self._store is None:
                store = MlflowStore(self._uri)
                is_new = store.open(self._log.header())
                self._store = store
                if is_new:  # it gets all events
                    self._offset = 0
                    continue
            self._send([event for event, _ in batch if not _has_files(event)])
            self._files += [event for event, _ in batch if _has_files(event)]
            self._offset = batch[-1][1]
            if self.error is not None:
                self.error = None
                say(f"{self.place} answers again")

    def _send(self, events: List[Event]) -> None:
        try:
            self._store.send(events)
        except Exception as error:
            if getattr(error, "error_code", "") not in REFUSALS:
                raise
            if len(events) == 1:
                self._refused.append(f"{_name(events[0])} ({_reason(error)})")
                return
            for event in events:
                self._send([event])

    def _send_files(self) -> None:
        """Send files and models, each for itself: one that is refused holds up no other."""
        paths = [path for event in self._files for path in _paths(event) if path.exists()]
        self._bytes = sum(file.stat().st_size for path in paths for file in files_below(path))
        if self._bytes > 1e6:
            limit = seconds_for(self._bytes)
            say(f"sending {self._bytes / 1e6:.1f} MB to {self.place}, for at most {limit:.0f} s")
        for attempt in range(FILE_TRIES):
            for event in list(self._files):
                if self._given_up.is_set():
                    return
                try:
                    self._store.send_files(event, 2**attempt)
                    self._files.remove(event)
                    self.error = None
                except Exception as error:  # of MLflow, HTTP, an object store
                    self.error = _reason(error)
            if not self._files:
                return
            self._given_up.wait(1.0)

    def _sample(self, record: Record) -> None:
        if self._machine is None:
            self._machine = Machine(self._log.last_steps())
        self._machine.sample(record)


def _has_files(event: Event) -> bool:
    return any(key in event for key in FILES)


def _paths(event: Event) -> List[Path]:
    """The files and folders that an event sends."""
    names = [event["artifact"]] if "artifact" in event else event.get("model", {}).get("files", [])
    return [Path(name) for name in names]


def _name(event: Event) -> str:
    """What an event is, for messages."""
    if "compare" in event:
        return "the comparison with the champion"
    what = "the model " if "model" in event else ""
    paths = _paths(event)
    return what + paths[0].name if paths else ", ".join(event.get("metrics", event))


def _reason(error: Exception) -> str:
    return textwrap.shorten(redact(str(error)) or type(error).__name__, 200, placeholder="...")
