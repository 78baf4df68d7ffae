"""Rows that tell how memory grows with keypoints, pairs and iterations, and time with images.

How time grows with keypoints and pairs follows from the grid (`growth`), with processes from `group_rows`.
"""

from __future__ import annotations

from typing import Iterator, List, Sequence, Tuple

from benchmarks import keypoint_rows, memory
from benchmarks.growth import slope, slope_row
from benchmarks.memory_rows import sinkhorn_work, step_work
from benchmarks.row import Row, Setting, activation_bytes
from pipeline import params
from pipeline.errors import RequestError
from pipeline.extraction.pool import cores
from pipeline.images.sources import open_manifest

Shape = Tuple[int, int]  # keypoints, pairs
ITERATIONS = (25, 100, 200)


def growth(setting: Setting) -> Iterator[Row]:
    """Memory of a training step and of Sinkhorn; time of the keypoint stage."""
    counts = [count for count in setting.keypoint_counts if count <= 1024]
    pairs = (1, 4, 8)
    yield from _memory(setting, "memory against N, 2 pairs", counts, [(count, 2) for count in counts])
    yield from _memory(
        setting, f"memory against batch, N = {counts[0]}", pairs, [(counts[0], b) for b in pairs]
    )
    device, keypoints = str(setting.device), counts[-1]
    taken = [memory.peak_mib(sinkhorn_work, device, "ours", keypoints, 1, T) for T in ITERATIONS]
    yield slope_row(f"Sinkhorn, N = {keypoints}: memory against T", ITERATIONS, taken, 0.0)
    yield from _images(setting)


def _memory(setting: Setting, what: str, xs: Sequence[int], shapes: List[Shape]) -> Iterator[Row]:
    name = f"training step: {what}"
    expected = [activation_bytes(setting.config, *shape) for shape in shapes]
    reason = setting.too_dear(0.0, max(expected))
    if reason:
        yield Row("growth", name, skipped=reason)
        return
    device = str(setting.device)
    taken = [memory.peak_mib(step_work, device, "float32", setting.config, *shape) for shape in shapes]
    yield slope_row(name, xs, taken, slope(xs, expected))


def _images(setting: Setting) -> Iterator[Row]:
    name = "keypoint stage: time against images"
    try:
        images = open_manifest(setting.images)
        settings = params.load("keypoints", setting.params)
    except RequestError as error:
        yield Row("growth", name, skipped=str(error))
        return
    entries = images.entries("train")
    counts = [count for count in (8, 16, 32) if count <= len(entries)]
    if len(counts) < 2:
        yield Row("growth", name, skipped=f"{setting.images}: {len(entries)} training images, fewer than 16")
        return
    taken = [keypoint_rows.stage_seconds(images, entries[:count], settings, cores()) for count in counts]
    yield slope_row(name, counts, taken, 1.0)
