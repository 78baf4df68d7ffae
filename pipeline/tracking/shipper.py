"""A background thread that carries run logs to the tracking server, and never lets training feel it.

A feed is one log on its way. It ships in order and moves its cursor after the server said yes. When a reply
is lost the same lines are sent again: the store keeps a metric by (run, name, time, step, value), so that a
line sent twice arrives once.
"""

from __future__ import annotations

import sys
import threading
from typing import Callable, Dict, List, Optional

from pipeline.tracking.run_log import Event, EventLog

POLL_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 30.0
EVENTS_AT_ONCE = 500


class Refused(Exception):
    """The server will never take this event; shipping goes on with the next."""


class Feed:
    """One log and how far it has got.

    `sink` has `open(header, run_id) -> (run_id, fresh)`, `last_steps(run_id) -> {name: step}` and
    `ship(run_id, events)`; each raises Refused for good, anything else for now.
    """

    def __init__(self, log: EventLog, tracking_uri: str, leftover: bool = False) -> None:
        self.log = log
        self.tracking_uri = tracking_uri
        self.leftover = leftover
        self.refused = 0
        cursor = log.cursor()
        mine = cursor.get("tracking_uri") == tracking_uri
        self.run_id: Optional[str] = cursor.get("run_id") if mine else None
        self.offset = int(cursor.get("offset") or 0) if mine else 0
        self._open = False
        self._known: Dict[str, int] = {}

    def pending(self) -> bool:
        return self.log.size() > self.offset

    def unshipped(self) -> int:
        """Number of events that have not arrived."""
        return sum(1 for _ in self.log.read(self.offset))

    def advance(self, sink) -> None:
        """Ship the next batch and move the cursor."""
        if not self._open:
            self._connect(sink)
        batch = list(self.log.read(self.offset, EVENTS_AT_ONCE))
        if not batch:
            return
        self._ship(sink, [self._new(event) for event, _ in batch])
        self.offset = batch[-1][1]
        self.log.store_cursor(self.tracking_uri, self.run_id, self.offset)

    def _connect(self, sink) -> None:
        header = self.log.header()
        self.run_id, fresh = sink.open(header, self.run_id or header.get("run_id"))
        if fresh:
            self.offset = 0  # a store that does not know the run gets all of it
        elif header.get("continues"):
            self._known = sink.last_steps(self.run_id)
        self.log.store_cursor(self.tracking_uri, self.run_id, self.offset)
        self._open = True

    def _new(self, event: Event) -> Event:
        """The event without the points the server had before this log began (a run resumed elsewhere)."""
        if not self._known or "metrics" not in event:
            return event
        kept = {k: v for k, v in event["metrics"].items() if event["step"] > self._known.get(k, -1)}
        return dict(event, metrics=kept)

    def _ship(self, sink, events: List[Event]) -> None:
        try:
            sink.ship(self.run_id, events)
        except Refused as error:
            if len(events) > 1:
                for event in events:
                    self._ship(sink, [event])
                return
            self.refused += 1
            if self.refused == 1:
                say(f"the server refused an entry, the log keeps it: {error}")


class Shipper(threading.Thread):
    """Carries the feeds, one after another, until asked to stop."""

    def __init__(
        self,
        feeds: List[Feed],
        make_sink: Callable[[], object],
        place: str,
        on_open: Optional[Callable[[Feed], None]] = None,
    ) -> None:
        super().__init__(name="tracking", daemon=True)
        self.feeds = feeds
        self.error: Optional[str] = None
        self._make_sink = make_sink
        self._place = place
        self._on_open = on_open
        self._sink = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._given_up = threading.Event()
        self._announced: Dict[Feed, str] = {}

    def run(self) -> None:
        pause = POLL_SECONDS
        while True:
            ok = self._round()
            if self._given_up.is_set() or (self._stopping.is_set() and ok):
                return
            pause = POLL_SECONDS if ok else min(2 * pause, LONGEST_PAUSE_SECONDS)
            longest = pause if not self._stopping.is_set() else 0.5
            self._wake.wait(longest)
            self._wake.clear()

    def stop(self, seconds: float) -> bool:
        """Ask for the rest, wait at most `seconds`; True when everything has arrived."""
        self._stopping.set()
        self._wake.set()
        self.join(seconds)
        self._given_up.set()
        return not self.is_alive() and not any(feed.pending() for feed in self.feeds)

    def _round(self) -> bool:
        try:
            if self._sink is None:
                self._sink = self._make_sink()
            for feed in list(self.feeds):
                self._drain(feed)
        except Exception as error:  # whatever the client or the server does, training goes on
            if self.error is None:
                say(f"{self._place} does not answer ({brief(error)}); training goes on, the log keeps all")
            self.error = brief(error)
            return False
        if self.error is not None:
            say(f"{self._place} answers again; all points so far have arrived")
            self.error = None
        return True

    def _drain(self, feed: Feed) -> None:
        while feed.pending() and not self._given_up.is_set():
            feed.advance(self._sink)
            if self._on_open is not None and self._announced.get(feed) != feed.run_id:
                self._announced[feed] = feed.run_id or ""
                self._on_open(feed)
        if feed.leftover and not feed.pending():
            feed.log.delete()
            self.feeds.remove(feed)


def brief(error: BaseException) -> str:
    """An exception as one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def say(text: str) -> None:
    """One line on stderr."""
    print(f"tracking: {text}", file=sys.stderr, flush=True)


def wait_limit(tracking_uri: str) -> float:
    """Seconds that closing a run may wait: making a local store is slow, a dead server is not worth it."""
    return 20.0 if tracking_uri.startswith(("http://", "https://")) else 60.0
