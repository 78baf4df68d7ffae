"""Progress and remaining time: one line on a terminal, overwritten; several lines in a log."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any, Iterable, Iterator, Optional

EVERY_SECONDS = (15.0, 0.2)  # between updates in a log, on a terminal


class Progress:
    """Iterate over it, or call `update(n)` and `close()`. A closed pipe does not stop the work.

    total: number of items, if known. initial: number of items that were done before, not counted
    for the pace.
    disable: show nothing (every rank but the first). terminal: whether stderr is one, so that lines
    can be overwritten.
    """

    def __init__(
        self,
        iterable: Iterable = (),
        *,
        desc: str,
        unit: str,
        total: Optional[int] = None,
        initial: int = 0,
        disable: bool = False,
    ) -> None:
        self.total = total
        self.n = initial
        self.initial = initial
        self._iterable = iterable
        self._desc = desc
        self._unit = unit
        self._disable = disable
        self.terminal = sys.stderr.isatty()
        self._text = ""
        self._started = self._printed = time.monotonic()

    def __iter__(self) -> Iterator[Any]:
        with self:
            for item in self._iterable:
                self.update(1)
                yield item

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close()

    def update(self, n: int) -> None:
        """Count n more items as done."""
        self.n += n
        if time.monotonic() - self._printed >= EVERY_SECONDS[self.terminal]:
            self._print()

    def show(self, text: str) -> None:
        """Show text, such as metrics, between the remaining time and the pace."""
        self._text = f", {text}" if text else ""

    def say(self, line: str) -> None:
        """Print a line above the progress."""
        self._write(f"\r\033[K{line}\n" if self.terminal else f"{line}\n")

    def close(self) -> None:
        """Print the last line, unless nothing was done."""
        if self.n > self.initial:
            self._print(last=True)

    def _print(self, last: bool = False) -> None:
        if self._disable:
            return
        self._printed = time.monotonic()
        seconds = max(self._printed - self._started, 1e-9)
        rate = (self.n - self.initial) / seconds
        unit = self._unit
        line = (
            f"{self.n}/{self.total} {unit}, {self.n / self.total:.0%}"
            if self.total
            else f"{self.n} {unit}"
        )
        line = f"{self._desc}: {line}"
        if last:
            line += f", took {clock(seconds)}"
        elif self.total and rate:
            line += f", ETA {clock((self.total - self.n) / rate)}"
        # The pace last: narrow terminals truncate the line
        line += f"{self._text}, {rate:.3g} {unit}/s"
        if self.terminal:
            line = "\r\033[K" + line[: shutil.get_terminal_size().columns - 1]
        self._write(line + ("\n" if last or not self.terminal else ""))

    def _write(self, text: str) -> None:
        try:
            print(text, end="", file=sys.stderr, flush=True)
        except (OSError, ValueError):
            pass


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"
