"""What a failed step means, and what helps."""

from __future__ import annotations

import contextlib
from typing import Iterator

from pipeline.errors import WorkError, end_as_lost
from pipeline.train.checkpoint import TrainState
from pipeline.train.pairs.workers import a_process_died


@contextlib.contextmanager
def explain_lack_of_memory(
    step: int, pairs: int, world_size: int, accumulate: int
) -> Iterator[None]:
    """Raise WorkError with the fix in place of torch's error.

    pairs: of a step over all ranks; accumulate: parts in which a rank computes its pairs.
    """
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        at_a_time = -(-pairs // world_size // accumulate)
        raise WorkError(
            f"out of memory at step {step} with {at_a_time} pairs at a time: set"
            f" TRAIN_OPTIONS='--accumulate {accumulate * 2}' (the same steps,"
            f" {max(at_a_time // 2, 1)} pairs at a time), or train.batch:"
            f" {max(pairs // 2, world_size)}"
        ) from error


@contextlib.contextmanager
def watch_processes(rank: int, state: TrainState) -> Iterator[None]:
    """End as a lost rank when a process that loads batches died: torchrun starts all again."""
    try:
        yield
    except RuntimeError as error:
        if a_process_died(error):
            reason = "a process that loads batches died (killed, or out of memory)"
            end_as_lost(f"rank {rank} at step {state.step}: {reason}: {error}")
        raise
