"""Help and lines of tables, which the commands of the benchmarks share."""

from __future__ import annotations

import argparse
from typing import Optional, Sequence


def make_parser(name: str, text: Optional[str]) -> argparse.ArgumentParser:
    """A parser for `python -m benchmarks.NAME`, whose help is the docstring `text`."""
    title, _, more = str(text).partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    program = f"python -m benchmarks.{name}"
    return argparse.ArgumentParser(program, description=title, epilog=more, formatter_class=raw)


def print_row(cells: Sequence[str]) -> None:
    """Print a line of a Markdown table at once."""
    print(f"| {' | '.join(cells)} |", flush=True)


def print_head(cells: Sequence[str]) -> None:
    """Print the head of a Markdown table."""
    print_row(cells)
    print("|---" * len(cells) + "|", flush=True)
