"""What a training tells the person at the keyboard: no weight depends on a word of it."""

from __future__ import annotations

from typing import Any

from pipeline.runtime.progress import progress


def steps_bar(training) -> Any:
    """The progress bar over all steps, on rank 0."""
    return progress(
        total=training.train.steps,
        initial=training.state.step,
        desc="train",
        unit="step",
        disable=not training.context.is_main,
    )


def lost_peer(training, error: Exception) -> str:
    """A collective failed."""
    who = f"rank {training.context.rank} at step {training.state.step}"
    return f"{who}: another rank died or hangs ({str(error).splitlines()[0]})"


def out_of_memory(training) -> str:
    """What to set where a step does not fit into memory."""
    train, world_size = training.train, training.context.world_size
    here = -(-training.batch // world_size // train.accumulate)
    fix = f"train.accumulate: {train.accumulate * 2} (the same steps, {max(here // 2, 1)} pairs at a time)"
    smaller = f"train.batch: {max(training.batch // 2, world_size)}"
    return f"out of memory at step {training.state.step} with {here} pairs at a time: set {fix}, or {smaller}"
