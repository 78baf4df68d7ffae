"""Time two or more ways of the same work, alternating, with the interval of their ratio.

A machine's speed varies from minute to minute by more than most improvements. So the ways
alternate, each round gives one ratio, and the interval is a bootstrap over the rounds. Processor
seconds are measured too: with one thread they remain valid while others use the machine.
"""

from __future__ import annotations

import gc
import time
from typing import Callable, Dict, List, NamedTuple, Sequence

import numpy as np

RESAMPLES = 2000


class Seconds(NamedTuple):
    """Seconds of one way in each round: wall time, and processor time of all threads."""

    wall: List[float]
    cpu: List[float]


class Ratio(NamedTuple):
    """How many times faster; the median over the rounds and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def nothing() -> None:
    """Do not wait: work on a CPU is done when the call returns."""


def alternate(
    ways: Dict[str, Callable[[], object]],
    rounds: int = 5,
    seconds: float = 10.0,
    wait: Callable[[], None] = nothing,
) -> Dict[str, Seconds]:
    """Time each way once a round, in an order that reverses each round, after one warm-up call of
    each.

    Args:
        rounds: the maximum; at least two run.
        seconds: no new round starts after this much time.
        wait: called before the clock is read, for work that continues after the call (on a GPU).
    """
    for way in ways.values():
        way()
    wait()
    taken = {name: Seconds([], []) for name in ways}
    names = list(ways)
    begun = time.perf_counter()
    for number in range(max(rounds, 2)):
        if number >= 2 and time.perf_counter() - begun > seconds:
            break
        gc.collect()
        for name in names if number % 2 == 0 else reversed(names):
            wall = time.perf_counter()
            cpu = time.process_time()
            ways[name]()
            wait()
            taken[name].wall.append(time.perf_counter() - wall)
            taken[name].cpu.append(time.process_time() - cpu)
    return taken


def speed_up(slow: Sequence[float], fast: Sequence[float]) -> Ratio:
    """`slow` over `fast`, round by round."""
    ratios = np.asarray(slow, float) / np.maximum(np.asarray(fast, float), 1e-9)
    draws = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))
