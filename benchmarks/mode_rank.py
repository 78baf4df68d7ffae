"""One rank of a training that is compared with another.

    python -m benchmarks.mode_rank   (started by `group_rows`, with RANK, WORLD_SIZE, ... in its environment)

A line on the standard input of each rank starts a step; a line on the standard output of rank 0 reports its end. All
ranks wait for that line, not in a collective, which would use the GPU while others are timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Optional, Sequence

import torch

from benchmarks.row import Setting
from benchmarks.training_rows import Ahead, Trainer
from pipeline.features.store import Store
from pipeline.processes import distributed
from superglue_sift.network.superglue import SuperGlueConfig


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, required=True, help="folder of a keypoint store")
    parser.add_argument("--params", type=Path, required=True)
    parser.add_argument("--config", required=True, help="JSON of a SuperGlueConfig")
    parser.add_argument("--keypoints", type=int, required=True, help="most of a view")
    parser.add_argument("--pairs", type=int, required=True, help="of a step of all ranks")
    parser.add_argument("--changes", required=True, help="JSON of keys of the section `train`")
    parser.add_argument("--ahead", action="store_true", help="load batches ahead of their step, as the stage does")
    args = parser.parse_args(argv)
    with distributed.process_group() as context:
        setting = Setting(context.device, SuperGlueConfig(**json.loads(args.config)), params=args.params)
        changes = json.loads(args.changes)
        made = Ahead if args.ahead else Trainer
        given = {"keypoints": args.keypoints, "context": context, **changes}
        step = made(setting, Store(args.store), args.pairs, **given)
        while _asked(context):
            step()
            if context.device.type == "cuda":
                torch.cuda.synchronize()
            distributed.barrier()
    return 0


def _asked(context: distributed.Context) -> bool:
    """Whether another step is requested; rank 0 first reports the end of the last one."""
    if context.is_main:
        print("ready", flush=True)
    return bool(sys.stdin.readline())


if __name__ == "__main__":
    raise SystemExit(main())
