"""Seconds of a training step, measured on synthetic pairs: for `pipeline.doctor`, and where they decide the precision.

Results are kept in .dvc/tmp/plan.json, so that a training that starts again chooses the same precision.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any, Dict, Optional

import torch

from pipeline import compat
from pipeline.files import json_digest, write_atomic
from pipeline.parameters.schema import TrainParams
from pipeline.processes import distributed
from pipeline.processes.distributed import Context
from pipeline.train import precision, setup
from pipeline.train.pairs.synthetic import synthetic_batch
from pipeline.train.step import CLIP_NORM, train_step

KEPT = Path(".dvc") / "tmp" / "plan.json"
MEASURED_STEPS = 2
MAX_TOKENS = 4096  # keypoints of a measured step on a CPU, where larger batches are not faster
COCO_SIZE = (640, 480)


def kept(name: str, key: Any) -> Optional[Dict[str, float]]:
    """What `keep` wrote last under `name`, if it was measured for an equal `key` (JSON values)."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        result = json.loads(KEPT.read_text())[name]
        return result["values"] if result["key"] == json_digest(key) else None
    return None


def keep(name: str, key: Any, values: Dict[str, float]) -> None:
    """Keep the result of a measurement, if this is a clone with DVC."""
    results = {}
    with contextlib.suppress(OSError, ValueError):
        results = json.loads(KEPT.read_text())
    if KEPT.parent.is_dir():
        with contextlib.suppress(OSError):
            write_atomic(KEPT, json.dumps({**results, name: {"key": json_digest(key), "values": values}}))


def choose(train: TrainParams, context: Context, threads: int) -> precision.Choice:
    """The precision of a training from scratch, the same on all ranks; measured where their devices do not decide it.

    threads: of each rank.
    """
    choice = precision.on(train.precision, context.device)
    undecided = distributed.all_gather(choice.undecided)
    # the bytes of a bitwise elastic training must not depend on a measurement
    if not all(undecided) or train.bitwise_elastic:
        return setup.agreed(choice)
    world_size = context.world_size
    key = [train.model_dump(), threads, world_size, sorted(compat.cpu_flags()), torch.__version__]
    name = f"precision with {world_size} processes"
    ranks = distributed.all_gather(kept(name, key))
    if None in ranks:  # a step needs all ranks
        pairs = setup.micro_batch(train, world_size)
        both = [train.model_copy(update={"precision": each}) for each in precision.TIMED]
        ranks = distributed.all_gather({one.precision: seconds_a_pair(one, threads, pairs, context) for one in both})
    slowest = {each: max(seconds[each] for seconds in ranks) for each in precision.TIMED}
    keep(name, key, slowest)
    return precision.faster(slowest)


def seconds_a_pair(train: TrainParams, threads: int, pairs: int, context: Context) -> float:
    """Seconds per pair of this rank, in the fastest training step on synthetic pairs, after a warm-up step."""
    device, world_size = context.device, context.world_size
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
            common = (parts.ddp_model, state.optimizer, state.scaler, [batch], pairs * world_size)
            train_step(*common, world_size, CLIP_NORM)
            taken.append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(before)
    return min(taken[1:]) / pairs
