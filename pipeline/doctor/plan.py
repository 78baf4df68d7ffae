"""Forecast of a training: memory of a process on a GPU, and hours on this machine.

`python -m pipeline.doctor` prints it. It measures some steps of the network once and keeps the result in
.dvc/tmp/plan.json.
"""

from __future__ import annotations

import contextlib
import math
import platform
import time
from pathlib import Path
from typing import Any, Dict, Iterator

import cv2
import torch

from pipeline.errors import RequestError
from pipeline.fetch import coco
from pipeline.image_sets import manifest
from pipeline.image_sets.sources import sample_folder
from pipeline.keypoints.image import gray_views
from pipeline.keypoints.pool import cores
from pipeline.processes import machine
from pipeline.processes.distributed import Context
from pipeline.processes.machine import OK, Finding
from pipeline.processes.memory import tune_process
from pipeline.train import setup, step_time
from pipeline.views.homography import smallest_image
from superglue_sift.images import read_gray

MANIFEST = Path("data/images/manifest.csv")
# Fraction of a GPU's memory; the rest is for the CUDA context, cuBLAS, the allocator's gaps and DDP's buckets.
USABLE = 0.9


def findings(sections: Any, processes: int, device: torch.device) -> Iterator[Finding]:
    """Memory of a process on a GPU, and hours of the training and of the keypoints stage.

    sections: of params.yaml, by name; processes: of the training on this machine, each on a device like `device`.
    Raises RequestError if the device does not support `train.precision`.
    """
    train, pairs = sections["train"], setup.micro_batch(sections["train"], processes)
    threads = max(cores() // processes, 1)
    chosen = step_time.choose(train, Context(0, 1, 0, device), threads).precision
    rates = measured(sections, processes, threads, pairs, chosen, device)
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        free, place = USABLE * card.total_memory, card.name
        fitting = int(rates["pairs"]), rates["bytes"]
        yield machine.check_memory(*fitting, pairs, train.accumulate, train.max_keypoints, free, place)
    if not rates["pairs"]:
        return
    batch = train.batch_per_rank * processes if train.batch_per_rank else train.batch
    hours = duration(rates["pair"] * batch * train.steps / processes)
    several = "process" if processes == 1 else "processes"
    yield Finding(
        OK,
        "training",
        f"about {hours}: {train.steps} steps of {batch} pairs, {processes / rates['pair']:.3g} pairs/s with "
        f"{processes} {several} in {chosen} (measured here)",
    )
    count = photographs(sections["fetch"])
    if count:
        hours = duration(rates["image"] * count / cores())
        per = f"{rates['image']:.2g} s of one core each (measured here)"
        yield Finding(OK, "keypoints", f"about {hours} on {cores()} cores: {count} images, {per}")


def photographs(fetch: Any) -> int:
    """Number of photographs of a preset; of a folder those that `fetch` listed, 0 before it has run."""
    if fetch.source == "folder":
        with contextlib.suppress(RequestError):  # missing or damaged: `fetch` writes it
            return len(manifest.read(MANIFEST))
    return coco.expected(fetch.source, fetch.limit)[1]


def duration(seconds: float) -> str:
    """Seconds as text: 90 s, 12 min, 3.1 h."""
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def measured(
    sections: Any, processes: int, threads: int, pairs: int, chosen: str, device: torch.device
) -> Dict[str, float]:
    """Result of `training_step`, and seconds of one core for an image (`image`); kept (`step_time.kept`).

    threads, pairs: of a process, see `training_step`. chosen: the precision.
    """
    train = sections["train"].model_copy(update={"precision": chosen})
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    used = [train.model_dump(), sections["keypoints"].model_dump()]
    key = [used, processes, pairs, name, cores(), torch.__version__]
    rates = step_time.kept("plan", key)
    if rates is None:
        rates = {**training_step(train, threads, pairs, device), "image": seconds_an_image(sections["keypoints"])}
        step_time.keep("plan", key, rates)
    return rates


def training_step(train: Any, threads: int, pairs: int, device: torch.device) -> Dict[str, float]:
    """Seconds of a training pair (`pair`), and the peak memory of a GPU (`bytes`) with the `pairs` that fit.

    If the given `pairs` do not fit, half of them are tried, a quarter, ...; 0: not even one fits.
    """
    on_gpu, usable = device.type == "cuda", math.inf
    if on_gpu:
        usable = USABLE * torch.cuda.get_device_properties(device).total_memory
    while pairs:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            seconds = step_time.seconds_a_pair(train, threads, pairs, Context(0, 1, 0, device))
            taken = torch.cuda.max_memory_allocated(device) if on_gpu else 0
            if taken <= usable:
                return {"pair": seconds, "pairs": pairs, "bytes": taken}
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
        pairs //= 2
    return {"pair": 0.0, "pairs": 0, "bytes": 0}


def seconds_an_image(settings: Any) -> float:
    """Seconds of one core for all views of a photograph of COCO's size, or of the smallest that fits."""
    tune_process()
    least = smallest_image((settings.width, settings.height))
    size = tuple(max(sides) for sides in zip(step_time.COCO_SIZE, least))
    photograph = cv2.resize(read_gray(sample_folder() / "coffee.png"), size)
    begun = time.process_time()
    gray_views(photograph, "coffee", settings)
    return time.process_time() - begun
