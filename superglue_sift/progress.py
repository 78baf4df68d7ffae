"""Show progress and remaining time by tqdm, as a bar on a terminal or as lines in a log.

    for image in Progress(images, desc="features", unit="images"): ...

    with Progress(total=count, initial=done, desc="matching", unit="pairs") as bar:
        bar.show("loss 0.25")       # shown after the pace
        bar.say("a line of its own")
        bar.update(1)

All other methods and options are tqdm's: `disable=True` shows nothing (every rank but the first).
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterable, Iterator, Optional

from tqdm import tqdm

EVERY_SECONDS = (15.0, 0.2)  # time between updates in a log, and on a terminal


class Progress(tqdm):
    """tqdm that prints a line for each update in a log, and nothing if there are no items.

    Attributes:
        terminal: whether stderr is a terminal.
    """

    monitor_interval = 0  # without a thread, since processes are forked while a bar is shown

    def __init__(self, iterable: Optional[Iterable] = None, **options: Any) -> None:
        """Show the progress of an iterable, or of updates by hand. Options are those of tqdm."""
        self.terminal = sys.stderr.isatty()
        self.initial = options.get("initial", 0)
        width = {"dynamic_ncols": True} if self.terminal else {"ncols": 0}  # 0 means no bar
        # A log has a line every 15 seconds, also for items that take longer than that.
        every = EVERY_SECONDS[self.terminal]
        pace = {"mininterval": every, "miniters": 1, "smoothing": 0}
        super().__init__(iterable, file=_Stderr(), **pace, **width, **options)

    def __iter__(self) -> Iterator[Any]:
        """Yield the items.

        An item counts when it is handed over. A consumer may stop at the last one, as `zip` does,
        and tqdm would then end at 92 % of 12.
        """
        with self:
            for item in self.iterable:
                self.update(1)
                yield item

    def show(self, text: str) -> None:
        """Show text, such as metrics, after the pace, from the next update on."""
        self.set_postfix_str(text, refresh=False)

    def say(self, line: str) -> None:
        """Print a line above the progress."""
        self.write(line, file=self.fp if self.terminal else _Stderr())

    def display(self, msg: Optional[str] = None, pos: Optional[int] = None) -> None:
        """Print the progress. tqdm calls it."""
        if self.terminal:
            super().display(msg, pos)
        elif msg is None and self.n > self.initial:
            self.fp.write(str(self) + ("" if self.disable else "\n"))  # tqdm ends the last line

    def close(self) -> None:
        """Print the last line, unless nothing was done."""
        self.leave = self.n > self.initial
        super().close()


class _Stderr:
    """The standard error. If it is gone, such as a closed pipe, the work goes on without it."""

    def write(self, text: str) -> None:
        """Write text at once."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def flush(self) -> None:
        """Do nothing, since `write` flushes."""

    def __getattr__(self, name: str) -> Any:
        # tqdm reads the encoding, and asks for the width of the terminal by `fileno`.
        return getattr(sys.stderr, name)
