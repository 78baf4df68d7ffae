"""What a training will take, before the first stage: memory of a process, and hours on this machine.

`python -m pipeline.doctor` prints it. The memory is computed from the shapes (a test holds it to what a CPU's processes
take), the hours from some steps of the real network, measured here once and kept in .dvc/tmp/plan.json.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from pathlib import Path
from typing import Any, Dict, Iterator

import cv2
import psutil
import torch

from pipeline.fetch import coco
from pipeline.files import json_digest, write_atomic
from pipeline.image_sets.sources import sample_folder
from pipeline.keypoints.forecast import duration
from pipeline.keypoints.image import gray_views
from pipeline.keypoints.pool import cores
from pipeline.processes import machine
from pipeline.processes.distributed import Context
from pipeline.processes.machine import FAIL, OK, Finding
from pipeline.processes.memory import tune_process
from pipeline.train import precision, setup
from pipeline.train.pairs.synthetic import made_batch
from pipeline.train.step import train_step
from pipeline.train.trainer import CLIP_NORM
from pipeline.views.homography import smallest_image
from superglue_sift.images import read_gray
from superglue_sift.network.superglue import ENCODER_WIDTHS, SIFT_DIM

KEPT = Path(".dvc") / "tmp" / "plan.json"
# Of a card's memory, so that the CUDA context, cuBLAS and the allocator's gaps find room.
USABLE = 0.9
PROCESS_BYTES = 512 << 20  # of a process on a CPU: Python, torch, OpenCV and their buffers
# Matrices of (N + 1)^2 float32 that scores, transport and their gradient keep of each pair; truth and transport hold
# more of the pair they work on.
MATRICES, MATRICES_OF_ONE = 4, 6
MOMENTS = {"adam": 2, "adamw": 2, "muon": 1, "sgd": 1}  # numbers that an optimiser keeps for each weight
MEASURED_STEPS = 2
TOKENS = 4096  # keypoints of a measured step on a CPU, where larger batches are no faster
COCO_SIZE = (640, 480)


def micro_batch(train: Any, processes: int) -> int:
    """Pairs that the busiest of `processes` takes at a time."""
    if train.bitwise_elastic:  # the same parts with any number of processes
        batch = train.batch_per_rank * processes or train.batch
        return batch // setup.elastic_parts(batch)
    pairs = train.batch_per_rank or -(-train.batch // processes)
    return -(-pairs // train.accumulate)


def training_bytes(train: Any, pairs: int, parameters: int, precision: str = "float32", device: str = "cpu") -> int:
    """Bytes that a training process holds at the peak of a step, beside what Python and CUDA themselves take.

    pairs: of a micro-batch, each view with `train.max_keypoints` keypoints; parameters: numbers of the network.
    """
    D, N, layers, tokens = train.dim, train.max_keypoints, 2 * train.layers, 2 * train.max_keypoints * pairs
    half = precision != "float32"
    # of a token a layer keeps for its gradient x, query, key, value, the message and its copy, D numbers each, and 2 D
    # before and after the norm, which autocast on a GPU computes in float32 and hands on in half precision
    layer = D * (40 if not half else 32 if device == "cuda" else 20)
    encoder = 4 * (2 * sum(ENCODER_WIDTHS) + 2 * SIFT_DIM)
    matrix = 4 * (N + 1) ** 2
    potentials = 4 * 2 * 2 * N * setup.SINKHORN_ITERATIONS
    transport = pairs * (MATRICES * matrix + potentials) + MATRICES_OF_ONE * matrix
    copies, weights = 2 + MOMENTS[train.optimizer] + (train.ema > 0), 4 * parameters
    whole = tokens * encoder + copies * weights
    if not train.checkpoint_layers:
        return whole + tokens * layers * layer + transport
    # of a layer x alone is kept; when transport is done the rest comes back, a layer at a time, beside which stand the
    # gradients of 4 of its 10 D numbers and, in the end, those of the weights
    return whole + tokens * layers * D * 4 + max(tokens * layer * 14 // 10, transport - weights)


def findings(sections: Any, processes: int, device: torch.device) -> Iterator[Finding]:
    """Memory of a process, and hours, of the training and of the keypoints before it.

    sections: of params.yaml, by name; processes: of the training on this machine; device: that of one of them.
    Raises RequestError where `train.precision` asks for what this device cannot do.
    """
    train = sections["train"]
    chosen = precision.on(train.precision, device).precision
    memory = _memory(train, processes, chosen, device)
    yield memory
    if memory.level == FAIL:
        return
    pairs = micro_batch(train, processes) if memory.level == OK else 1
    rates = measured(sections, processes, pairs, device)
    batch = train.batch_per_rank * processes if train.batch_per_rank else train.batch
    hours = duration(rates["pair"] * batch * train.steps / processes)
    several = "process" if processes == 1 else "processes"
    yield Finding(
        OK,
        "training",
        f"about {hours}: {train.steps} steps of {batch} pairs, {processes / rates['pair']:.3g} pairs/s with "
        f"{processes} {several} in {chosen} (measured here)",
    )
    count = coco.expected(sections["fetch"].source, sections["fetch"].limit)[1]
    if count:
        took = duration(rates["image"] * count / cores())
        per = f"{rates['image']:.2g} s of one core each (measured here)"
        yield Finding(OK, "keypoints", f"about {took} on {cores()} cores: {count} images, {per}")


def _memory(train: Any, processes: int, chosen: str, device: torch.device) -> Finding:
    numbers = sum(parameter.numel() for parameter in setup.network(train).parameters())
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        free, place = USABLE * card.total_memory, card.name
    else:
        free = psutil.virtual_memory().available / processes - PROCESS_BYTES
        place = "this machine" if processes == 1 else f"a share of {processes} on this machine"

    def needed(pairs: int, keypoints: int) -> float:
        sized = train.model_copy(update={"max_keypoints": keypoints})
        return training_bytes(sized, pairs, numbers, chosen, device.type)

    pairs = micro_batch(train, processes)
    return machine.judge_memory(needed, pairs, train.accumulate, train.max_keypoints, free, place)


def measured(sections: Any, processes: int, pairs: int, device: torch.device) -> Dict[str, float]:
    """Seconds of one process for a training pair (`pair`), of one core for an image (`image`), as kept in `KEPT`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    asked = [sections[part].model_dump() for part in ("train", "keypoints")]
    key = json_digest([asked, processes, pairs, name, cores(), torch.__version__])
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads(KEPT.read_text())[key]
    rates = {
        "pair": seconds_a_pair(sections["train"], max(cores() // processes, 1), pairs, device),
        "image": seconds_an_image(sections["keypoints"]),
    }
    if KEPT.parent.is_dir():
        with contextlib.suppress(OSError):
            write_atomic(KEPT, json.dumps({key: rates}))
    return rates


def seconds_a_pair(train: Any, threads: int, pairs: int, device: torch.device) -> float:
    """Of training steps of the real network on made-up pairs, after an unmeasured first; the fastest of them."""
    if device.type == "cpu":
        pairs = max(min(pairs, TOKENS // train.max_keypoints // 2), 1)
    same = {"init_from": "", "freeze": [], "compile": False, "parallel": "single"}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parts, _ = setup.build(train.model_copy(update=same), Context(0, 1, 0, device))
        batch = made_batch(range(pairs), COCO_SIZE, train.max_keypoints).to(device)
        state, taken = parts.state, []
        for _ in range(1 + MEASURED_STEPS):
            begun = time.perf_counter()
            # it ends with the figures on the host: what the device does is done
            train_step(parts.ddp_model, state.optimizer, state.scaler, [batch], pairs, 1, CLIP_NORM)
            taken.append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(before)
    return min(taken[1:]) / pairs


def seconds_an_image(settings: Any) -> float:
    """Of one core for all views of a photograph of COCO's size, or of the smallest that serves."""
    tune_process()
    least = smallest_image((settings.width, settings.height))
    size = tuple(max(sides) for sides in zip(COCO_SIZE, least))
    photograph = cv2.resize(read_gray(sample_folder() / "coffee.png"), size)
    begun = time.process_time()
    gray_views(photograph, "coffee", settings)
    return time.process_time() - begun
