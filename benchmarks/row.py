"""A row of the table, what a run is set to, and what a row may cost."""

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

EFFICIENCY = 0.25  # of a plain matrix product's speed, to foretell what a row takes; pessimistic on purpose
GPU_RATE = 20e12  # FLOP/s, the same for a GPU
MEMORY_SHARE = 0.7  # of what is free, that a row may take


@dataclasses.dataclass(frozen=True)
class Row:
    """One line: a figure with its unit, perhaps a ratio with its interval, or the reason why it was skipped.

    ratio_cpu: the same ratio in processor seconds, which others' load does not move (one process, CPU).
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
    spread: Optional[Ratio] = None  # the value with its interval over the rounds
    at_most: Optional[float] = None  # target of the value; `target` is one of the ratio
    dim: Optional[int] = None  # D of the network; `table.run` knows it where a group has no other

    @property
    def met(self) -> str:
        """yes: the interval lies on the target's good side; near: it holds it; no: beyond. Empty without a target."""
        if self.at_most is None or self.value is None:
            return self._reached(self.ratio)
        low, high = (self.spread or Ratio(self.value)).ends
        return _judged(high <= self.at_most, low <= self.at_most)

    @property
    def met_cpu(self) -> str:
        """The same by processor seconds."""
        return self._reached(self.ratio_cpu)

    def _reached(self, ratio: Optional[Ratio]) -> str:
        if self.target is None or ratio is None:
            return ""
        low, high = ratio.ends
        return _judged(low >= self.target, high >= self.target)

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


def _judged(whole: bool, part: bool) -> str:
    return "yes" if whole else "near" if part else "no"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run measures and how long a row may take. `rate`: FLOP/s of a plain product on this device."""

    device: torch.device
    config: SuperGlueConfig
    rounds: int = 5
    seconds: float = 8.0
    images: Path = Path("data/images")
    params: Path = Path("params.yaml")
    weights: Optional[Path] = None  # of the model of the rows of evaluation; None: untrained
    keypoint_counts: tuple = (256, 512, 1024, 2048)
    batches: tuple = (1, 8, 32)
    rate: float = 1e11

    def model(self, **changes: Any) -> SuperGlue:
        """An untrained network of this size, the same weights each time."""
        torch.manual_seed(0)
        return SuperGlue(dataclasses.replace(self.config, **changes)).to(self.device)

    def wait(self) -> None:
        """Until the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, ways: Dict[str, Callable[[], object]], seconds: float = 0.0) -> Dict[str, timing.Seconds]:
        """`timing.interleaved` within this setting's budget."""
        return timing.interleaved(ways, self.rounds, seconds or self.seconds, self.wait)

    def too_dear(self, operations: float, memory: float, calls: int = 3, budgets: float = 2.0) -> str:
        """Why a row of `calls` calls is not affordable within so many `budgets`, or nothing."""
        rate = GPU_RATE if self.device.type == "cuda" else EFFICIENCY * self.rate
        seconds, most = calls * operations / rate, budgets * self.seconds
        if seconds > most:
            return f"about {seconds:.0f} s, more than {most:.0f}; --seconds {seconds / budgets + 1:.0f} runs it"
        free = free_memory(self.device)
        if memory > MEMORY_SHARE * free:
            return f"about {memory / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
        return ""


def contained(group: str, what: str, made: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of `made`. An exception costs those still to come and no others; a row named `what` says so."""
    try:
        yield from made()
    except RequestError as error:
        yield Row(group, what, skipped=str(error))
    except Exception as error:
        message = str(error).strip().splitlines()[:1]
        yield Row(group, what, skipped=": ".join(["failed", type(error).__name__, *message]))
    with contextlib.suppress(RuntimeError):  # a GPU that has failed fails here again
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> float:
    """Bytes that can still be had on the device."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)


def setting_for(device: str, config: SuperGlueConfig, **others: Any) -> Setting:
    """A setting whose `rate` has been measured."""
    found = torch.device(device)
    rate = flops.measured_rate() if found.type == "cpu" else GPU_RATE
    return Setting(found, config, rate=rate, **others)


def load() -> str:
    """What else the machine does: the load of the last minute, cores, threads of torch."""
    return f"load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def activation_bytes(config: SuperGlueConfig, keypoints: int, pairs: int, plain: bool = False) -> float:
    """Roughly what a training step keeps, to foretell whether it fits."""
    tokens, layers = 2.0 * keypoints * pairs, 2 * config.layers
    kept = tokens * layers * 16 * config.dim * 4 + pairs * 8.0 * (keypoints + 1) ** 2 * 4
    if plain:
        kept += tokens * layers * 2 * config.heads * keypoints * 4
        kept += pairs * config.sinkhorn_iterations * 4.0 * (keypoints + 1) ** 2 * 4
    return kept
