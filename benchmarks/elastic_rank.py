"""One rank of the rows that tell what `train.bitwise_elastic` costs.

    python -m benchmarks.elastic_rank   (started by `elastic_rows`, with RANK, WORLD_SIZE, ... set)

Every process takes the same step of the training with the option and without it, in turns. With it torch has one
thread, as in a training: what that costs a process with several is part of the price.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Callable, Dict, List, Optional, Sequence

import torch

from benchmarks.made import made_pairs
from pipeline.pairs.batch import from_pairs
from pipeline.pairs.loader import split_evenly
from pipeline.pairs.order import rank_slice
from pipeline.runtime import distributed
from pipeline.schema import TrainParams
from pipeline.training import setup
from pipeline.training.step import elastic_step, train_step


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", required=True, help="JSON of the section `train`")
    parser.add_argument("--keypoints", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args(argv)
    with distributed.joined() as context:
        taken = _rounds(args, context)
        everyone = distributed.all_gather(taken)
    if context.is_main:
        # a step lasts as long as its slowest rank, and costs the processor time of all
        wall, cpu = ([ranks[key] for ranks in everyone] for key in ("wall", "cpu"))
        found = {
            "wall": [[max(ranks) for ranks in zip(*way)] for way in zip(*wall)],
            "cpu": [[sum(ranks) for ranks in zip(*way)] for way in zip(*cpu)],
        }
        json.dump(found, sys.stdout)
    return 0


def _rounds(args: argparse.Namespace, context: distributed.Context) -> Dict[str, List[List[float]]]:
    """Seconds of this rank, by the wall and of its processor: each [without, with], a list over the rounds."""
    threads = torch.get_num_threads()
    section = TrainParams(**json.loads(args.train))
    ways = [
        (threads, _step(section, args.keypoints, context)),
        (1, _elastic(section, args.keypoints, context)),
    ]
    taken: Dict[str, List[List[float]]] = {"wall": [[], []], "cpu": [[], []]}
    for number in range(args.rounds + 1):
        for way, (allowed, step) in enumerate(ways):
            torch.set_num_threads(allowed)
            distributed.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            if context.device.type == "cuda":
                torch.cuda.synchronize()
            if number:  # the first is not counted
                taken["wall"][way].append(time.perf_counter() - wall)
                taken["cpu"][way].append(time.process_time() - cpu)
    return taken


def _batches(section: TrainParams, keypoints: int, context: distributed.Context, cut: int) -> list:
    """This rank's share of the same pairs, in `cut` micro-batches on the device."""
    pairs = made_pairs(keypoints, section.batch)
    own = pairs[rank_slice(len(pairs), context.rank, context.world_size)]
    return [from_pairs(part).to(context.device) for part in split_evenly(own, cut)]


def _step(section: TrainParams, keypoints: int, context: distributed.Context) -> Callable[[], object]:
    batches = _batches(section, keypoints, context, 1)
    parts, _ = setup.build(section, context)
    state, size = parts.state, context.world_size
    return lambda: train_step(
        parts.wrapped, state.optimizer, state.scaler, batches, section.batch, size, section.clip_norm
    )


def _elastic(section: TrainParams, keypoints: int, context: distributed.Context) -> Callable[[], object]:
    cut = setup.elastic_parts(section.batch) // context.world_size
    batches = _batches(section, keypoints, context, cut)
    parts, _ = setup.build(section.model_copy(update={"bitwise_elastic": True}), context)
    state = parts.state
    return lambda: elastic_step(
        parts.objective, state.optimizer, state.scaler, batches, section.batch, section.clip_norm
    )


if __name__ == "__main__":
    raise SystemExit(main())
