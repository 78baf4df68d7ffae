"""The log of a run, which is its record: a file of JSON lines, one event each.

An event is the header (`run`), `metrics`, `artifact`, `dataset`, `model`, `compare`, `tags`, `end`
(the state of the run), or `sent`: the number of bytes before which everything has reached the
server `place`. No line contains a secret. The header names the training, as checkpoints and models
do, so metrics find their run also after `dvc checkout` of an older model.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, Optional, Tuple

from pipeline.tracking.secrets import redact_all

Event = Dict[str, Any]


def now_ms() -> int:
    """Milliseconds since 1970, MLflow's unit of time."""
    return int(time.time() * 1000)


@dataclass
class EventLog:
    """An append-only file of events. Any thread may append."""

    path: Path
    _stream: Optional[BinaryIO] = None

    def append(self, event: Event) -> None:
        """Append one event. Raises OSError if it cannot be written."""
        line = json.dumps(redact_all(event), separators=(",", ":"), default=str).encode() + b"\n"
        if self._stream is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (kept open)
            with contextlib.suppress(OSError):  # so that `resend` leaves it to this process
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
        """Whether a process of this machine has it open for writing."""
        with open(self.path, "rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:  # a network file system without locks
                return False
        return False

    def read(self, offset: int = 0) -> Iterator[Tuple[Event, int]]:
        """The events from byte `offset`, each with the offset of its end. No partial last line."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as stream:
            stream.seek(offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                yield _parse(line), offset

    def header(self) -> Event:
        """The first event; {} for an empty or foreign file."""
        first = next((event for event, _ in self.read()), {})
        return first if "run" in first else {}

    def sent(self, place: str) -> int:
        """Bytes of which the server `place` has everything."""
        marks = (event["sent"] for event, _ in self.read() if event.get("place") == place)
        return max(marks, default=0)

    def last_steps(self) -> Dict[str, int]:
        """The last step logged under each metric's name."""
        last: Dict[str, int] = {}
        for event, _ in self.read():
            for name in event.get("metrics", ()):
                last[name] = max(last.get(name, 0), event["step"])
        return last


def find_log(folder: Path, key: str, value: str) -> Optional[EventLog]:
    """The log in a folder whose header has this value; of several the newest."""
    logs = sorted(folder.glob("log*.jsonl"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return next((log for log in map(EventLog, logs) if log.header().get(key) == value), None)


def take_log(folder: Path, run: Optional[str] = None) -> EventLog:
    """`log.jsonl` for a run, with its events so far. The log of another run stays beside it."""
    path = folder / "log.jsonl"
    known = find_log(folder, "run", run) if run else None
    if known is None or known.path != path:
        if path.exists():
            path.rename(folder / f"log-{path.stat().st_mtime_ns}.jsonl")
        if known is not None:
            known.path.rename(path)
    return EventLog(path)


def _parse(line: bytes) -> Event:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
