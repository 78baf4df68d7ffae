"""Local files of a run: its log, a cursor, and the file that names it.

The log is the source of truth: JSON lines, appended first and sent later. One line is one event: the header (`run`),
`metrics`, `artifact`, `dataset`, `model`, `tags` or `end`. The cursor is the number of bytes that have reached the
tracking server.

reports/run.json, in neither git nor DVC, maps identities of trainings to MLflow runs. Checkpoints and models have the
identity, so metrics find their run also after `dvc checkout` of an older model.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, Optional, Tuple

from pipeline.files import write_atomic

RUN_FILE = "run.json"
_NEEDED = ("key", "run_id", "experiment")  # keys of a run in that file

Event = Dict[str, Any]


def now_ms() -> int:
    """Milliseconds since 1970, MLflow's unit of time."""
    return int(time.time() * 1000)


class EventLog:
    """Append-only file of events. Any thread may append; a torn last line of a killed writer is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._cursor_path = self.path.with_name(self.path.stem + ".cursor.json")
        self._lock = threading.Lock()
        self._stream: Optional[BinaryIO] = None

    def append(self, event: Event) -> None:
        """Append one event. Raises OSError if it cannot be written."""
        line = json.dumps(event, separators=(",", ":"), default=str) + "\n"
        with self._lock:
            if self._stream is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._stream = open(self.path, "a+b")  # noqa: SIM115 (kept open from event to event)
                self._stream.seek(0)
                self._stream.truncate(sum(len(line) for line in self._stream if line.endswith(b"\n")))
            self._stream.write(line.encode())
            self._stream.flush()

    def close(self) -> None:
        with self._lock:
            if self._stream is not None:
                self._stream.close()
                self._stream = None

    def read(self, offset: int, limit: Optional[int] = None) -> Iterator[Tuple[Event, int]]:
        """Up to `limit` events from byte `offset`, each with the offset of its end, without a partial last line.

        A line that is no JSON object (a damaged disk) becomes an empty event.
        """
        if not self.path.is_file():
            return
        with open(self.path, "rb") as stream:
            stream.seek(offset)
            for line in itertools.islice(stream, limit):
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                yield _parse(line), offset

    def size(self) -> int:
        """Bytes in the log; 0 if there is none."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def header(self) -> Event:
        """The first event; {} for an empty or foreign file."""
        first = next((event for event, _ in self.read(0, 1)), {})
        return first if "run" in first else {}

    def events(self) -> Iterator[Event]:
        """Every event of the log, in order, read line by line."""
        return (event for event, _ in self.read(0))

    def last(self) -> Event:
        """The last event; {} for an empty or missing log."""
        return next(iter(collections.deque(self.events(), maxlen=1)), {})

    def last_steps(self) -> Dict[str, int]:
        """The last step logged under each metric's name."""
        last: Dict[str, int] = {}
        for event in self.events():
            last.update({name: max(last.get(name, 0), event["step"]) for name in event.get("metrics", {})})
        return last

    def cursor(self) -> Event:
        """{"tracking_uri", "run_id", "offset", "uploads"} as last stored; {} if nothing has been sent."""
        return _read_json(self._cursor_path)

    def store_cursor(self, tracking_uri: str, run_id: Optional[str], offset: int, uploads: int) -> None:
        """Replace the cursor atomically."""
        cursor = {"tracking_uri": tracking_uri, "run_id": run_id, "offset": offset, "uploads": uploads}
        write_atomic(self._cursor_path, json.dumps(cursor, indent=2) + "\n")

    def move(self, target: Path) -> None:
        """Move log and cursor to `target`."""
        self.close()
        target.parent.mkdir(parents=True, exist_ok=True)
        if self._cursor_path.exists():
            os.replace(self._cursor_path, EventLog(target)._cursor_path)
        os.replace(self.path, target)

    def delete(self) -> None:
        """Remove log and cursor."""
        self.close()
        for path in (self.path, self._cursor_path):
            path.unlink(missing_ok=True)


def storable(value: Any) -> Any:
    """A metric as a JSON value: a finite float, or the text "nan", "inf" or "-inf"."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def remember_run(path: Path, training: str, run: Dict[str, Any]) -> None:
    """Store the newest run of a training: `key`, `run_id`, `experiment`, `tracking_uri`, `log` (relative path)."""
    runs = {**_runs(path).get("runs", {}), training: run}
    write_atomic(path, json.dumps({"latest": training, "runs": runs}, indent=2) + "\n")


def recall_run(path: Path, training: Optional[str] = None) -> Optional[Dict[str, Any]]:
    """The run of a training (None: the latest); None if the file does not name it."""
    content = _runs(path)
    run = content.get("runs", {}).get(content.get("latest") if training is None else training)
    return run if isinstance(run, dict) and all(key in run for key in _NEEDED) else None


def _runs(path: Path) -> Dict[str, Any]:
    content = _read_json(path)
    return content if isinstance(content.get("runs"), dict) else {}


def _read_json(path: Path) -> Event:
    return _parse(path.read_bytes()) if path.is_file() else {}


def _parse(text: bytes) -> Event:
    try:
        event = json.loads(text)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
