"""Time two or more ways of the same work, alternating: a row of the table with their ratio.

A machine's speed varies from minute to minute by more than most improvements. So the ways
alternate, each round gives one ratio, and the interval is a bootstrap over the rounds. Processor
seconds are measured too: with one thread they remain valid while others use the machine.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import numpy as np
import torch

from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

ROUNDS = 7  # of a comparison, at most
RESAMPLES = 2000

Call = Callable[[], object]


class Seconds(NamedTuple):
    """Seconds of one way in each round, (rounds,): wall time, and processor time of all threads."""

    wall: np.ndarray
    cpu: np.ndarray


class Ratio(NamedTuple):
    """How many times faster; the median over the rounds and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement with its unit, or the reason why it was skipped or failed. It is skipped only
    where something is missing, such as a GPU or a package.

    ratio: to what `note` names, by wall time; cpu: the same by processor time, which other load
    hardly changes.
    """

    name: str
    value: float = 0.0
    unit: str = ""
    ratio: Optional[Ratio] = None
    cpu: Optional[Ratio] = None
    note: str = ""
    skipped: str = ""
    failed: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.name:56} SKIP: {self.skipped}"
        if self.failed:
            return f"{self.name:56} FAILED: {self.failed}"
        value = f"{self.name:56} {self.value:10.4g} {self.unit:5}"
        rate = f"  {1e3 / self.value:7.3g}/s" if self.unit == "ms" else ""
        ratio = f"  {self.ratio}" if self.ratio else ""
        cpu = f" (processor {self.cpu})" if self.cpu else ""
        return f"{value}{rate}{ratio}{cpu}  {self.note}".rstrip()


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings of a run. seconds: of a comparison, about."""

    device: torch.device
    config: SuperGlueConfig
    seconds: float = 15.0

    def model(self, **changes: Any) -> SuperGlue:
        """An untrained network of this size, the same weights each time."""
        torch.manual_seed(0)
        return SuperGlue(dataclasses.replace(self.config, **changes)).to(self.device)

    def time(self, ways: Dict[str, Call], count: int = 1) -> Dict[str, Seconds]:
        """Time each way once a round, in an order that reverses each round, after one warm-up call
        of each. At least two rounds run, and none starts after `seconds`.

        count: pairs or images of a call; the seconds are those of one.
        """
        for way in ways.values():
            self.time_once(way)
        taken: Dict[str, List[np.ndarray]] = {name: [] for name in ways}
        names = list(ways)
        begun = time.perf_counter()
        for number in range(ROUNDS):
            if number >= 2 and time.perf_counter() - begun > self.seconds:
                break
            gc.collect()
            for name in names:
                taken[name].append(self.time_once(ways[name]))
            names.reverse()
        return {name: Seconds(*np.transpose(rounds) / count) for name, rounds in taken.items()}

    def time_once(self, way: Call) -> np.ndarray:
        """Wall and processor seconds of a call, and of the work that it leaves to a GPU."""
        before = np.array([time.perf_counter(), time.process_time()])
        way()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return np.array([time.perf_counter(), time.process_time()]) - before


def of_seconds(name: str, own: Seconds) -> Row:
    """Median milliseconds, and their range."""
    low, middle, high = 1e3 * np.percentile(own.wall, [0, 50, 100])
    return Row(name, middle, "ms", note=f"{low:.0f} to {high:.0f}")


def compare(name: str, own: Seconds, base: Seconds, other: str) -> Row:
    """Median milliseconds, and the ratio to `base`, which `other` names."""
    note = f"of {other}, {1e3 * np.median(base.wall):.4g} ms"
    ratios = speed_up(base.wall, own.wall), speed_up(base.cpu, own.cpu)
    return Row(name, 1e3 * float(np.median(own.wall)), "ms", *ratios, note)


def speed_up(slow: np.ndarray, fast: np.ndarray) -> Ratio:
    """`slow` over `fast`, round by round."""
    ratios = slow / np.maximum(fast, 1e-9)
    draws = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))
