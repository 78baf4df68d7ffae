"""What a failed step means, and what helps."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Iterator

from pipeline.errors import WorkError
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
    """End at once, as a lost rank, when a process that loads batches died.

    The rank kills itself, so that the launcher starts all again from the newest checkpoint.
    """
    try:
        yield
    except RuntimeError as error:
        if not a_process_died(error):
            raise
        reason = "a process that loads batches died (killed, or out of memory)"
        line = f"rank {rank} at step {state.step}: {reason}: {error}"
        print(" ".join(line.split()), file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
