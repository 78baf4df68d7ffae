"""Puts the results of an evaluation into the page of `pipeline.report.page`."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import cv2
import numpy as np

from pipeline.evaluation import confidence, intervals, scoring
from pipeline.evaluation.difficulty import explanation
from pipeline.evaluation.matchers import OURS
from pipeline.evaluation.run import THRESHOLDS, Results, errors_by_matcher
from pipeline.evaluation.summary import Figures
from pipeline.report import curves, page

WIDEST = 1200  # pixels of a picture in the page
QUALITY = 80

Drawn = Sequence[Tuple[str, int, np.ndarray]]  # name, index of the pair, picture


def content(
    title: str,
    results: Results,
    figures: Figures,
    robustness: List[Dict[str, object]],
    drawn: Drawn,
    protocol: Dict[str, object],
) -> page.Content:
    """Everything the page shows. drawn: the pictures of `outputs`."""
    errors = {name: errors_by_matcher(results.rows, name) for name in scoring.estimators_of(results.rows)}
    scenes = len({row.scene for row in results.rows})
    pairs = f"{len(results.places)} pairs of {scenes} scenes"
    notes = [f"{pairs}, {len(results.matchers)} matchers on the same keypoints."]
    if results.bad:
        notes.append(f"{len(results.bad)} images could not be read and were left out: see bad_images.csv.")
    return page.Content(
        title=title,
        figures=figures,
        intervals=intervals.intervals(results.rows, results.matchers),
        differences=intervals.differences(results.rows),
        errors={name: curves.error_curve(found) for name, found in errors.items()},
        thresholds=numbers(confidence.threshold_curve(results.judged, THRESHOLDS)),
        calibration=numbers(confidence.calibration(results.judged)),
        robustness=robustness,
        pictures=[picture(results, *one) for one in drawn],
        protocol=protocol,
        notes=notes,
    )


def numbers(lines: Sequence[Dict[str, float]]) -> List[Dict[str, object]]:
    """The same with None for what is no number."""
    return [{name: None if value != value else value for name, value in line.items()} for line in lines]


def picture(results: Results, name: str, index: int, drawn: np.ndarray) -> page.Picture:
    """A picture for the page, with its figures and what stood in the way."""
    rows = results.rows_of(index)
    ours, theirs = rows[OURS], rows["ratio_test"]
    caption = (
        f"{ours.pair}. Above ours: {ours.counts.correct} of {ours.counts.matches} matches right, corner error "
        f"{ours.error:.2f} px. Below the ratio test: {theirs.counts.correct} of "
        f"{theirs.counts.matches} right, {theirs.error:.2f} px."
    )
    return page.Picture(name, caption, explanation(ours), small_jpeg(drawn))


def small_jpeg(drawn: np.ndarray) -> bytes:
    """A picture (H, W, 3) as a JPEG file's bytes, made smaller where it is wider than the page needs."""
    if drawn.shape[1] > WIDEST:
        height = round(drawn.shape[0] * WIDEST / drawn.shape[1])
        drawn = cv2.resize(drawn, (WIDEST, height), interpolation=cv2.INTER_AREA)
    _, data = cv2.imencode(".jpg", drawn, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
    return data.tobytes()
