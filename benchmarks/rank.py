"""One rank of the row that compares steps with and without the exchange of gradients.

    python -m benchmarks.rank   (started by `group_rows`, with RANK, WORLD_SIZE, ... in its environment)

Every process alternates between a step with exchange and the same step without. So both are measured in one run, with
equally many busy processes.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from typing import List, Optional, Sequence

import torch

from benchmarks.synthetic import made_batch
from pipeline.processes import distributed
from pipeline.train.objective import MatchingObjective
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="JSON of a SuperGlueConfig")
    parser.add_argument("--keypoints", type=int, required=True)
    parser.add_argument("--pairs", type=int, required=True, help="pairs of a rank")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--beside-large-buckets", action="store_true", help="a third way, for `slow_link`")
    args = parser.parse_args(argv)
    with distributed.process_group() as context:
        if context.device.type == "cpu":
            torch.set_num_threads(1)
        rows = _rounds(args, context)
        everyone = distributed.all_gather(rows)
    if context.is_main:
        json.dump([[max(ranks) for ranks in zip(*way)] for way in zip(*everyone)], sys.stdout)
    return 0


def _rounds(args: argparse.Namespace, context: distributed.Context) -> List[List[float]]:
    """Seconds of this rank's steps: [exchanged, alone], each a list over the rounds.

    With `--beside-large-buckets` a third between them: exchanged in torch's own buckets.
    """
    torch.manual_seed(0)
    model = SuperGlue(SuperGlueConfig(**json.loads(args.config))).to(context.device)
    objective = MatchingObjective(model, 3.0, 5.0, args.precision)
    other = copy.deepcopy(objective)
    ways = [distributed.wrap(objective), objective]
    if args.beside_large_buckets:
        del other.in_order
        keys = {"gradient_as_bucket_view": True, "find_unused_parameters": True}
        ways.insert(1, torch.nn.parallel.DistributedDataParallel(other, **keys))
    optimizers = [torch.optim.Adam(way.parameters(), lr=1e-4) for way in ways]
    batch = made_batch(args.keypoints, args.pairs, seed=context.rank).to(context.device)
    taken: List[List[float]] = [[] for _ in ways]
    for number in range(args.rounds + 1):
        for way, module in enumerate(ways):
            distributed.barrier()
            begun = time.perf_counter()
            optimizers[way].zero_grad(set_to_none=False)
            module(batch)[0].sum().backward()
            optimizers[way].step()
            if context.device.type == "cuda":
                torch.cuda.synchronize()
            if number:  # the first is a warm-up
                taken[way].append(time.perf_counter() - begun)
    return taken


if __name__ == "__main__":
    raise SystemExit(main())
