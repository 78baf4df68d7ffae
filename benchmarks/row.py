"""A row of the table, and the settings of a run."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, Optional

import torch

from benchmarks import timing
from benchmarks.timing import Ratio, Seconds
from pipeline.errors import RequestError
from superglue_sift.superglue import SuperGlue, SuperGlueConfig


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement with its unit, or the reason why it was skipped.

    ratio: to what `note` names, by wall time; cpu: the same by processor time, which other load
    hardly changes.
    """

    name: str
    value: Optional[float] = None
    unit: str = ""
    ratio: Optional[Ratio] = None
    cpu: Optional[Ratio] = None
    note: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.name:64} SKIP: {self.skipped}"
        value = f"{self.name:64} {self.value:10.4g} {self.unit:8}"
        ratio = f"  {self.ratio}" if self.ratio else ""
        cpu = f" (processor {self.cpu})" if self.cpu else ""
        return f"{value}{ratio}{cpu}  {self.note}".rstrip()


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings of a run. seconds: of a row, about."""

    device: torch.device
    config: SuperGlueConfig
    rounds: int = 5
    seconds: float = 8.0
    params: Path = Path("params.yaml")

    def model(self, **changes: Any) -> SuperGlue:
        """An untrained network of this size, the same weights each time."""
        torch.manual_seed(0)
        return SuperGlue(dataclasses.replace(self.config, **changes)).to(self.device)

    def time(self, ways: Dict[str, Callable[[], object]]) -> Dict[str, Seconds]:
        """`timing.alternate` within this setting's budget."""
        on_gpu = self.device.type == "cuda"
        return timing.alternate(
            ways, self.rounds, self.seconds, torch.cuda.synchronize if on_gpu else timing.nothing
        )


def compare(name: str, own: Seconds, base: Seconds, other: str, pairs: int = 1) -> Row:
    """Milliseconds of a pair, and the ratio to `base`, which `other` names."""
    milliseconds = 1e3 * statistics.median(own.wall) / pairs
    note = f"of {other}, {1e3 * statistics.median(base.wall) / pairs:.1f} ms"
    wall = timing.speed_up(base.wall, own.wall)
    return Row(name, milliseconds, "ms/pair", wall, timing.speed_up(base.cpu, own.cpu), note)


def run(name: str, group: Callable[[Setting], Iterable[Row]], setting: Setting) -> Iterator[Row]:
    """The rows of a group. An exception costs only its remaining rows; a row with its name reports
    it.
    """
    try:
        yield from group(setting)
    except RequestError as error:
        yield Row(name, skipped=str(error))
    except Exception as error:
        message = str(error).strip().splitlines()[:1]
        yield Row(name, skipped=": ".join(["failed", type(error).__name__, *message]))
