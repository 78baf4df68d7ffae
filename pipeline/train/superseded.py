"""Trainings that were set aside: listing them, their size, deleting them.

checkpoints/superseded/<date>-<reason>/    step-*, best.* and the curves

Only `python -m pipeline.prune`, which asks, and a limit by `--superseded-gb` delete them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

from pipeline.train.identity import steps_done
from superglue_sift.weights import BadCheckpoint, load_model_file

SUPERSEDED = "superseded"
PRUNE = "python -m pipeline.prune"


class Place(NamedTuple):
    """A training that was set aside. size: bytes; steps: of its newest checkpoint or finished best model."""

    path: Path
    size: int
    steps: int

    def __str__(self) -> str:
        return f"{self.path.name}: {self.steps} steps, {_mb(self.size)}"


def places(out: Path) -> List[Place]:
    """The trainings set aside in `out`, newest first."""
    return [_described(path) for path in sorted((out / SUPERSEDED).glob("*/"), reverse=True)]


def summary(out: Path) -> str:
    """One line with their number, their size and how to delete them; "" if there are none."""
    held = places(out)
    if not held:
        return ""
    number = "1 training" if len(held) == 1 else f"{len(held)} trainings"
    where = "" if out == Path("checkpoints") else f" --out {out}"
    total = _mb(sum(place.size for place in held))
    return f"{out / SUPERSEDED}: {number} set aside, {total}; {PRUNE}{where} lists and deletes them"


def apply_limit(out: Path, gigabytes: float, spare: Iterable[Optional[Path]]) -> None:
    """Delete the oldest until the rest takes at most `gigabytes` (0: no limit), but never the one with the most steps.

    spare: others to keep. Prints what was deleted.
    """
    held = places(out) if gigabytes else []
    spared = {path.resolve() for path in spare if path}
    spared |= {place.path.resolve() for place in sorted(held, key=lambda place: place.steps)[-1:]}
    total = sum(place.size for place in held)
    for place in reversed(held):
        if total > gigabytes * 1e9 and place.path.resolve() not in spared:
            delete(place)
            total -= place.size
            print(f"--superseded-gb {gigabytes:g}: deleted {place.path} of {place.steps} steps, {_mb(place.size)}")


def delete(place: Place) -> None:
    """Remove all files of `place`. Raises OSError."""
    shutil.rmtree(place.path)


def read(path: Path) -> Optional[Dict[str, Any]]:
    """The description inside a model file; None if it is missing or damaged."""
    try:
        return load_model_file(path)[1]
    except (FileNotFoundError, BadCheckpoint):
        return None


def _described(path: Path) -> Place:
    names = [re.fullmatch(r"step-(\d+)", file.stem) for file in path.glob("step-*.safetensors")]
    best = read(path / "best.safetensors")
    steps = [int(name.group(1)) for name in names if name] + ([steps_done(best)] if best else [])
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return Place(path, size, max(steps, default=0))


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
