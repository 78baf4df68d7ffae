"""Learning curves of several trainings against pairs and processor minutes.

    python -m benchmarks.dev.learning adam=runs/adam muon=runs/muon --keypoints data/keypoints --out
    reports/learning

A run is the folder of a training that holds `checkpoints/` and `reports/`; `A+B` is one that
continued from another's weights. All runs must have been validated on the same pairs. The untrained
network, mutual nearest neighbours and the ratio test on those pairs are the horizontal lines.
Writes learning.csv and learning.png.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import torch

from pipeline import errors
from pipeline.errors import RequestError
from pipeline.features.store import Store
from pipeline.parameters import params
from pipeline.parameters.schema import TrainParams
from pipeline.processes import distributed
from pipeline.train import setup
from pipeline.train.objective import MatchingObjective
from pipeline.train.pairs.augmentation import Augmentation
from pipeline.train.pairs.loader import load_batch
from pipeline.train.pairs.order import Sample, validation_pairs
from pipeline.train.validation import HeldOut, validate
from superglue_sift.classical import RATIO, neighbours
from superglue_sift.descriptors import root_sift
from superglue_sift.pair_inputs import choose_orientations
from superglue_sift.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.truth import IGNORED, ground_truth

METRICS = ("loss", "precision", "recall", "f1")


class Point(NamedTuple):
    """One validation: pairs trained on before it, processor minutes spent on them, and its metrics
    by name.
    """

    pairs: int
    minutes: float
    metrics: Dict[str, float]


def curve(folders: List[Path]) -> List[Point]:
    """The validations of one run, in order. Raises RequestError where a file is missing."""
    points = []
    pairs = 0
    minutes = 0.0
    for folder in folders:
        batch = _json(folder / "checkpoints" / "best.json")["train"]["batch"]
        reports = folder / "reports"
        timing = [
            (int(row["step"]), float(row["pairs_per_s"])) for row in _rows(reports / "timing.csv")
        ]
        for row in _rows(reports / "curves" / "validation.csv"):
            step = int(row["step"])
            metrics = {name: float(row[name]) for name in METRICS}
            points.append(
                Point(pairs + step * batch, minutes + _minutes(timing, step, batch), metrics)
            )
        pairs = points[-1].pairs
        minutes = points[-1].minutes
    return points


def _minutes(timing: List[Tuple[int, float]], until: int, batch: int) -> float:
    """Minutes of all processes together that the steps up to `until` took; validation not
    counted.
    """
    before = 0
    seconds = 0.0
    for step, pairs_per_s in timing:
        if before < until:
            seconds += (min(step, until) - before) * batch / pairs_per_s
        before = step
    return seconds / 60


def baselines(
    store: Store, samples: List[Sample], train: TrainParams
) -> Dict[str, Dict[str, float]]:
    """Precision, recall and F1 of mutual nearest neighbours and of the ratio test, scored as
    `validate` does.
    """
    counts = {"mutual nearest neighbour": [0, 0], "ratio test, mutual": [0, 0]}
    true = 0
    for sample in samples:
        batch = load_batch(store, [sample], train.max_keypoints, Augmentation.of(train))
        truth = ground_truth(batch, setup.POSITIVE_PX, setup.NEGATIVE_PX).matches0[
            0, : int(batch.counts0)
        ]
        true += int((truth >= 0).sum())
        batch = choose_orientations(batch)
        unit0 = root_sift(batch.descriptors0[0, : int(batch.counts0)]).numpy()
        unit1 = root_sift(batch.descriptors1[0, : int(batch.counts1)]).numpy()
        found = neighbours(unit0, unit1)
        for name, ratio in zip(counts, (np.inf, RATIO)):
            chosen = found.mutual & (found.ratio < ratio)
            matches = torch.from_numpy(np.where(chosen, found.nearest, -1))
            scored = (matches >= 0) & (truth != IGNORED)
            counts[name][0] += int((scored & (matches == truth)).sum())
            counts[name][1] += int(scored.sum())
    return {
        name: _scores(correct, predicted, true) for name, (correct, predicted) in counts.items()
    }


def _scores(correct: int, predicted: int, true: int) -> Dict[str, float]:
    precision = correct / max(predicted, 1)
    recall = correct / max(true, 1)
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / max(precision + recall, 1e-12),
    }


def untrained(store: Store, samples: List[Sample], train: TrainParams) -> Dict[str, float]:
    """Metrics of the network before its first step; its layers are the identity, so their number
    does not matter.
    """
    torch.manual_seed(train.seed)
    model = SuperGlue(SuperGlueConfig(layers=1, sinkhorn_iterations=train.sinkhorn_iterations))
    objective = MatchingObjective(model, setup.POSITIVE_PX, setup.NEGATIVE_PX)
    context = distributed.Context(0, 1, 0, torch.device("cpu"))
    return validate(
        objective, HeldOut(store, samples, train.max_keypoints, context, Augmentation.of(train))
    )


def crossing(points: List[Point], f1: float) -> Optional[Point]:
    """The first validation whose F1 is above `f1` and stays there."""
    ahead = None
    for point in points:
        if point.metrics["f1"] <= f1:
            ahead = None
        elif ahead is None:
            ahead = point
    return ahead


def table(runs: Dict[str, List[Point]], lines: Dict[str, Dict[str, float]]) -> str:
    """The printed table: the baselines, then each run's last validation and when it passed the
    ratio test.
    """
    rows = [
        f"{'':28}{'pairs':>9}{'proc. min':>11}{'loss':>7}{'P':>7}{'R':>7}{'F1':>7}  ahead of the"
        " ratio test after"
    ]
    for name, metrics in lines.items():
        rows.append(f"{name:28}{'':>20}" + _cells(metrics))
    for name, points in runs.items():
        last = points[-1]
        first = crossing(points, lines["ratio test, mutual"]["f1"])
        when = f"{first.pairs:,} pairs, {first.minutes:.0f} min" if first else "not yet"
        rows.append(f"{name:28}{last.pairs:>9,}{last.minutes:>11.0f}{_cells(last.metrics)}  {when}")
    return "\n".join(rows)


def _cells(metrics: Dict[str, float]) -> str:
    loss = f"{metrics['loss']:>7.3f}" if "loss" in metrics else f"{'':>7}"
    return loss + "".join(f"{100 * metrics[name]:>7.1f}" for name in METRICS[1:])


def draw(runs: Dict[str, List[Point]], lines: Dict[str, Dict[str, float]], path: Path) -> None:
    """Draw four metrics against pairs (above) and processor minutes (below); the baselines are
    dashed.
    """
    from matplotlib import pyplot

    axes_of: List[Tuple[str, Callable[[Point], float]]] = [
        ("training pairs", lambda point: point.pairs),
        ("processor minutes", lambda point: point.minutes),
    ]
    figure, grid = pyplot.subplots(2, 4, figsize=(16, 7), constrained_layout=True)
    for row, (label, at) in zip(grid, axes_of):
        for axes, name in zip(row, METRICS):
            for run, points in runs.items():
                axes.plot(
                    [at(p) for p in points],
                    [p.metrics[name] for p in points],
                    marker=".",
                    label=run,
                )
            known = {line: metrics[name] for line, metrics in lines.items() if name in metrics}
            for style, (line, value) in zip((":", "--", "-."), known.items()):
                axes.axhline(value, color="gray", linestyle=style, label=line)
            axes.set_xlabel(label)
            axes.set_ylabel(name)
    grid[0][-1].legend(fontsize=8)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main(argv: Optional[List[str]] = None) -> int:
    """Entry of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dev.learning", description=__doc__.splitlines()[0]
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER[+FOLDER]", help="trainings to show")
    parser.add_argument(
        "--keypoints",
        type=Path,
        default=Path("data/keypoints"),
        help="store they were validated on",
    )
    parser.add_argument(
        "--params",
        type=Path,
        default=Path("params.yaml"),
        help="the validation's seed and number of pairs",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("reports/learning"), help="folder for the results"
    )
    args = parser.parse_args(argv)
    runs = {}
    for word in args.runs:
        name, _, folders = word.partition("=")
        if not folders:
            raise RequestError(f"{word}: must be NAME=FOLDER")
        runs[name] = curve([Path(folder) for folder in folders.split("+")])
    train = params.load("train", args.params)
    store = Store(args.keypoints / "val")
    samples = validation_pairs(train.seed, len(store), store.views_per_image, train.val_pairs)
    lines = {
        "untrained network": untrained(store, samples, train),
        **baselines(store, samples, train),
    }
    print(table(runs, lines))
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "learning.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("run", "pairs", "processor_minutes", *METRICS))
        for name, points in runs.items():
            for point in points:
                metrics = [f"{point.metrics[key]:.6f}" for key in METRICS]
                writer.writerow((name, point.pairs, f"{point.minutes:.2f}", *metrics))
    draw(runs, lines, args.out / "learning.png")
    return 0


def _rows(path: Path) -> List[Dict[str, str]]:
    if not path.is_file():
        raise RequestError(
            f"{path}: no such file; name the folder of a training with checkpoints/ and reports/"
        )
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def _json(path: Path) -> dict:
    if not path.is_file():
        raise RequestError(
            f"{path}: no such file; name the folder of a training with checkpoints/ and reports/"
        )
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
