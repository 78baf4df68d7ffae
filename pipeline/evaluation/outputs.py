"""Everything an evaluation writes into its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Dict

from pipeline.evaluation import confidence, matchers, scoring, summary
from pipeline.evaluation.matchers import OURS, PairMatches
from pipeline.evaluation.pairs import Pair, Source, images_of
from pipeline.evaluation.run import THRESHOLDS, Evaluation, Settings, errors_by_matcher, picture_choice
from pipeline.matching import metrics
from pipeline.report import curves, pictures, tables

PICTURED = (OURS, "ratio_test")  # one above the other
FILES = ("metrics.json", "protocol.json", "pairs.csv", "scenes.csv", "bad_images.csv")
FOLDERS = ("curves", "pictures")


def write_all(out: Path, source: Source, result: Evaluation, settings: Settings) -> None:
    """Tables, curves and pictures. What an earlier evaluation left in `out` is replaced."""
    write_json(out / "metrics.json", result.figures)
    curves.write_csv(out / "pairs.csv", [summary.pair_line(row) for row in result.rows])
    curves.write_csv(out / "scenes.csv", summary.by_scene(result.rows, matchers.MATCHERS))
    bad = [{"file": name, "reason": reason} for name, reason in result.bad]
    curves.write_csv(out / "bad_images.csv", bad, ("file", "reason"))
    write_curves(out / "curves", result)
    write_pictures(out / "pictures", source, result, settings)


def write_json(path: Path, content: dict) -> None:
    """Indented JSON with a final newline; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_curves(folder: Path, result: Evaluation) -> None:
    """error_ransac.csv, error_dlt.csv, precision_recall.csv and calibration.csv."""
    for estimator in scoring.ESTIMATORS:
        errors = errors_by_matcher(result.rows, estimator)
        curves.write_csv(folder / f"error_{estimator}.csv", curves.error_curve(errors))
    for name, lines in (
        ("precision_recall", confidence.threshold_curve(result.judged, THRESHOLDS)),
        ("calibration", confidence.calibration(result.judged)),
    ):
        rounded = [{key: summary.plain(value) for key, value in line.items()} for line in lines]
        columns = () if rounded else ("confidence", "precision", "matches")
        curves.write_csv(folder / f"{name}.csv", rounded, columns)


def write_pictures(folder: Path, source: Source, result: Evaluation, settings: Settings) -> None:
    """best-1.png, ..., median-1.png, ..., worst-1.png, ...: ours above the ratio test on the same pair."""
    if folder.is_dir():
        shutil.rmtree(folder)  # pictures of an earlier evaluation would pass for this one's
    folder.mkdir(parents=True)
    rows = {(row.pair, row.matcher): row for row in result.rows}
    for name, index in picture_choice(result.rows, settings.pictures):
        pair = result.pairs[index]
        answers = matchers.match_baselines(pair, settings.ratio)
        answers[OURS] = result.answers[index].above(settings.threshold)
        panels = [panel(pair, answers, rows[pair.name, matcher], settings) for matcher in PICTURED]
        image0, image1 = images_of(source, pair)
        pictures.write(folder / f"{name}.png", pictures.draw(image0, image1, panels))


def panel(
    pair: Pair, answers: Dict[str, PairMatches], row: scoring.Row, settings: Settings
) -> pictures.Panel:
    """One matcher's row of a picture."""
    points0, points1, _ = scoring.matched_points(pair, answers[row.matcher])
    correct = metrics.reprojection_errors(points0, points1, pair.H_0to1) < settings.limits.correct_px
    heading = (
        f"{tables.title(row.matcher)}: {row.counts.correct} of {row.counts.matches} matches right, "
        f"corner error {row.errors['ransac']:.2f} px   ({pair.name})"
    )
    return pictures.Panel(heading, points0, points1, correct)
