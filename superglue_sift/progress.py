"""Progress and remaining time by tqdm: a bar on a terminal, plain lines in a log.

    for image in Progress(images, desc="features", unit="images"): ...

    with Progress(total=count, initial=done, desc="matching", unit="pairs") as bar:
        bar.show("loss 0.25")       # behind the pace
        bar.say("a line of its own")
        bar.update(1)

All other methods and options are tqdm's: `disable=True` shows nothing (every rank but the first).
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterable, Iterator, Optional

from tqdm import tqdm

EVERY_SECONDS = (15.0, 0.2)  # between updates in a log, on a terminal


class Progress(tqdm):
    """tqdm, with a line for each update in a log, and nothing for no items.

    terminal: whether stderr is one.
    """

    monitor_interval = 0  # no thread: processes are forked while a bar is shown

    def __init__(self, iterable: Optional[Iterable] = None, **options: Any) -> None:
        self.terminal = sys.stderr.isatty()
        self.initial = options.get("initial", 0)
        width = {"dynamic_ncols": True} if self.terminal else {"ncols": 0}  # 0: without a bar
        every = EVERY_SECONDS[self.terminal]
        pace = {"mininterval": every, "miniters": 1, "smoothing": 0}
        super().__init__(iterable, file=_Stderr(), **pace, **width, **options)

    def __iter__(self) -> Iterator[Any]:
        """The items. Each counts when it is handed over, because a consumer may stop at the last
        one, as `zip` does, and tqdm would end at 92 % of 12.
        """
        with self:
            for item in self.iterable:
                self.update(1)
                yield item

    def show(self, text: str) -> None:
        """Show text, such as metrics, behind the pace from the next update on."""
        self.set_postfix_str(text, refresh=False)

    def say(self, line: str) -> None:
        """Print a line above the progress."""
        self.write(line, file=self.fp if self.terminal else _Stderr())

    def display(self, msg: Optional[str] = None, pos: Optional[int] = None) -> None:
        """Print the progress; called by tqdm."""
        if self.terminal:
            super().display(msg, pos)
        elif msg is None and self.n > self.initial:
            self.fp.write(str(self) + ("" if self.disable else "\n"))  # tqdm ends the last line

    def close(self) -> None:
        """Print the last line, unless nothing was done."""
        self.leave = self.n > self.initial
        super().close()


class _Stderr:
    """The standard error. Where it is gone, such as a closed pipe, the work goes on without it."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def flush(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)  # encoding; fileno, by which tqdm asks for the width
