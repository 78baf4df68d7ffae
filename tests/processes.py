"""Run a function in several processes that form a gloo group, and collect what they return."""

import os
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.multiprocessing as mp

from pipeline import distributed
from pipeline.distributed import find_free_port

# Processes fork from one that has imported torch: an import takes a second, and no test runs there.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "pipeline.distributed"])


def _work(environment, function, arguments):
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    with distributed.process_group() as context:
        return function(context, *arguments)


def in_group(world_size, function, *arguments):
    """`function(context, *arguments)` on each rank; its results in rank order, or its exception.

    Results must be plain values (numbers, lists, numpy arrays).
    """
    group = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_free_port()}
    group["SG_TIMEOUT"] = 120  # seconds, after which a rank that hangs ends all
    with ProcessPoolExecutor(world_size, CONTEXT) as pool:
        futures = []
        for rank in range(world_size):
            variables = {**group, "RANK": rank, "LOCAL_RANK": rank}
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            futures.append(pool.submit(_work, environment, function, arguments))
        return [future.result() for future in futures]
