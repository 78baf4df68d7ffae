"""Learning curves of several trainings against pairs and processor minutes.

    python -m benchmarks.dev.learning adam=runs/adam muon=runs/muon --out learning.png

A run is the folder of a training that holds `checkpoints/` and `reports/`; `A+B` is one that
continued from another's weights. All runs must have been validated on the same pairs. Prints each
run's last validation, and when it passed the ratio test on those pairs for good.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from pipeline import errors
from pipeline.errors import RequestError
from pipeline.files import read_json

SPEED = "train/pairs_per_s"
METRICS = ("loss", "precision", "recall", "f1")
MISSING = "no such file; name the folder of a training with checkpoints/ and reports/"


class Point(NamedTuple):
    """A validation: pairs and processor minutes of training before it, and its metrics by name."""

    pairs: int
    minutes: float
    metrics: Dict[str, float]


def read_curve(folders: List[Path]) -> List[Point]:
    """The validations of one run, in order. Raises RequestError where a file is missing."""
    points: List[Point] = []
    pairs = 0
    minutes = 0.0
    for folder in folders:
        batch = read_json(folder / "checkpoints" / "best.json", MISSING)["train"]["batch"]
        timed, speeds = read_speeds(folder / "reports" / "log.jsonl")
        steps = np.append(0, timed)
        # of all processes together, without validation
        spent = np.append(0, np.cumsum(np.diff(steps) * batch / speeds / 60))
        for row in read_rows(folder / "reports" / "curves" / "validation.csv"):
            metrics = {name: float(row[name]) for name in METRICS}
            at = minutes + float(np.interp(row["step"], steps, spent))
            points.append(Point(pairs + int(row["step"]) * batch, at, metrics))
        pairs = points[-1].pairs
        minutes = points[-1].minutes
    return points


def read_rows(path: Path) -> np.ndarray:
    """The lines of a CSV file, structured by its columns."""
    if not path.is_file():
        raise RequestError(f"{path}: {MISSING}")
    return np.atleast_1d(np.genfromtxt(path, delimiter=",", names=True))


def read_speeds(path: Path) -> Tuple[np.ndarray, np.ndarray]:
    """Steps, and pairs per second until there, of the points in the log of a training."""
    if not path.is_file():
        raise RequestError(f"{path}: {MISSING}")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    points = [event for event in events if SPEED in event.get("metrics", ())]
    speeds = [float(event["metrics"][SPEED]) for event in points]
    return np.array([event["step"] for event in points]), np.array(speeds)


def find_crossing(points: List[Point], f1: float) -> Optional[Point]:
    """The first validation whose F1 is above `f1` and stays there."""
    ahead = None
    for point in points:
        if point.metrics["f1"] <= f1:
            ahead = None
        elif ahead is None:
            ahead = point
    return ahead


def draw(runs: Dict[str, List[Point]], path: Path) -> None:
    """Draw four metrics against pairs (above) and processor minutes (below)."""
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 4, figsize=(16, 7), constrained_layout=True)
    for row, field in zip(grid, ("pairs", "minutes")):
        for axes, name in zip(row, METRICS):
            for run, points in runs.items():
                at = [getattr(point, field) for point in points]
                axes.plot(at, [point.metrics[name] for point in points], marker=".", label=run)
            axes.set(xlabel=field, ylabel=name)
    grid[0][-1].legend(fontsize=8)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def parse_run(word: str) -> Tuple[str, List[Point]]:
    name, _, folders = word.partition("=")
    if not folders:
        raise RequestError(f"{word}: must be NAME=FOLDER")
    return name, read_curve([Path(folder) for folder in folders.split("+")])


def main(argv: Optional[List[str]] = None) -> int:
    """Print the table and draw the curves."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dev.learning", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER[+FOLDER]", help="trainings to show")
    parser.add_argument("--ratio-test", type=float, default=0.0, help="F1 that `train` printed")
    parser.add_argument("--out", type=Path, default=Path("learning.png"), help="the picture")
    args = parser.parse_args(argv)
    runs = dict(map(parse_run, args.runs))
    print(f"{'':20}{'pairs':>9}{'proc. min':>11}{'loss':>8}{'P':>8}{'R':>8}{'F1':>8}  passed after")
    for name, points in runs.items():
        last = points[-1]
        first = find_crossing(points, args.ratio_test)
        cells = "".join(f"{last.metrics[metric]:>8.3f}" for metric in METRICS)
        when = f"{first.pairs:,} pairs, {first.minutes:.0f} min" if first else "not yet"
        print(f"{name:20}{last.pairs:>9,}{last.minutes:>11.0f}{cells}  {when}")
    draw(runs, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
