"""Show progress and remaining time by tqdm, as a bar on a terminal or as lines in a log.

    for image in Progress(images, desc="features", unit="images"): ...

    with Progress(total=count, initial=done, desc="matching", unit="pairs") as bar:
        bar.show_text("loss 0.25")       # after the pace
        bar.print_line("a line of its own")
        bar.update(1)

All other methods and options are tqdm's. With `disable=True` nothing is shown, as on all ranks but
the first.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterable, Iterator, Optional

from tqdm import tqdm

UPDATE_SECONDS = (15.0, 0.2)  # time between updates in a log, and on a terminal


class Progress(tqdm):
    """A tqdm that prints a line for each update in a log, and nothing if there are no items.

    Attributes:
        terminal: whether stderr is a terminal.
    """

    monitor_interval = 0  # No thread, since processes are forked while a bar is shown

    def __init__(self, iterable: Optional[Iterable] = None, **options: Any) -> None:
        """Show the progress of an iterable, or without one of calls of `update`.

        Args:
            iterable: the items.
            options: arguments of tqdm.
        """
        self.terminal = sys.stderr.isatty()
        self.initial = options.get("initial", 0)
        # In a log there is no bar.
        width = {"dynamic_ncols": True} if self.terminal else {"ncols": 0}
        # `miniters` lets a log also have lines for items that take longer than the interval.
        pace = {"mininterval": UPDATE_SECONDS[self.terminal], "miniters": 1, "smoothing": 0}
        super().__init__(iterable, file=_Stderr(), **pace, **width, **options)

    def __iter__(self) -> Iterator[Any]:
        """Yield the items.

        An item counts before it is yielded. tqdm counts it after, and would not count the last item
        if the consumer asks for no more, as `zip` does.
        """
        with self:
            for item in self.iterable:
                self.update(1)
                yield item

    def show_text(self, text: str) -> None:
        """Show text, such as metrics, after the pace, from the next update on."""
        self.set_postfix_str(text, refresh=False)

    def print_line(self, line: str) -> None:
        """Print a line above the progress."""
        self.write(line, file=self.fp if self.terminal else _Stderr())

    def display(self, msg: Optional[str] = None, pos: Optional[int] = None) -> None:
        """Print the progress. tqdm calls it."""
        if self.terminal:
            super().display(msg, pos)
        elif msg is None and self.n > self.initial:
            # tqdm itself ends the last line.
            self.fp.write(str(self) + ("" if self.disable else "\n"))

    def close(self) -> None:
        """Print the last line, unless nothing was done."""
        self.leave = self.n > self.initial
        super().close()


class _Stderr:
    """The standard error. If it is a closed pipe, the work continues without it."""

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
