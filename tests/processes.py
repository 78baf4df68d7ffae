"""Run a function in several processes that form a gloo group, and collect what they return."""

import os
import traceback

import torch
import torch.multiprocessing as mp

from pipeline import distributed
from pipeline.distributed import free_port

LIMIT_SECONDS = 120


# Processes fork from one that has imported torch: an import takes a second, and no test runs there.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "pipeline.distributed"])


def _work(environment, function, arguments, answers):
    os.environ.clear()
    os.environ.update(environment)
    rank = int(environment["RANK"])
    torch.set_num_threads(1)
    try:
        with distributed.process_group() as context:
            answers.put((rank, function(context, *arguments), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))


def in_group(world_size, function, *arguments):
    """`function(context, *arguments)` on each rank; its answers in rank order. AssertionError when
    a rank fails.

    Answers must be plain values (numbers, lists, numpy arrays).
    """
    answers = CONTEXT.Queue()
    group = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    environments = [
        {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)
    ]
    processes = [
        CONTEXT.Process(target=_work, args=(environment, function, arguments, answers), daemon=True)
        for environment in environments
    ]
    for process in processes:
        process.start()
    try:
        found = {}
        for _ in processes:
            rank, answer, trouble = answers.get(timeout=LIMIT_SECONDS)
            assert trouble is None, f"rank {rank} of {world_size}:\n{trouble}"
            found[rank] = answer
        return [found[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
