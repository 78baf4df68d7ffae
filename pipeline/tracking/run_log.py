"""The local log of a run: JSON lines, appended first and shipped later. It is the source of truth.

One line is one event: the header (`run`), `metrics`, `artifact`, `dataset`, `model`, `tags` or `end`.
Beside it stands a cursor, the number of bytes that have reached the tracking server.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from pipeline.files import write_atomic

CHUNK = 1 << 20

Event = Dict[str, Any]


def now_ms() -> int:
    """Milliseconds since 1970, MLflow's unit of time."""
    return int(time.time() * 1000)


class EventLog:
    """Append-only file of events. Any thread may append; a torn last line of a killed writer is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._stream = None

    def append(self, event: Event) -> None:
        """Append one event. Raises OSError when the disk refuses it."""
        line = json.dumps(event, separators=(",", ":"), default=str) + "\n"
        with self._lock:
            if self._stream is None:
                self._stream = self._open()
            self._stream.write(line.encode())
            self._stream.flush()

    def _open(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stream = open(self.path, "ab")  # noqa: SIM115 (kept open from event to event)
        tail, begins = _tail(self.path)
        if tail and not tail.endswith(b"\n"):
            stream.truncate(begins + tail.rfind(b"\n") + 1)
        return stream

    def close(self) -> None:
        with self._lock:
            if self._stream is not None:
                self._stream.close()
                self._stream = None

    def read(self, offset: int, limit: int) -> List[Tuple[Event, int]]:
        """Up to `limit` events from byte `offset`, each with the offset behind it. A half line is left alone.

        A line that is no JSON object (a damaged disk) comes back as an empty event.
        """
        try:
            block = _whole_lines(self.path, offset)
        except FileNotFoundError:
            return []
        found: List[Tuple[Event, int]] = []
        for line in block.split(b"\n")[:-1][:limit]:
            offset += len(line) + 1
            found.append((_parse(line), offset))
        return found

    def size(self) -> int:
        """Bytes in the log, 0 where there is none."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def header(self) -> Event:
        """The first event, {} for an empty or foreign file."""
        first = self.read(0, 1)
        return first[0][0] if first and "run" in first[0][0] else {}

    def events(self) -> Iterator[Event]:
        """Every event of the log, in order; a long log is never in memory as a whole."""
        offset = 0
        while True:
            batch = self.read(offset, 10_000)
            if not batch:
                return
            yield from (event for event, _ in batch)
            offset = batch[-1][1]

    def last(self) -> Event:
        """The last event, {} for an empty or missing log."""
        try:
            lines = _tail(self.path)[0].rpartition(b"\n")[0]
        except FileNotFoundError:
            return {}
        return _parse(lines.rpartition(b"\n")[2])

    def last_steps(self) -> Dict[str, int]:
        """The last step logged under each metric's name."""
        last: Dict[str, int] = {}
        for event in self.events():
            for name in event.get("metrics", {}):
                last[name] = max(last.get(name, event["step"]), event["step"])
        return last

    def cursor(self) -> Event:
        """{"tracking_uri", "run_id", "offset"} as last stored, {} where nothing has been shipped."""
        try:
            found = json.loads(self._cursor_path().read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def store_cursor(self, tracking_uri: str, run_id: Optional[str], offset: int) -> None:
        """Replace the cursor in one step, so that a kill leaves the old or the new one."""
        cursor = {"tracking_uri": tracking_uri, "run_id": run_id, "offset": offset}
        write_atomic(self._cursor_path(), json.dumps(cursor, indent=2) + "\n")

    def _cursor_path(self) -> Path:
        return self.path.with_name(self.path.stem + ".cursor.json")

    def move(self, target: Path) -> None:
        """Move log and cursor out of the way."""
        self.close()
        target.parent.mkdir(parents=True, exist_ok=True)
        moved = EventLog(target)
        if self._cursor_path().exists():
            os.replace(self._cursor_path(), moved._cursor_path())
        os.replace(self.path, target)

    def delete(self) -> None:
        """Remove log and cursor."""
        self.close()
        for path in (self.path, self._cursor_path()):
            try:
                path.unlink()
            except FileNotFoundError:
                pass


def storable(value: Any) -> Any:
    """A figure as JSON can hold it: finite floats as they are, "nan", "inf" and "-inf" as words.

    Takes whatever float() takes, a tensor of one element among them. Raises TypeError or ValueError else.
    """
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _whole_lines(path: Path, offset: int) -> bytes:
    """Bytes from `offset`, as many as it takes to hold a line's end, if there is one."""
    block = b""
    with open(path, "rb") as stream:
        stream.seek(offset)
        while b"\n" not in block:
            more = stream.read(CHUNK)
            if not more:
                break
            block += more
    return block


def _tail(path: Path) -> Tuple[bytes, int]:
    """The end of a file, with at least one whole line where there is one, and the offset at which it begins."""
    size = path.stat().st_size
    length = min(CHUNK, size)
    with open(path, "rb") as stream:
        while True:
            stream.seek(size - length)
            block = stream.read(length)
            if length == size or block.count(b"\n") > 1:
                return block, size - length
            length = min(2 * length, size)


def _parse(line: bytes) -> Event:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
