"""How far a long matching is and how long it will take: one line on a terminal, drawn over; lines in a log."""

from __future__ import annotations

import sys
import time
from typing import Optional

EVERY_SECONDS = (15.0, 0.2)  # between two lines in a log, on a terminal


class Progress:
    """Count by `update(n)`; `close()` prints the last line. A closed pipe does not stop the work it reports on."""

    def __init__(self, total: Optional[int], title: str, unit: str) -> None:
        self.total, self.title, self.unit = total, title, unit
        self.n = self._skipped = 0
        self._terminal = sys.stderr.isatty()
        self._started = self._printed = time.monotonic()

    def update(self, n: int, skipped: bool = False) -> None:
        """n more are done; skipped: they were before, and say nothing of the pace."""
        self.n += n
        self._skipped += n if skipped else 0
        if time.monotonic() - self._printed >= EVERY_SECONDS[self._terminal]:
            self._print()

    def close(self) -> None:
        """The last line; none when there was nothing to count."""
        if self.n:
            self._print(last=True)

    def _print(self, last: bool = False) -> None:
        self._printed = time.monotonic()
        seconds = max(self._printed - self._started, 1e-9)
        rate = (self.n - self._skipped) / seconds
        parts = [f"{self.n}/{self.total}" if self.total else f"{self.n}", f"{rate:.3g} {self.unit}/s"]
        if last:
            parts.append(f"took {clock(seconds)}")
        elif self.total and rate:
            parts.append(f"ETA {clock((self.total - self.n) / rate)}")
        start, end = ("\r\033[K", "\n" if last else "") if self._terminal else ("", "\n")
        try:
            print(f"{start}{self.title}: {', '.join(parts)}", end=end, file=sys.stderr, flush=True)
        except (OSError, ValueError):
            pass


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"
