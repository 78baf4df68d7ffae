"""A row of the table, the settings of a run, and the budget of a row."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, Optional

import psutil
import torch

from benchmarks import flops, timing
from benchmarks.timing import Ratio
from pipeline.errors import RequestError
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

EFFICIENCY = 0.25  # assumed fraction of a matrix product's speed; pessimistic on purpose
GPU_RATE = 20e12  # FLOP/s assumed for a GPU
MEMORY_FRACTION = 0.7  # of the free memory that a row may take


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement with its unit, optionally a ratio with its interval, or the reason why it was skipped.

    ratio_cpu: the same ratio in processor seconds, which other load hardly changes (one process, CPU).
    """

    group: str
    what: str
    value: Optional[float] = None
    unit: str = ""
    ratio: Optional[Ratio] = None
    ratio_cpu: Optional[Ratio] = None
    against: str = ""
    target: Optional[float] = None
    note: str = ""
    skipped: str = ""
    spread: Optional[Ratio] = None  # the value and its interval over the rounds
    at_most: Optional[float] = None  # target of the value; `target` is that of the ratio
    dim: Optional[int] = None  # D of the network; None: that of the setting

    @property
    def met(self) -> str:
        """yes: the whole interval meets the target; near: a part of it; no: none. Empty without a target."""
        if self.at_most is None or self.value is None:
            return self._reached(self.ratio)
        low, high = (self.spread or Ratio(self.value)).ends
        return _verdict(high <= self.at_most, low <= self.at_most)

    @property
    def met_cpu(self) -> str:
        """`met` by processor seconds."""
        return self._reached(self.ratio_cpu)

    def _reached(self, ratio: Optional[Ratio]) -> str:
        if self.target is None or ratio is None:
            return ""
        low, high = ratio.ends
        return _verdict(low >= self.target, high >= self.target)

    def flat(self) -> Dict[str, Any]:
        """Columns of the CSV and JSON."""
        columns: Dict[str, Any] = {
            "group": self.group,
            "what": self.what,
            "dim": self.dim,
            "value": self.value,
            "value_low": getattr(self.spread, "low", None),
            "value_high": getattr(self.spread, "high", None),
            "unit": self.unit,
        }
        for name, ratio in (("ratio", self.ratio), ("ratio_cpu", self.ratio_cpu)):
            for key, part in zip((name, f"{name}_low", f"{name}_high"), ratio or [None] * 3):
                columns[key] = None if part is None else round(part, 4)
        rest = {
            "against": self.against,
            "target": self.target,
            "at_most": self.at_most,
            "met": self.met,
            "met_cpu": self.met_cpu,
            "note": self.note,
        }
        return {**columns, **rest, "skipped": self.skipped}


def _verdict(whole: bool, part: bool) -> str:
    return "yes" if whole else "near" if part else "no"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings of a run and the budget of a row. `rate`: FLOP/s of a matrix product on this device."""

    device: torch.device
    config: SuperGlueConfig
    rounds: int = 5
    seconds: float = 8.0
    images: Path = Path("data/images")
    params: Path = Path("params.yaml")
    weights: Optional[Path] = None  # of the evaluation's model; None: untrained
    keypoint_counts: tuple = (256, 512, 1024, 2048)
    batches: tuple = (1, 8, 32)
    rate: float = 1e11

    def model(self, **changes: Any) -> SuperGlue:
        """An untrained network of this size, the same weights each time."""
        torch.manual_seed(0)
        return SuperGlue(dataclasses.replace(self.config, **changes)).to(self.device)

    def wait(self) -> None:
        """Wait until the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, ways: Dict[str, Callable[[], object]], seconds: float = 0.0) -> Dict[str, timing.Seconds]:
        """`timing.interleaved` within this setting's budget."""
        return timing.interleaved(ways, self.rounds, seconds or self.seconds, self.wait)

    def too_dear(self, operations: float, memory: float, calls: int = 3, budgets: float = 2.0) -> str:
        """Why a row of `calls` calls does not fit this many `budgets`, or an empty string."""
        rate = GPU_RATE if self.device.type == "cuda" else EFFICIENCY * self.rate
        seconds, most = calls * operations / rate, budgets * self.seconds
        if seconds > most:
            return f"about {seconds:.0f} s, more than {most:.0f}; --seconds {seconds / budgets + 1:.0f} runs it"
        free = free_memory(self.device)
        if memory > MEMORY_FRACTION * free:
            return f"about {memory / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
        return ""


def contained(group: str, what: str, made: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of `made`. An exception costs only the remaining ones; a row named `what` reports it."""
    try:
        yield from made()
    except RequestError as error:
        yield Row(group, what, skipped=str(error))
    except Exception as error:
        message = str(error).strip().splitlines()[:1]
        yield Row(group, what, skipped=": ".join(["failed", type(error).__name__, *message]))
    with contextlib.suppress(RuntimeError):  # a GPU that has failed fails again here
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> float:
    """Free bytes on the device."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)


def setting_for(device: str, config: SuperGlueConfig, **others: Any) -> Setting:
    """A setting with a measured `rate`."""
    found = torch.device(device)
    rate = flops.measured_rate() if found.type == "cpu" else GPU_RATE
    return Setting(found, config, rate=rate, **others)


def load() -> str:
    """The load of the last minute, cores, threads of torch."""
    return f"load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def activation_bytes(config: SuperGlueConfig, keypoints: int, pairs: int, plain: bool = False) -> float:
    """Rough bytes of a training step's activations, to predict whether it fits."""
    tokens, layers = 2.0 * keypoints * pairs, 2 * config.layers
    kept = tokens * layers * 16 * config.dim * 4 + pairs * 8.0 * (keypoints + 1) ** 2 * 4
    if plain:
        kept += tokens * layers * 2 * config.heads * keypoints * 4
        kept += pairs * config.sinkhorn_iterations * 4.0 * (keypoints + 1) ** 2 * 4
    return kept
