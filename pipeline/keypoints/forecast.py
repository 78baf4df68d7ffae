"""Forecast of time and disk space for the keypoints, measured on a few of the images."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Sequence

from pipeline.errors import RequestError
from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet
from pipeline.keypoints.pool import ImageExtractor
from pipeline.processes.memory import tune_process
from superglue_sift.images import BadImage

SAMPLED = 12  # images, spread over the set
CORES = (8, 16, 64)
_PER_VIEW = 8 + 9 * 8  # bytes besides the records: an offset and a homography


@dataclass(frozen=True)
class Forecast:
    """images: their number; seconds: of one core per image; size: bytes in the store per image."""

    images: int
    seconds: float
    size: float


def forecast(images: ImageSet, entries: Sequence[Entry], settings: Any) -> Forecast:
    """Measure a few images in this process. Raises RequestError if none of them can be used."""
    tune_process()
    extract = ImageExtractor(images, settings)
    chosen = list(entries[:: max(len(entries) // SAMPLED, 1)][:SAMPLED])
    extract(chosen[0])  # warm-up
    begun, sizes = time.process_time(), []
    for entry in chosen:
        result = extract(entry)
        if not isinstance(result, BadImage):
            sizes.append(sum(records.nbytes for records in result.records))
    if not sizes:
        raise RequestError(f"none of {len(chosen)} images tried can be used; look at them before the long run")
    seconds = (time.process_time() - begun) / len(chosen)
    return Forecast(len(entries), seconds, sum(sizes) / len(sizes) + settings.views_per_image * _PER_VIEW)


def report(plan: Forecast, settings: Any, out: Path, cores: int) -> List[str]:
    """The forecast as lines, with what to change if the disk is too small."""
    here = next(folder for folder in (out, *out.resolve().parents) if folder.exists())
    free, needed = shutil.disk_usage(here).free, plan.images * plan.size
    lines = [
        f"{plan.images} images, {settings.views_per_image} views each: {1000 * plan.seconds:.0f} ms of one core per "
        f"image (measured on some of them), {plan.size / 1e3:.0f} kB per image in the store"
    ]
    for count in sorted({cores, *CORES}):
        note = " (this machine)" if count == cores else ""
        lines.append(f"  {count:3d} cores: {duration(plan.images * plan.seconds / count)}{note}")
    lines.append(f"  disk: {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB free at {here}, and as much again")
    lines[-1] += " in DVC's cache unless cache.type is a link"
    if needed > free:
        views, images = int(settings.views_per_image * free / needed), int(plan.images * free / needed)
        choices = [f"keypoints.views_per_image = {views}"] if views >= 2 else []
        choices.append(f"fetch.limit = {images}")
        lines.append(f"  too small: choose {' or '.join(choices)}, a smaller keypoints.max_keypoints, or --out")
    return lines


def duration(seconds: float) -> str:
    """Seconds as text: 90 s, 12 min, 3.1 h."""
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
