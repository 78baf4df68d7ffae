"""Rows that begin with pixels: SIFT, two files to matches, alignment, the fill of a scene, views by
DALI.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from pathlib import Path
from typing import Iterator, List

import cv2
import numpy as np
import torch

from benchmarks import dali_views, timing
from benchmarks.photographs import photographs
from benchmarks.row import Row, Setting
from pipeline.evaluate.heldout import add_noise
from pipeline.keypoints.image import gray_views
from pipeline.parameters import params
from superglue_sift import classical, scenes, sift
from superglue_sift.extractors import DENSE
from superglue_sift.features import Features
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher
from superglue_sift.weights import fuse_for_inference

ALIGNED = 250  # matches
LARGE = (2048, 1536)
ROTATION = ((320, 240), 10, 1.0)  # centre, degrees and scale of the second view's rotation
DECODED = 64  # photographs of a call of `views`
VIEW = (320, 240)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread of OpenCV and of torch."""
    before = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        cv2.setNumThreads(before[1])


def keypoints(setting: Setting) -> Iterator[Row]:
    """The keypoints stage's work on a photograph, per view, compared with OpenCV's SIFT alone on as
    many views.
    """
    settings = params.load("keypoints", setting.params)
    photograph = photographs(1)[0]
    view = cv2.resize(photograph, (settings.width, settings.height))
    detector = sift.detector(sift.with_spare(settings.max_keypoints))
    count = settings.views_per_image

    def detect() -> None:
        for _ in range(count):
            detector.detectAndCompute(view, None)

    with one_thread():
        taken = setting.time(
            {"stage": lambda: gray_views(photograph, "a.jpg", settings), "SIFT": detect}
        )
    each = 1e3 * statistics.median(taken["stage"].cpu) / count
    ratio = timing.speed_up(taken["SIFT"].wall, taken["stage"].wall)
    cpu = timing.speed_up(taken["SIFT"].cpu, taken["stage"].cpu)
    name = f"SIFT: keypoints of a view of {settings.width}x{settings.height}, one core"
    yield Row(name, each, "ms", ratio, cpu, "of OpenCV's SIFT alone")


def files(setting: Setting) -> Iterator[Row]:
    """Two JPEG files of 640x480 to matches at 512 keypoints, SIFT of both in two threads."""
    matcher = Matcher(
        fuse_for_inference(setting.model()), setting.device, max_keypoints=512, resize=0
    )
    with tempfile.TemporaryDirectory() as folder:
        paths = _write_pair(Path(folder), photographs(1)[0])
        seconds = setting.time({"call": lambda: matcher.match(*paths)})["call"].wall
    note = f"{min(seconds):.3f} to {max(seconds):.3f}"
    yield Row(
        "two JPEG files to matches, 512 keypoints", statistics.median(seconds), "s", note=note
    )


def aligned(setting: Setting) -> Iterator[Row]:
    """Alignment of 250 matches by the pixels, and two JPEG files to matches at 1,024 keypoints, one
    thread each.
    """
    matcher = Matcher(fuse_for_inference(setting.model()), setting.device, refine=False)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        paths = _write_pair(Path(folder), photographs(1)[0])
        sides = matcher.extract_all(paths)
        found = _true_matches(*sides).only(np.arange(ALIGNED))
        ways = {
            "files": lambda: matcher.match(*paths),
            "align": lambda: found.align(*sides, str(setting.device)),
        }
        taken = setting.time(ways)
    share = statistics.median(np.asarray(taken["align"].cpu) / np.asarray(taken["files"].cpu))
    note = f"{share:.1%} of the time of two JPEG files to matches, 1,024 keypoints, one thread"
    yield Row(
        f"aligning {len(found.matches)} matches",
        1e3 * statistics.median(taken["align"].cpu),
        "ms",
        note=note,
    )


def filled(setting: Setting) -> Iterator[Row]:
    """The fill of a pair of a scene (`scenes.fill`): classical matches of 8,192 keypoints of each
    of two views.
    """
    image = cv2.resize(photographs(1)[0], LARGE, interpolation=cv2.INTER_CUBIC)
    image = add_noise(image, 8.0)  # for more keypoints than a small photograph has
    rotated = cv2.warpAffine(
        image, cv2.getRotationMatrix2D((LARGE[0] / 2, LARGE[1] / 2), 10, 1.0), LARGE
    )
    records = [DENSE(view, scenes.MAX_KEYPOINTS) for view in (image, rotated)]
    sides = scenes.side_of(records[0], LARGE, 0), scenes.side_of(records[1], LARGE, 0)
    matches, scores = classical.ratio_matches(*(side.described for side in sides))
    strict = matches[np.argsort(-scores)[:ALIGNED]]
    given = strict, np.ones(len(strict), np.float32), 0.5, sides, scenes.Rules()
    seconds = setting.time({"fill": lambda: scenes.fill(*given)})["fill"].wall
    name = f"filling a pair of {len(records[0]):,} and {len(records[1]):,} keypoints"
    yield Row(
        name, statistics.median(seconds), "s", note=f"{min(seconds):.3f} to {max(seconds):.3f}"
    )


def views(setting: Setting) -> Iterator[Row]:
    """JPEG files to pairs of views with their homographies (`dali_views`): DALI compared with
    OpenCV.
    """
    found = photographs(8)
    jpegs = [
        cv2.imencode(".jpg", found[i % 8], [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
        for i in range(DECODED)
    ]
    gpu = setting.device.index or 0 if setting.device.type == "cuda" else None
    ways = {
        "OpenCV": lambda: list(dali_views.opencv_views(jpegs, VIEW)),
        "DALI": lambda: list(dali_views.dali_views(jpegs, VIEW, device=gpu)),
    }
    with one_thread():
        taken = setting.time(ways)
    rate = DECODED / statistics.median(taken["DALI"].wall)
    ratio = timing.speed_up(taken["OpenCV"].wall, taken["DALI"].wall)
    yield Row(
        "mode: JPEG files to pairs of views by DALI",
        rate,
        "images/s",
        ratio,
        note="of OpenCV in one thread",
    )


def _true_matches(side0: Features, side1: Features) -> MatchResult:
    """Keypoints that the rotation of `_write_pair` brings within 1.5 px of each other."""
    seen = cv2.transform(side0.keypoints[None], cv2.getRotationMatrix2D(*ROTATION))[0]
    distances = np.linalg.norm(seen[:, None] - side1.keypoints, axis=-1)
    nearest = distances.argmin(1)
    mutual = (distances.argmin(0)[nearest] == np.arange(len(seen))) & (distances.min(1) < 1.5)
    return MatchResult.of(side0, side1, np.where(mutual, nearest, -1), mutual.astype(np.float32))


def _write_pair(folder: Path, image: np.ndarray) -> List[Path]:
    rotated = cv2.warpAffine(image, cv2.getRotationMatrix2D(*ROTATION), (640, 480))
    paths = [folder / "a.jpg", folder / "b.jpg"]
    for path, view in zip(paths, (image, rotated)):
        cv2.imwrite(str(path), view)
    return paths
