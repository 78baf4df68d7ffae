"""Hours that the paper's training on COCO2014 takes on 1, 4 and 8 GPUs, from measured figures.

Where no GPU was measured, its speed is computed from the operations and a share of the peak, and every row says so.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Dict, Iterator, Optional, Sequence, Tuple

from benchmarks import flops
from benchmarks.gpu_rows import GOALS
from benchmarks.row import Row
from pipeline.matching.superglue import SuperGlueConfig

# SuperGlue, appendix E: training on homographies.
ITERATIONS, BATCH, KEYPOINTS = 900_000, 24, 1024
COCO2014_IMAGES = 82_783 + 40_504
PAIRS = ITERATIONS * BATCH

GOAL_GPU = "H200"
ASSUMED_EFFICIENCY = 0.97  # of several GPUs on NVLink, computed
GOAL_CONFIG = SuperGlueConfig(dim=256, sinkhorn_iterations=100)  # the goals are stated for it
OTHERS = ("DDP", "DataParallel", "synthetic loader", "one kept batch")  # several devices, or no real loader


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run of the table found.

    modes: pairs per second of one process at N = 512, by the row's name; paper: of the GPU's rows at N = 1024;
    efficiency: of so many processes; views: per second of the keypoint stage, by the row's name.
    """

    gpu: bool
    modes: Dict[str, float]
    paper: Dict[str, float]
    efficiency: Dict[int, float]
    views: Dict[str, float]


def measured(rows: Sequence[Row], gpu: bool) -> Measured:
    """The figures the plan needs, out of the table."""

    def values(group: str, start: str, part: str = "") -> Dict[str, float]:
        own = [row for row in rows if row.group == group and row.value]
        return {row.what: row.value for row in own if row.what.startswith(start) and part in row.what}

    modes = {name: rate for name, rate in values("training", "").items() if not name.startswith(OTHERS)}
    groups = [(re.match(r"DDP, (\d+) processes", row.what), row.ratio) for row in rows]
    efficiency = {int(name[1]): ratio.value for name, ratio in groups if name and ratio}
    paper = values("gpu", "training, bfloat16, D = ", f"N = {KEYPOINTS}")
    return Measured(gpu, modes, paper, efficiency, values("keypoints", "keypoints ours"))


def at_paper_scale(found: Measured, config: SuperGlueConfig) -> Optional[Tuple[float, str]]:
    """Pairs per second at 1024 keypoints and where they come from.

    Measured there if they were for this network; else at 512 and scaled by the operations.
    """
    size = f"D = {config.dim}, T = {config.sinkhorn_iterations}, "
    for name, rate in found.paper.items():
        if size in name:
            return rate, f"measured here ({name})"
    if not found.modes:
        return None
    name, rate = max(found.modes.items(), key=lambda item: item[1])
    ratio = flops.training_flops(config, 512) / flops.training_flops(config, KEYPOINTS)
    return rate * ratio, f"by operations from {rate:.2f} at N = 512, measured here ({name.split(', N')[0]})"


def share_of(found: Measured, gpus: int) -> Tuple[float, str]:
    """Of so many times one GPU's speed, what they reach; and how that is known."""
    if not (found.gpu and found.efficiency):
        return ASSUMED_EFFICIENCY, "assumed"
    nearest = min(found.efficiency, key=lambda processes: abs(processes - gpus))
    kind = "measured" if nearest == gpus else f"carried over from {nearest}, where it was measured"
    return found.efficiency[nearest], kind


def plan(found: Measured, config: SuperGlueConfig) -> Iterator[Row]:
    """One row a machine: hours of training, and of the keypoint stage."""
    here = at_paper_scale(found, config)
    scale = f"{PAIRS / 1e6:.1f} M pairs, N = {KEYPOINTS}, D = {config.dim}"
    if here is not None and not found.gpu:
        rate, source = here
        name, note = "COCO2014 at paper scale, one process here", f"{scale}; {rate:.2f} pairs/s, {source}"
        yield Row("plan", name, PAIRS / rate / 3600, "hours", note=note)
    gpu, source = here if here is not None and found.gpu else _computed(config)
    for gpus in (1, 4, 8):
        share, kind = (1.0, "") if gpus == 1 else share_of(found, gpus)
        note = f"{scale}; {gpu * gpus * share:.0f} pairs/s, {source}"
        note += f", {share:.0%} efficiency {kind}" if kind else ""
        hours = PAIRS / (gpu * gpus * share) / 3600
        yield Row("plan", f"COCO2014 at paper scale, {gpus} GPU{'s' * (gpus > 1)}", hours, "hours", note=note)
    for name, rate in found.views.items():
        size = name.partition(", ")[2]
        what = f"keypoint stage, COCO2014, 2 views an image{', ' * bool(size)}{size}, here"
        hours = 2 * COCO2014_IMAGES / rate / 3600
        yield Row("plan", what, hours, "hours", note=f"measured {rate:.1f} views/s")


def _computed(config: SuperGlueConfig) -> Tuple[float, str]:
    """Pairs per second of one GPU that nobody has measured, at the rate of operations that is the goal."""
    goal = GOALS[KEYPOINTS] * flops.training_flops(GOAL_CONFIG, KEYPOINTS)
    peak = flops.PEAKS[GOAL_GPU]["bfloat16"]
    source = (
        f"computed, not measured: the goal of {goal / 1e12:.0f} TFLOP/s, "
        f"{goal / peak:.1%} of the {peak / 1e12:.0f} in {GOAL_GPU}'s data sheet"
    )
    return goal / flops.training_flops(config, KEYPOINTS), source
