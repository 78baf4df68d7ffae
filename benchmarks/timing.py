"""Time two or more ways of the same work, which alternate, and print a row of the table.

A machine's speed varies from minute to minute by more than most improvements. So each round runs
every way once and gives one ratio, and the interval of a ratio is a bootstrap over the rounds.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import torch

from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

ROUNDS = 7  # maximum number of a comparison
RESAMPLES = 2000  # of the bootstrap

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all rows of a run share.

    Attributes:
        device: where the network runs.
        config: the architecture of the network.
        keypoints: N, the number of keypoints of a view.
        seconds: time of a comparison, about.
    """

    device: torch.device
    config: SuperGlueConfig
    keypoints: int = 512
    seconds: float = 15.0

    def make_model(self, **changes: Any) -> SuperGlue:
        """Return an untrained network of this size, with the same weights each time."""
        torch.manual_seed(0)
        return SuperGlue(dataclasses.replace(self.config, **changes)).to(self.device)

    def time(self, ways: Dict[str, Call], count: int = 1) -> Dict[str, np.ndarray]:
        """Time each way once a round, after one call of each to warm up.

        The order reverses each round. At least two rounds run, and none starts after `seconds`.

        Returns:
            The seconds of one pair for each way, (rounds,). A call computes `count` pairs.
        """
        for way in ways.values():
            self.time_call(way)
        seconds_of: Dict[str, List[float]] = {name: [] for name in ways}
        names = list(ways)
        begun = time.perf_counter()
        for number in range(ROUNDS):
            if number >= 2 and time.perf_counter() - begun > self.seconds:
                break
            # Garbage of earlier rounds must not be collected while a way is timed.
            gc.collect()
            for name in names:
                seconds_of[name].append(self.time_call(ways[name]) / count)
            names.reverse()
        return {name: np.array(seconds) for name, seconds in seconds_of.items()}

    def time_call(self, way: Call) -> float:
        """Return the seconds of a call, with the work that it leaves to a GPU."""
        begun = time.perf_counter()
        way()
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # The call has only queued its kernels.
        return time.perf_counter() - begun


def format_row(
    name: str, seconds: np.ndarray, base: Optional[np.ndarray] = None, base_name: str = ""
) -> str:
    """Format the median milliseconds with their range.

    Args:
        name: what was timed.
        seconds: of each round, (rounds,).
        base: seconds of another way, (rounds,). With it, the row has the ratio of both ways in
            place of the range.
        base_name: what the row calls the other way.
    """
    low, middle, high = 1e3 * np.percentile(seconds, [0, 50, 100])
    note = f"{low:.4g} to {high:.4g}"
    if base is not None:
        note = f"{format_speed_up(base, seconds)} of {base_name}, {1e3 * np.median(base):.4g} ms"
    return f"{name:56} {middle:10.4g} ms     {1e3 / middle:7.3g}/s  {note}"


def format_speed_up(slow: np.ndarray, fast: np.ndarray) -> str:
    """Return the median of `slow` over `fast`, round by round, with its 95 % interval."""
    # Both ways of a round met the same load, so their ratio varies less than either.
    ratios = slow / fast
    draws = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return f"{np.median(ratios):.2f}x [{low:.2f}, {high:.2f}]"
