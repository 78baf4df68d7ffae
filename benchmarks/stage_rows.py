"""Rows of whole stages: keypoints compared with bare OpenCV, two JPEG files to matches, and their alignment."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List

import cv2
import numpy as np
import torch

from benchmarks import timing
from benchmarks.dev.photographs import photographs
from benchmarks.keypoint_rows import OF_FLOOR, OF_PLAIN, keypoint_rows
from benchmarks.row import Row, Setting
from pipeline.errors import RequestError
from pipeline.evaluate.heldout import noise
from pipeline.image_sets.sources import open_manifest
from pipeline.parameters import params
from superglue_sift import classical, scenes
from superglue_sift.extractors import DENSE
from superglue_sift.features import Features
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher
from superglue_sift.network.inference import fuse_for_inference

ALIGNED = 250  # matches
LARGE = (2048, 1536)
ROTATION = (320, 240), 10, 1.0  # centre, degrees and scale of the second view's rotation
PAPER = (640, 480)  # views of the paper's training; each SIFT call there frees 72 MB unless the allocator keeps it


def keypoints(setting: Setting) -> Iterator[Row]:
    """The stage's pool compared with bare OpenCV and a plain pool, on views as configured and of the paper's size."""
    from pipeline.keypoints.pool import cores

    try:
        images = open_manifest(setting.images)
        settings = params.load("keypoints", setting.params)
    except RequestError as error:
        yield Row("keypoints", "keypoint stage", skipped=str(error))
        return
    entries = images.entries("train")[: max(4, 4 * cores())]
    for width, height in sorted({(settings.width, settings.height), PAPER}):
        sized = settings.model_copy(update={"width": width, "height": height})
        yield from map(_keypoint_row, keypoint_rows(images, entries, sized, cores(), 2))


def _keypoint_row(row: Dict[str, Any]) -> Row:
    """Our row, with targets against the floor and a plain pool; the note has the cost of each."""
    floor, plain_ = (timing.Ratio(row[key], row[f"{key}_low"], row[f"{key}_high"]) for key in ("of_floor", "of_plain"))
    note = f"{plain_} of plain (target {OF_PLAIN:g}), {row['cpu_ms']} ms and {row['faults']} page faults a view"
    target = OF_FLOOR if row["what"].startswith("keypoints ours") else None
    speed = row["views_per_second"]
    return Row("keypoints", row["what"], speed, "views/s", floor, None, "floor", target, note)


def store(setting: Setting) -> Iterator[Row]:
    """Random access to a store of 512 keypoints a view; `setting` is not used."""
    from benchmarks.store_rows import store_rows

    del setting
    for row in store_rows():
        most = float(row["at most"]) if row["at most"] else None
        against = (
            f"; {row['of_bare']} of a bare map [{row['of_bare_low']}, {row['of_bare_high']}]" if row["of_bare"] else ""
        )
        note = f"one core, hot cache, the best round{against}"
        yield Row("store", row["what"], row["microseconds"], "us", at_most=most, note=note)


@contextlib.contextmanager
def one_opencv_thread() -> Iterator[None]:
    """One OpenCV thread, as in `match` and `evaluate`, which run SIFT in threads of their own."""
    before = cv2.getNumThreads()
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(before)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread of OpenCV and of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_opencv_thread():
            yield
    finally:
        torch.set_num_threads(before)


def files(setting: Setting) -> Iterator[Row]:
    """Two JPEG files to matches at 512 keypoints, SIFT of both views in two threads."""
    matcher = Matcher(fuse_for_inference(setting.model()), setting.device, max_keypoints=512, resize=0)
    with tempfile.TemporaryDirectory() as folder, one_opencv_thread():
        paths = _jpegs(Path(folder), photographs(setting.images, 1))
        taken = setting.timed({"call": lambda: matcher.match(*paths)})["call"]
    spread = timing.interval(taken.wall)
    what = "two JPEGs to matches, 512 keypoints"
    yield Row("latency", what, spread.value, "s", spread=spread, at_most=0.25, note="target of 2 cores")


def aligned(setting: Setting) -> Iterator[Row]:
    """Alignment of 250 matches as a fraction of two JPEG files to matches at 1,024 keypoints, one thread each."""
    matcher = Matcher(fuse_for_inference(setting.model()), setting.device, refine=False)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        paths = _jpegs(Path(folder), photographs(setting.images, 1))
        sides = matcher.extract_all(paths)
        found = _true_matches(*sides).only(np.arange(ALIGNED))
        ways = {"files": lambda: matcher.match(*paths), "align": lambda: found.align(*sides, str(setting.device))}
        taken = setting.timed(ways)
    spread = timing.interval(np.asarray(taken["align"].cpu) / np.asarray(taken["files"].cpu))
    each = 1e3 * statistics.median(taken["align"].cpu)
    what = f"aligning {len(found.matches)} matches, to two JPEGs to matches, 1,024 keypoints, one thread"
    note = f"{each:.0f} ms of processor time"
    yield Row("latency", what, spread.value, "of the time", spread=spread, at_most=0.10, note=note)


def filled(setting: Setting) -> Iterator[Row]:
    """The fill of a pair of a scene (`scenes.filled`): classical matches of 8,192 keypoints of each of two views."""
    image = cv2.resize(photographs(setting.images, 1)[0], LARGE, interpolation=cv2.INTER_CUBIC)
    image = noise(image, 8.0)  # for more keypoints than a small photograph has
    rotated = cv2.warpAffine(image, cv2.getRotationMatrix2D((LARGE[0] / 2, LARGE[1] / 2), 10, 1.0), LARGE)
    records = [DENSE(view, scenes.MAX_KEYPOINTS) for view in (image, rotated)]
    sides = scenes.side_of(records[0], LARGE, 0), scenes.side_of(records[1], LARGE, 0)
    matches, scores = classical.ratio_matches(*(side.described for side in sides))
    strict = matches[np.argsort(-scores)[:ALIGNED]]
    given = strict, np.ones(len(strict), np.float32), 0.5, sides, scenes.Rules()
    spread = timing.interval(setting.timed({"fill": lambda: scenes.filled(*given)})["fill"].wall)
    what = f"filling a pair of {len(records[0]):,} and {len(records[1]):,} keypoints"
    yield Row("latency", what, spread.value, "s", spread=spread, at_most=0.15, note="target of 2 cores")


def _true_matches(side0: Features, side1: Features) -> MatchResult:
    """Keypoints that the rotation of `_jpegs` brings within 1.5 px of each other."""
    seen = cv2.transform(side0.keypoints[None], cv2.getRotationMatrix2D(*ROTATION))[0]
    distances = np.linalg.norm(seen[:, None] - side1.keypoints, axis=-1)
    nearest = distances.argmin(1)
    mutual = (distances.argmin(0)[nearest] == np.arange(len(seen))) & (distances.min(1) < 1.5)
    matches = np.where(mutual, nearest, -1)
    return MatchResult.of(side0, side1, matches, mutual.astype(np.float32))


def _jpegs(folder: Path, images: List) -> List[Path]:
    image = images[0]
    rotated = cv2.warpAffine(image, cv2.getRotationMatrix2D(*ROTATION), (640, 480))
    paths = [folder / "a.jpg", folder / "b.jpg"]
    for path, view in zip(paths, (image, rotated)):
        cv2.imwrite(str(path), view)
    return paths
