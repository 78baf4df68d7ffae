"""Forecast of a training: memory of a process on a GPU, and hours on this machine.

`python -m pipeline.doctor` prints it. It measures some steps of the network once and keeps the result in
.dvc/tmp/plan.json.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import time
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

import cv2
import torch

from pipeline.errors import RequestError
from pipeline.fetch import coco
from pipeline.files import json_digest, write_atomic
from pipeline.image_sets import manifest
from pipeline.image_sets.sources import sample_folder
from pipeline.keypoints.image import gray_views
from pipeline.keypoints.pool import cores
from pipeline.parameters.schema import TrainParams
from pipeline.processes import machine
from pipeline.processes.distributed import Context
from pipeline.processes.machine import OK, Finding
from pipeline.processes.memory import tune_process
from pipeline.train import setup
from pipeline.train.pairs.synthetic import synthetic_batch
from pipeline.train.step import CLIP_NORM, train_step
from pipeline.views.homography import smallest_image
from superglue_sift.images import read_gray

MANIFEST = Path("data/images/manifest.csv")
KEPT = Path(".dvc") / "tmp" / "plan.json"
MEASURED_STEPS = 2
MAX_TOKENS = 4096  # keypoints of a measured step on a CPU, where larger batches are not faster
COCO_SIZE = (640, 480)
# Fraction of a GPU's memory; the rest is for the CUDA context, cuBLAS, the allocator's gaps and DDP's buckets.
USABLE = 0.9


def findings(sections: Any, processes: int, device: torch.device) -> Iterator[Finding]:
    """Memory of a process on a GPU, and hours of the training and of the keypoints stage.

    sections: of params.yaml, by name; processes: of the training on this machine, each on a device like `device`.
    Raises RequestError if the device does not support `train.precision`.
    """
    train, pairs = sections["train"], setup.micro_batch(sections["train"], processes)
    threads = max(cores() // processes, 1)
    chosen = setup.choose_precision(train, Context(0, 1, 0, device)).precision
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
    """Result of `training_step`, and seconds of one core for an image (`image`); kept in KEPT.

    threads, pairs: of a process, see `training_step`. chosen: the precision.
    """
    train = sections["train"].model_copy(update={"precision": chosen})
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    used = [train.model_dump(), sections["keypoints"].model_dump()]
    key = [used, processes, pairs, name, cores(), torch.__version__]
    rates = _kept(key)
    if rates is None:
        rates = {**training_step(train, threads, pairs, device), "image": seconds_an_image(sections["keypoints"])}
        _keep(key, rates)
    return rates


def _kept(key: Any) -> Optional[Dict[str, float]]:
    """What `_keep` wrote last, if it was measured for an equal `key` (JSON values)."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        result = json.loads(KEPT.read_text())
        return result["values"] if result["key"] == json_digest(key) else None
    return None


def _keep(key: Any, values: Dict[str, float]) -> None:
    """Keep the result of a measurement, if this is a clone with DVC."""
    if KEPT.parent.is_dir():
        with contextlib.suppress(OSError):
            write_atomic(KEPT, json.dumps({"key": json_digest(key), "values": values}))


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
            seconds = seconds_a_pair(train, threads, pairs, Context(0, 1, 0, device))
            taken = torch.cuda.max_memory_allocated(device) if on_gpu else 0
            if taken <= usable:
                return {"pair": seconds, "pairs": pairs, "bytes": taken}
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
        pairs //= 2
    return {"pair": 0.0, "pairs": 0, "bytes": 0}


def seconds_a_pair(train: TrainParams, threads: int, pairs: int, context: Context) -> float:
    """Seconds per pair of this rank, in the fastest training step on synthetic pairs, after a warm-up step."""
    device = context.device
    if device.type == "cpu":
        pairs = max(min(pairs, MAX_TOKENS // train.max_keypoints // 2), 1)
    changes = {"init_from": "", "freeze": [], "compile": False, "cuda_graph": False, "parallel": "single"}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parts, _ = setup.build(train.model_copy(update=changes), context)
        batch = synthetic_batch(range(pairs), COCO_SIZE, train.max_keypoints).to(device)
        state, taken = parts.state, []
        for _ in range(1 + MEASURED_STEPS):
            begun = time.perf_counter()
            # its metrics are on the host at the end, so the device has finished
            train_step(parts.ddp_model, state.optimizer, state.scaler, [batch], pairs, 1, CLIP_NORM)
            taken.append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(before)
    return min(taken[1:]) / pairs


def seconds_an_image(settings: Any) -> float:
    """Seconds of one core for all views of a photograph of COCO's size, or of the smallest that fits."""
    tune_process()
    least = smallest_image((settings.width, settings.height))
    size = tuple(max(sides) for sides in zip(COCO_SIZE, least))
    photograph = cv2.resize(read_gray(sample_folder() / "coffee.png"), size)
    begun = time.process_time()
    gray_views(photograph, "coffee", settings)
    return time.process_time() - begun
