"""Rows that begin with pixels: SIFT, two files to matches, alignment, the fill of a scene, views by
DALI.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Iterator, List, Tuple

import cv2
import numpy as np
import torch

from benchmarks import dali_views
from benchmarks.photographs import photographs
from benchmarks.timing import Row, Setting, compare, of_seconds
from pipeline import params
from pipeline.evaluate.matchers import RATIO_TEST, match_baselines
from pipeline.evaluate.pairs import add_noise
from pipeline.keypoints.views import gray_views
from superglue_sift.features import nearest, sift
from superglue_sift.features.features import extract
from superglue_sift.geometry import verification
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair
from superglue_sift.network.weights import fuse_for_inference

SAMPLE = Path(__file__).resolve().parents[1] / "presets" / "sample.yaml"
ALIGNED = 250  # matches
SCALE = 3.2  # of the photographs of `filled`
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
    settings = params.load(SAMPLE).keypoints
    photograph = photographs(1)[0]
    view = cv2.resize(photograph, (settings.width, settings.height))
    detector = sift.detector()
    count = settings.views_per_image
    ways = {
        "stage": lambda: gray_views(photograph, "a.jpg", settings),
        "SIFT": lambda: [detector.detectAndCompute(view, None) for _ in range(count)],
    }
    with one_thread():
        taken = setting.time(ways, count)
    name = f"SIFT: keypoints of a view of {settings.width}x{settings.height}, one core"
    yield compare(name, taken["stage"], taken["SIFT"], "OpenCV's SIFT alone")


def files(setting: Setting) -> Iterator[Row]:
    """Two JPEG files of 640x480 to matches at 512 keypoints, SIFT of both in two threads."""
    matcher = Matcher(
        fuse_for_inference(setting.model()), setting.device, max_keypoints=512, resize=0
    )
    with two_files() as paths:
        taken = setting.time({"call": lambda: matcher.match(*paths)})
    yield of_seconds("two JPEG files to matches, 512 keypoints", taken["call"])


def aligned(setting: Setting) -> Iterator[Row]:
    """Alignment of 250 matches by the pixels, and two JPEG files to matches at 1,024 of 4,096
    keypoints, one thread each.
    """
    matcher = Matcher(fuse_for_inference(setting.model()), setting.device, refine=False)
    with two_files() as paths, one_thread():
        sides = matcher.extract_all(paths)
        pair = Pair(sides[0].records, sides[1].records, sides[0].size, sides[1].size)
        passed = match_baselines(pair)[RATIO_TEST].above(0.2)
        found = MatchResult.of(*sides, passed).only(np.arange(ALIGNED))
        ways = {
            "files": lambda: matcher.match(*paths),
            "align": lambda: found.refine(*sides, str(setting.device)),
        }
        taken = setting.time(ways)
    other = "two JPEG files to matches, 1,024 of 4,096 keypoints, one thread"
    yield compare(f"aligning {ALIGNED} matches", taken["align"], taken["files"], other)


def filled(setting: Setting) -> Iterator[Row]:
    """The ratio test and the geometric verification of two views with 8,192 keypoints each."""
    large = cv2.resize(photographs(1)[0], None, fx=SCALE, fy=SCALE, interpolation=cv2.INTER_CUBIC)
    views = rotate(add_noise(large, 8.0))  # for more keypoints than a small photograph has
    features = [extract(view, verification.MAX_KEYPOINTS) for view in views]
    records = [side.records for side in features]
    found = nearest.ratio_matches(*records)
    surest = found.indices[np.argsort(-found.scores)[:ALIGNED]]
    ours = Matches(surest, np.ones(len(surest), np.float32))

    def fill() -> None:
        mutual = nearest.ratio_matches(*records, ratio=1.0)
        verification.match_one_place(features, ours, mutual, 0.5, 0, verification.ACCEPT)

    taken = setting.time({"fill": fill})
    sizes = " and ".join(f"{len(side.records):,}" for side in features)
    yield of_seconds(f"filling a pair of {sizes} keypoints", taken["fill"])


def views(setting: Setting) -> Iterator[Row]:
    """JPEG files to pairs of views with their homographies (`dali_views`): DALI compared with
    OpenCV.
    """
    quality = [cv2.IMWRITE_JPEG_QUALITY, 95]
    jpegs = [cv2.imencode(".jpg", image, quality)[1].tobytes() for image in photographs(8)]
    jpegs *= DECODED // len(jpegs)
    gpu = setting.device.index or 0 if setting.device.type == "cuda" else None
    ways = {
        "OpenCV": lambda: list(dali_views.opencv_views(jpegs, VIEW)),
        "DALI": lambda: list(dali_views.dali_views(jpegs, VIEW, gpu)),
    }
    with one_thread():
        taken = setting.time(ways, DECODED)
    title = "mode: JPEG files to pairs of views by DALI"
    yield compare(title, taken["DALI"], taken["OpenCV"], "OpenCV in one thread")


def rotate(image: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """An image and itself rotated by 10 degrees about its middle."""
    height, width = image.shape
    turn = cv2.getRotationMatrix2D((width / 2, height / 2), 10, 1.0)
    return image, cv2.warpAffine(image, turn, (width, height))


@contextlib.contextmanager
def two_files() -> Iterator[List[Path]]:
    """JPEG files of a photograph and of its rotation."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "a.jpg", Path(folder) / "b.jpg"]
        for path, view in zip(paths, rotate(photographs(1)[0])):
            cv2.imwrite(str(path), view)
        yield paths
