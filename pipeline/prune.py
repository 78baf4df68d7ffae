"""List the trainings that were set aside, with their size, and ask which to delete.

    python -m pipeline.prune [--out checkpoints]

A training whose checkpoints do not fit a new one is moved to checkpoints/superseded and stays there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import List, Optional, Sequence

from pipeline import errors
from pipeline.errors import RequestError
from pipeline.train import superseded
from pipeline.train.resume import TrainPaths


def main(argv: Optional[Sequence[str]] = None) -> int:
    """List, ask, delete; 0."""
    parser = argparse.ArgumentParser(prog=superseded.PRUNE, description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=TrainPaths.out, help="folder of the checkpoints")
    out = parser.parse_args(argv).out
    held = superseded.places(out)
    if not held:
        print(f"{out / superseded.SUPERSEDED}: nothing was set aside")
        return 0
    print(f"{out / superseded.SUPERSEDED}: {sum(place.size for place in held) / 1e6:.1f} MB")
    for number, place in enumerate(held, 1):
        print(f"{number:4}  {place}")
    for number in chosen(_ask("Delete which? Numbers such as 1 3, all, or Enter for none: "), len(held)):
        place = held[number - 1]
        superseded.delete(place)
        print(f"deleted {place.path}")
    return 0


def chosen(answer: str, count: int) -> List[int]:
    """The numbers from 1 to `count` in an answer. Raises RequestError for other words."""
    words = answer.replace(",", " ").split()
    if words == ["all"]:
        return list(range(1, count + 1))
    for word in words:
        if not word.isdigit() or not 1 <= int(word) <= count:
            raise RequestError(f"{word!r}: give numbers from 1 to {count}, or all; nothing was deleted")
    return sorted({int(word) for word in words})


def _ask(question: str) -> str:
    """The answer; "" at the end of the input."""
    try:
        return input(question)
    except EOFError:
        print()
        return ""


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
