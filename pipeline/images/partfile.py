"""A file while it arrives: which bytes are here, kept across kills.

`NAME.part` has its final length from the start. `NAME.part.json` remembers, for each block, how many bytes
at its beginning are good, so that several connections can fill several blocks. After a kill at most the
last second is fetched again; a lie of the journal (power cut) is found by the checksum.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from pipeline.errors import WorkError
from pipeline.files import write_atomic
from pipeline.images.transfer import Interrupted

BLOCK = 32 << 20
_SAVE_EVERY = 1.0  # seconds


class PartFile:
    """The growing file of a target. `size`: of the whole, None until known (then it only grows at its
    end)."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(target.name + ".part")
        self._journal = target.with_name(target.name + ".part.json")
        self._lock = threading.Lock()
        self._saved = time.monotonic()
        note = read_json(self._journal)
        self.size: Optional[int] = note.get("size")
        self._block: int = note.get("block", BLOCK)
        self._have: List[int] = note.get("have", [])
        if not note or not self.path.exists():
            self.size, self._block, self._have = None, BLOCK, []
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if not self._have:
            os.ftruncate(self._file, 0)

    def set_size(self, size: int) -> None:
        """Say how long the whole is. Less than is here already: another file, so nothing of it is kept."""
        if self.size == size:
            return
        if size < self.here():
            os.ftruncate(self._file, 0)
            self.size, self._have = None, []
            raise Interrupted(f"the file has {size} bytes now, more are here; begun anew")
        free = os.statvfs(self.path.parent)
        if size - self.here() > free.f_bavail * free.f_frsize:
            raise WorkError(
                f"{self.path.name}: needs {size / 1e9:.1f} GB, {free.f_bavail * free.f_frsize / 1e9:.1f} GB are "
                f"free in {self.path.parent}; make room or choose a smaller preset"
            )
        self.size = size
        self._fit()

    def here(self) -> int:
        """Good bytes so far."""
        return sum(self._have)

    def complete(self) -> bool:
        return self.size is not None and self.here() == self.size

    def prefix(self) -> int:
        """Good bytes before the first gap."""
        total = 0
        for position, have in enumerate(self._have):
            total += have
            if have < self._length(position):
                break
        return total

    def gaps(self) -> List[Tuple[int, int]]:
        """(first missing byte, end) of each block that is not full; needs the size."""
        return [
            (position * self._block + have, position * self._block + self._length(position))
            for position, have in enumerate(self._have)
            if have < self._length(position)
        ]

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes that follow the good ones of their block (bytes that are here already are dropped)."""
        while data:
            position, inside = divmod(offset, self._block)
            piece = data[: self._block - inside]
            with self._lock:
                self._have += [0] * (position + 1 - len(self._have))
                fresh = inside + len(piece) - self._have[position]
                if inside > self._have[position]:
                    raise ValueError(f"byte {offset} would leave a hole")
            if fresh > 0:
                os.pwrite(self._file, piece[-fresh:], offset + len(piece) - fresh)
                with self._lock:
                    self._have[position] = inside + len(piece)
            offset, data = offset + len(piece), data[len(piece) :]
        if time.monotonic() - self._saved > _SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write the journal."""
        with self._lock:
            self._saved = time.monotonic()
            write_atomic(
                self._journal, json.dumps({"size": self.size, "block": self._block, "have": self._have})
            )

    def close(self) -> None:
        self.save()
        os.close(self._file)

    def finish(self, final: Path) -> None:
        """Give the file a name and drop the journal."""
        os.replace(self.path, final)
        self._journal.unlink(missing_ok=True)

    def _length(self, position: int) -> int:
        left = self._block if self.size is None else self.size - position * self._block
        return max(min(self._block, left), 0)

    def _fit(self) -> None:
        """One entry per block of the known size, none longer than its block."""
        count = -(-(self.size or 0) // self._block)
        self._have = [*self._have, *[0] * (count - len(self._have))][:count]
        self._have = [min(have, self._length(position)) for position, have in enumerate(self._have)]


def read_json(path: Path) -> Dict[str, Any]:
    """A small JSON object; {} when it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
