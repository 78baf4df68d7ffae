"""Time two or more ways of the same work, alternating, with the interval of their ratio.

A machine's speed varies from minute to minute by more than most improvements. So the ways alternate, each round gives
one ratio, and the interval is a bootstrap over the rounds. Processor seconds are measured too: with one thread they
remain valid while others use the machine.
"""

from __future__ import annotations

import gc
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

RESAMPLES = 2000


class Seconds(NamedTuple):
    """Seconds of one way in each round: wall time, and processor time of all threads."""

    wall: List[float]
    cpu: List[float]


class Ratio(NamedTuple):
    """How many times faster; the median over the rounds and its 95 % bootstrap interval, if it has one."""

    value: float
    low: Optional[float] = None
    high: Optional[float] = None

    @property
    def ends(self) -> Tuple[float, float]:
        """Ends of the interval; the value itself if measured once."""
        return (self.value, self.value) if self.low is None else (self.low, self.high)

    def __str__(self) -> str:
        return f"{self.value:.2f}x" + ("" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]")


def nothing() -> None:
    """Do not wait: work on a CPU is done when the call returns."""


def interleaved(
    ways: Dict[str, Callable[[], object]], rounds: int = 5, seconds: float = 10.0, wait: Callable[[], None] = nothing
) -> Dict[str, Seconds]:
    """Time each way once a round, in an order that reverses each round, after one warm-up call of each.

    Args:
        rounds: the maximum; at least two run.
        seconds: no new round starts after this much processor time, or four times as much wall time.
        wait: called before the clock is read, for work that continues after the call (on a GPU).
    """
    for way in ways.values():
        way()
    wait()
    taken = {name: Seconds([], []) for name in ways}
    names = list(ways)
    begun, used = time.perf_counter(), time.process_time()
    for number in range(max(rounds, 2)):
        spent = min(time.perf_counter() - begun, max(time.process_time() - used, (time.perf_counter() - begun) / 4))
        if number >= 2 and spent > seconds:
            break
        gc.collect()
        for name in names if number % 2 == 0 else reversed(names):
            wall, cpu = time.perf_counter(), time.process_time()
            ways[name]()
            wait()
            taken[name].wall.append(time.perf_counter() - wall)
            taken[name].cpu.append(time.process_time() - cpu)
    return taken


def speed_up(slow: Sequence[float], fast: Sequence[float], seed: int = 0) -> Ratio:
    """`slow` over `fast`, round by round."""
    ratios = np.asarray(slow, float) / np.maximum(np.asarray(fast, float), 1e-9)
    return interval(ratios, seed)


def interval(values: Sequence[float], seed: int = 0) -> Ratio:
    """Median and its 95 % bootstrap interval."""
    array = np.asarray(values, float)
    draws = np.random.default_rng(seed).integers(len(array), size=(RESAMPLES, len(array)))
    low, high = np.percentile(np.median(array[draws], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(array)), float(low), float(high))
