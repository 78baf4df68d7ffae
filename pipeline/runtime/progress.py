"""A progress bar on a terminal; plain lines with an ETA everywhere else (log files, CI, `docker logs`)."""

from __future__ import annotations

import sys
import time
from typing import Any, Dict, Iterable, Iterator, Optional, TextIO

LINE_EVERY_SECONDS = 15.0


def progress(
    iterable: Optional[Iterable] = None,
    total: Optional[int] = None,
    desc: str = "",
    unit: str = "it",
    disable: bool = False,
    initial: int = 0,
    file: Optional[TextIO] = None,
) -> Any:
    """A progress display with tqdm's own manner: iterate over it, or call `.update(n)` and `.close()`.

    `disable=True` (every rank but the first) shows nothing. `initial` is where a resumed job starts, and
    counts neither for the rate nor for the ETA. `.set_postfix(loss=0.1)` shows figures beside the bar.
    """
    stream = sys.stderr if file is None else file
    if disable or getattr(stream, "isatty", lambda: False)():
        from tqdm import tqdm

        return tqdm(
            iterable,
            total=total,
            desc=desc,
            unit=unit,
            disable=disable,
            initial=initial,
            file=stream,
            dynamic_ncols=True,
            smoothing=0.1,
        )
    return Lines(iterable, total, desc, unit, initial, stream)


class Lines:
    """What `progress` gives where there is no terminal: one line at the start, every 15 s and at the end."""

    def __init__(
        self,
        iterable: Optional[Iterable],
        total: Optional[int],
        desc: str,
        unit: str,
        initial: int,
        stream: TextIO,
        every: float = LINE_EVERY_SECONDS,
    ) -> None:
        self._iterable = iterable
        self.total = len(iterable) if total is None and hasattr(iterable, "__len__") else total
        self.desc = desc
        self.unit = unit
        self.n = initial
        self._initial = initial
        self._stream = stream
        self._every = every
        self._started = self._printed = time.monotonic()
        self._postfix: Dict[str, Any] = {}
        self._closed = False

    def __iter__(self) -> Iterator:
        if self._iterable is None:
            raise TypeError("progress() without an iterable counts by .update(n)")
        with self:
            for item in self._iterable:
                yield item
                self.update(1)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_exc: Any) -> None:
        self.close()

    def update(self, n: int = 1) -> None:
        """Count n more; prints a line when 15 s have passed since the last."""
        self.n += n
        now = time.monotonic()
        if now - self._printed >= self._every:
            self._printed = now
            self._print(self._line(now))

    def set_postfix(
        self, ordered: Optional[Dict[str, Any]] = None, refresh: bool = True, **more: Any
    ) -> None:
        """Figures for the next line. `refresh` is tqdm's and means nothing here."""
        self._postfix = dict(ordered or {}, **more)

    def set_description(self, desc: str, refresh: bool = True) -> None:
        self.desc = desc

    def write(self, text: str) -> None:
        """Print a line of its own, as tqdm.write does."""
        self._print(text)

    def close(self) -> None:
        """Print the last line, once; nothing when there was nothing to count."""
        if self._closed:
            return
        self._closed = True
        if self.n > self._initial:
            self._print(self._line(time.monotonic(), last=True))

    def _line(self, now: float, last: bool = False) -> str:
        seconds = max(now - self._started, 1e-9)
        rate = (self.n - self._initial) / seconds
        count = f"{self.n}/{self.total}" if self.total else f"{self.n}"
        parts = [f"{count} {self.unit}"]
        if self.total:
            parts.append(f"{100 * self.n / self.total:.0f} %")
        parts.append(f"{rate:.3g} {self.unit}/s")
        if last:
            parts.append(f"took {clock(seconds)}")
        elif self.total and rate > 0:
            parts.append(f"ETA {clock((self.total - self.n) / rate)}")
        parts.extend(f"{name} {_short(value)}" for name, value in self._postfix.items())
        return f"{self.desc + ': ' if self.desc else ''}{', '.join(parts)}"

    def _print(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):  # a closed pipe must not stop the work it reports on
            pass


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    whole = max(int(seconds + 0.5), 0)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
