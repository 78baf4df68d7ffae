"""A progress bar on a terminal; plain lines with an ETA everywhere else (log files, CI, `docker logs`)."""

from __future__ import annotations

import sys
import time
from typing import Any, Iterable, Optional

from tqdm import tqdm

LINE_EVERY_SECONDS = 15.0


def progress(iterable: Optional[Iterable] = None, **options: Any) -> Any:
    """tqdm with its own options: iterate over it, or call `.update(n)` and `.close()`.

    `disable=True` (every rank but the first) shows nothing. `initial` is where a resumed job starts, and
    counts neither for the rate nor for the ETA.
    """
    if options.get("disable") or sys.stderr.isatty():
        return tqdm(iterable, dynamic_ncols=True, smoothing=0.1, **options)
    return Lines(iterable, **options)


class Lines(tqdm):
    """tqdm for a log: instead of a bar that is drawn over, a line every 15 s and one at the end."""

    monitor_interval = 0  # no thread: a line comes when something has been done

    def __init__(self, *args: Any, every: float = LINE_EVERY_SECONDS, **options: Any) -> None:
        # a delay: no line before the first is due
        super().__init__(*args, mininterval=every, miniters=1, delay=1e-9, **options)

    def set_postfix(self, *args: Any, **figures: Any) -> None:
        """Figures for the next line."""
        super().set_postfix(*args, **{**figures, "refresh": False})

    def display(self, msg: Any = None, pos: Any = None) -> None:
        """Print a line of its own. A closed pipe does not stop the work it reports on."""
        seconds = max(time.time() - self.start_t, 1e-9)
        rate = (self.n - self.initial) / seconds
        parts = [f"{self.n}/{self.total} {self.unit}, {self.n / self.total:.0%}"] if self.total else []
        parts = parts or [f"{self.n} {self.unit}"]
        parts.append(f"{rate:.3g} {self.unit}/s")
        if self.disable:
            parts.append(f"took {self.format_interval(seconds)}")
        elif self.total and rate > 0:
            parts.append(f"ETA {self.format_interval((self.total - self.n) / rate)}")
        line = ", ".join([*parts, *filter(None, [self.postfix])])
        try:
            print(f"{self.desc}: {line}" if self.desc else line, file=self.fp, flush=True)
        except (OSError, ValueError):
            pass

    def close(self) -> None:
        """Print the last line, once; nothing when there was nothing to count."""
        if getattr(self, "disable", True):
            return
        self.disable = True
        if self.n > self.initial:
            self.display()
