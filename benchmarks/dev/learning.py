"""Learning curves of several trainings against pairs: their last validations, and a picture.

    python -m benchmarks.dev.learning adam=runs/adam muon=runs/muon --out learning.png

A run is a folder in which `make repro` has trained, with `checkpoints/` and `reports/train/`. All
runs must have been validated on the same pairs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import List, Optional

import numpy as np

from pipeline import errors
from pipeline.errors import RequestError
from pipeline.files import read_json

METRICS = ("loss", "precision", "recall", "f1")
MISSING = "no such file; name a folder with checkpoints/ and reports/train/"


def main(argv: Optional[List[str]] = None) -> int:
    """Print the table and draw the curves. Raises RequestError where a file is missing."""
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dev.learning", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER", help="trainings to show")
    parser.add_argument("--out", type=Path, default=Path("learning.png"), help="the picture")
    args = parser.parse_args(argv)
    figure, grid = pyplot.subplots(1, 4, figsize=(16, 4), constrained_layout=True)
    print(f"{'':20}{'pairs':>9}" + "".join(f"{metric:>10}" for metric in METRICS))
    for run in args.runs:
        name, _, folder = run.rpartition("=")
        path = Path(folder) / "reports" / "train" / "curves" / "validation.csv"
        if not path.is_file():
            raise RequestError(f"{path}: {MISSING}")
        curve = np.atleast_1d(np.genfromtxt(path, delimiter=",", names=True))
        batch = read_json(Path(folder) / "checkpoints" / "best.json", MISSING)["train"]["batch"]
        pairs = curve["step"] * batch
        for axes, metric in zip(grid, METRICS):
            axes.plot(pairs, curve[metric], marker=".", label=name or folder)
            axes.set(xlabel="pairs", ylabel=metric)
        last = "".join(f"{curve[metric][-1]:10.3f}" for metric in METRICS)
        print(f"{name or folder:20}{pairs[-1]:9,.0f}{last}")
    grid[-1].legend(fontsize=8)
    figure.savefig(args.out, dpi=80)
    pyplot.close(figure)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
