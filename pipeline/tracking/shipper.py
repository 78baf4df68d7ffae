"""A background thread that sends run logs to the tracking server and never delays the training.

A `LogQueue` sends one log in two lanes, so that metrics never wait for files: metrics, tags and the end of a run; and
files, one at a time while no metric waits. Each lane keeps its order and moves its cursor after the server has accepted
an event. After a lost reply the same lines are sent again; since the store identifies a metric by (run, name, time,
step, value), they are stored once.
"""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from pipeline.tracking.run_log import Event, EventLog

POLL_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 30.0
EVENTS_AT_ONCE = 500
UPLOADS = ("artifact", "model", "challenge")  # keys of events that send files or depend on sent files


class PermanentError(Exception):
    """The server will never accept this event, or its file cannot be read; the queue continues with the next."""


class LogQueue:
    """One log and the positions of its lanes. `opened` is called with the run's MLflow id once it is known.

    A `sink` has `open(header, run_id) -> (run_id, fresh)`, `last_steps(run_id) -> {name: step}` and
    `send(run_id, events)`. After any error except PermanentError the queue tries again.
    """

    def __init__(
        self,
        log: EventLog,
        tracking_uri: str,
        leftover: bool = False,
        opened: Optional[Callable[[Optional[str]], None]] = None,
    ) -> None:
        self.log, self.tracking_uri, self.leftover = log, tracking_uri, leftover
        cursor = log.cursor()
        if cursor.get("tracking_uri") != tracking_uri:
            cursor = {}
        self.run_id: Optional[str] = cursor.get("run_id")
        self.offset = int(cursor.get("offset") or 0)
        self.uploads = int(cursor.get("uploads", self.offset) or 0)
        self._opened = opened
        self._open = self._warned = False
        self._known: Dict[str, int] = {}

    def pending(self) -> bool:
        return self.log.size() > min(self.offset, self.uploads)

    def metrics_pending(self) -> bool:
        return not self._open or self.log.size() > self.offset

    def unsent(self) -> List[Event]:
        """The events that have not been sent."""
        waiting = self.log.read(min(self.offset, self.uploads))
        return [event for event, end in waiting if end > (self.uploads if _is_upload(event) else self.offset)]

    def advance(self, sink: Any) -> None:
        """Send the next batch of metrics and move its cursor."""
        if not self._open:
            self._connect(sink)
        batch = list(self.log.read(self.offset, EVENTS_AT_ONCE))
        if batch:
            self._send(sink, [self._new(event) for event, _ in batch if not _is_upload(event)])
            self._move_to(batch[-1][1], self.uploads)

    def upload(self, sink: Any) -> None:
        """Send the next event with a file, if it is before the cursor of the metrics; move the cursor of uploads."""
        for event, end in self.log.read(self.uploads):
            if end > self.offset:
                return
            if _is_upload(event):
                self._send(sink, [event])
                self._move_to(self.offset, end)
                return
        self._move_to(self.offset, self.offset)

    def _connect(self, sink: Any) -> None:
        header = self.log.header()
        self.run_id, fresh = sink.open(header, self.run_id or header.get("run_id"))
        if not fresh and header.get("continues"):
            self._known = sink.last_steps(self.run_id)
        self._move_to(*(0, 0) if fresh else (self.offset, self.uploads))  # a new store gets all events
        self._open = True
        if self._opened is not None:
            self._opened(self.run_id)

    def _move_to(self, offset: int, uploads: int) -> None:
        self.offset, self.uploads = offset, uploads
        self.log.store_cursor(self.tracking_uri, self.run_id, offset, uploads)

    def _new(self, event: Event) -> Event:
        """The event without points that the server already has from another log (a run resumed elsewhere)."""
        if not self._known or "metrics" not in event:
            return event
        kept = {k: v for k, v in event["metrics"].items() if event["step"] > self._known.get(k, -1)}
        return dict(event, metrics=kept)

    def _send(self, sink: Any, events: List[Event]) -> None:
        if not events:
            return
        try:
            sink.send(self.run_id, events)
        except PermanentError as error:
            if len(events) > 1:
                for event in events:
                    self._send(sink, [event])
            elif not self._warned:
                self._warned = True
                say(f"an entry is left out, the log keeps it: {error}")


def _is_upload(event: Event) -> bool:
    return any(key in event for key in UPLOADS)


class Uploader(threading.Thread):
    """Sends the queues one after another until stopped. place: the server's name in messages.

    Attributes:
        error: why the last try failed; None after success.
        missing: whether a package is not installed; then nothing is tried again.
    """

    def __init__(self, queues: List[LogQueue], make_sink: Callable[[], object], place: str) -> None:
        super().__init__(name="tracking", daemon=True)
        self.queues = queues
        self.error: Optional[str] = None
        self.missing = False
        self._make_sink, self._place = make_sink, place
        self._sink = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._given_up = threading.Event()

    def run(self) -> None:
        pause = POLL_SECONDS
        while True:
            ok = self._round()
            if self.missing or self._given_up.is_set() or (self._stopping.is_set() and ok):
                return
            pause = POLL_SECONDS if ok else min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._wake.wait(0.5 if self._stopping.is_set() else pause)
            self._wake.clear()

    def stop(self, seconds: float, more: Callable[[], float] = lambda: 0.0) -> bool:
        """Send the rest within `seconds`, and `more()` seconds while the server answers. True: all has arrived."""
        self._stopping.set()
        self._wake.set()
        self.join(seconds)
        until = time.monotonic() + more() if self.is_alive() and self.error is None else 0.0
        while self.is_alive() and self.error is None and time.monotonic() < until:
            self.join(0.5)
        self._given_up.set()
        return not self.is_alive() and not any(queue.pending() for queue in self.queues)

    def _round(self) -> bool:
        try:
            if self._sink is None:
                self._sink = self._make_sink()
            for queue in list(self.queues):
                self._send_metrics(queue)
            for queue in list(self.queues):
                self._drain(queue)
        except ImportError as error:  # permanent for this process
            self.missing = True
            say(f"nothing goes to {self._place} ({error}); training continues, the log keeps all for the next run")
            return False
        except Exception as error:  # of any kind: training continues
            reason = textwrap.shorten(str(error) or type(error).__name__, 200, placeholder="...")
            if self.error is None:
                say(f"{self._place} does not answer ({reason}); training continues, the log keeps all")
            self.error = reason
            return False
        if self.error is not None:
            say(f"{self._place} answers again; all points so far have arrived")
            self.error = None
        return True

    def _send_metrics(self, queue: LogQueue) -> None:
        while queue.pending() and queue.metrics_pending() and not self._given_up.is_set():
            queue.advance(self._sink)

    def _drain(self, queue: LogQueue) -> None:
        while queue.pending() and not self._given_up.is_set():
            queue.upload(self._sink)
            for other in self.queues:  # the training has logged more
                self._send_metrics(other)
        if queue.leftover and not queue.pending():
            queue.log.delete()
            self.queues.remove(queue)


def say(text: str) -> None:
    """Print one line to stderr."""
    print(f"tracking: {text}", file=sys.stderr, flush=True)


def wait_limit(tracking_uri: str) -> float:
    """Seconds that closing a run may wait; creating a local store is slow."""
    return 20.0 if tracking_uri.startswith(("http://", "https://")) else 60.0
