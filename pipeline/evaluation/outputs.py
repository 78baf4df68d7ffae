"""Everything an evaluation writes into its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Dict, List, Tuple

import numpy as np
import torch

from pipeline.evaluation import confidence, matchers, metrics, scoring, summary
from pipeline.evaluation.intervals import differences, intervals
from pipeline.evaluation.matchers import OURS, PairMatches
from pipeline.evaluation.pairs import Pair, Scene, Source, pair_of_scene
from pipeline.evaluation.run import (
    THRESHOLDS,
    Results,
    Settings,
    errors_by_matcher,
    figures_of,
    match_others,
    picture_choice,
)
from pipeline.report import curves, tables
from superglue_sift import drawing

PICTURED = (OURS, "ratio_test")  # one above the other
FILES = (
    "metrics.json",
    "protocol.json",
    "pairs.csv",
    "scenes.csv",
    "intervals.csv",
    "differences.csv",
    "robustness.csv",
    "bad_images.csv",
    "index.html",
)
FOLDERS = ("curves", "pictures")


def write_all(
    out: Path, results: Results, protocol: Dict[str, object], robustness: List[Dict[str, object]]
) -> None:
    """Tables and curves. What an earlier evaluation left in `out` is replaced."""
    write_json(out / "metrics.json", figures_of(results))
    write_json(out / "protocol.json", protocol)
    curves.write_csv(out / "pairs.csv", [summary.pair_line(row) for row in results.rows])
    curves.write_csv(out / "scenes.csv", summary.by_scene(results.rows, results.matchers))
    curves.write_csv(out / "intervals.csv", intervals(results.rows, results.matchers))
    curves.write_csv(out / "differences.csv", differences(results.rows))
    curves.write_csv(out / "robustness.csv", robustness)
    bad = [{"file": name, "reason": reason} for name, reason in results.bad]
    curves.write_csv(out / "bad_images.csv", bad, ("file", "reason"))
    write_curves(out / "curves", results)


def write_pictures(
    folder: Path, source: Source, model: torch.nn.Module, device: str, results: Results, settings: Settings
) -> List[Tuple[str, int, np.ndarray]]:
    """best-1.png, ..., median-1.png, ..., worst-1.png, ...; returns name, index of the pair and picture."""
    emptied(folder)
    drawn = []
    scenes: Dict[int, Scene] = {}  # made again, not remembered
    for name, index in picture_choice(results.rows, settings.pictures):
        number, position = results.places[index]
        if number not in scenes:
            scenes[number] = source.load(number)
        pair, images = pair_of_scene(scenes[number], number, position, settings.max_keypoints)
        picture = draw_pair(pair, images, model, device, results.rows_of(index), settings)
        drawing.write(folder / f"{name}.png", picture)
        drawn.append((name, index, picture))
    return drawn


def emptied(folder: Path) -> Path:
    """The folder, made anew: what an earlier evaluation left would pass for this one's."""
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def write_json(path: Path, content: dict) -> None:
    """Indented JSON with a final newline; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_curves(folder: Path, results: Results) -> None:
    """error_ransac.csv, ... of each estimator, precision_recall.csv and calibration.csv."""
    emptied(folder)
    for estimator in scoring.estimators_of(results.rows):
        errors = errors_by_matcher(results.rows, estimator)
        curves.write_csv(folder / f"error_{estimator}.csv", curves.error_curve(errors))
    for name, lines in (
        ("precision_recall", confidence.threshold_curve(results.judged, THRESHOLDS)),
        ("calibration", confidence.calibration(results.judged)),
    ):
        rounded = [{key: summary.plain(value) for key, value in line.items()} for line in lines]
        columns = () if rounded else ("confidence", "precision", "matches")
        curves.write_csv(folder / f"{name}.csv", rounded, columns)


def draw_pair(
    pair: Pair,
    images: Tuple[np.ndarray, np.ndarray],
    model: torch.nn.Module,
    device: str,
    rows: Dict[str, scoring.Row],
    settings: Settings,
) -> np.ndarray:
    """(H, W, 3) picture of a pair: ours above the ratio test. rows: its own, by matcher."""
    answers = match_others(pair, settings)
    _, ours = next(matchers.match_superglue(model, [[pair]], device))
    answers[OURS] = ours.above(settings.threshold)
    return drawing.draw(*images, [panel(pair, answers, rows[name], settings) for name in PICTURED])


def panel(pair: Pair, answers: Dict[str, PairMatches], row: scoring.Row, settings: Settings) -> drawing.Panel:
    """One matcher's row of a picture."""
    points0, points1, _ = scoring.matched_points(pair, answers[row.matcher])
    correct = metrics.reprojection_errors(points0, points1, pair.H_0to1) < settings.limits.correct_px
    heading = (
        f"{tables.title(row.matcher)}: {row.counts.correct} of {row.counts.matches} matches right, "
        f"corner error {row.error:.2f} px   ({pair.name})"
    )
    return drawing.Panel(heading, points0, points1, correct)
