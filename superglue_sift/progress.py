"""How far the work is and how long it will take: one line on a terminal, drawn over; lines in a log."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any, Iterable, Iterator, Optional

EVERY_SECONDS = (15.0, 0.2)  # between two lines in a log, on a terminal


class Progress:
    """Iterate over it, which counts what comes, or `update(n)` and `close()`. A closed pipe does not stop the work.

    total: how many there will be, where that is known. initial: how many were done before; they say nothing of the
    pace. disable: show nothing (every rank but the first). terminal: is there one, so that a line can be drawn over?
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
        self.total, self.n, self.initial = total, initial, initial
        self._iterable, self._desc, self._unit, self._disable = iterable, desc, unit, disable
        self.terminal = sys.stderr.isatty()
        self._figures = ""
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
        """n more are done."""
        self.n += n
        if time.monotonic() - self._printed >= EVERY_SECONDS[self.terminal]:
            self._print()

    def show(self, figures: str) -> None:
        """Figures for the next lines, between the time that is left and the pace."""
        self._figures = f", {figures}" if figures else ""

    def say(self, line: str) -> None:
        """A line of its own, which stays; on a terminal the line of the progress is drawn below it again."""
        self._write(f"\r\033[K{line}\n" if self.terminal else f"{line}\n")

    def close(self) -> None:
        """The last line; none when nothing was done."""
        if self.n > self.initial:
            self._print(last=True)

    def _print(self, last: bool = False) -> None:
        if self._disable:
            return
        self._printed = time.monotonic()
        seconds = max(self._printed - self._started, 1e-9)
        rate, unit = (self.n - self.initial) / seconds, self._unit
        line = f"{self.n}/{self.total} {unit}, {self.n / self.total:.0%}" if self.total else f"{self.n} {unit}"
        line = f"{self._desc}: {line}"
        if last:
            line += f", took {clock(seconds)}"
        elif self.total and rate:
            line += f", ETA {clock((self.total - self.n) / rate)}"
        line += f"{self._figures}, {rate:.3g} {unit}/s"  # the pace last: a narrow terminal cuts the end off
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
