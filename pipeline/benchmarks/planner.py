"""Hours that the paper's training on COCO2014 takes on 1, 4 and 8 GPUs, from measured figures.

Where no GPU was measured, its speed is computed from the operations and a share of the peak, and every row says so.
"""

from __future__ import annotations

import dataclasses
from typing import Iterator, Optional, Sequence

from pipeline.benchmarks import flops
from pipeline.benchmarks.row import Row
from pipeline.matching.superglue import SuperGlueConfig

# SuperGlue, appendix E: training on homographies.
ITERATIONS, BATCH, KEYPOINTS = 900_000, 24, 1024
COCO2014_IMAGES = 82_783 + 40_504
PAIRS = ITERATIONS * BATCH

COMPUTED_GPU, COMPUTED_MFU = "H200", 0.17  # docs/performance.md: the goal for bfloat16
ASSUMED_EFFICIENCY = 0.97  # of several GPUs on NVLink, computed


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run of the table found. pairs_per_second: of one process at `keypoints`, with its precision's name."""

    pairs_per_second: Optional[float] = None
    keypoints: int = 512
    name: str = ""
    gpu: bool = False
    efficiency: Optional[float] = None
    views_per_second: Optional[float] = None


def measured(rows: Sequence[Row], gpu: bool) -> Measured:
    """The figures the plan needs, out of the table."""
    modes = [
        row for row in rows if row.group == "training" and row.unit == "pairs/s" and row.against == "float32"
    ]
    best = max(modes, key=lambda row: row.value or 0.0, default=None)
    group = next((row.ratio.value for row in rows if row.what.startswith("DDP") and row.ratio), None)
    views = next((row.value for row in rows if row.what == "keypoints ours"), None)
    if best is None:
        return Measured(gpu=gpu, efficiency=group, views_per_second=views)
    return Measured(best.value, 512, best.what.split(",")[0], gpu, group, views)


def at_paper_scale(found: Measured, config: SuperGlueConfig) -> Optional[float]:
    """Pairs per second at 1024 keypoints, from those at fewer by the ratio of the operations."""
    if found.pairs_per_second is None:
        return None
    ratio = flops.training_flops(config, found.keypoints) / flops.training_flops(config, KEYPOINTS)
    return found.pairs_per_second * ratio


def plan(found: Measured, config: SuperGlueConfig) -> Iterator[Row]:
    """One row a machine: hours of training, and of the keypoint stage."""
    here = at_paper_scale(found, config)
    scale = f"{PAIRS / 1e6:.1f} M pairs, N = {KEYPOINTS}, D = {config.dim}"
    if here is not None and not found.gpu:
        note = f"{scale}; {here:.2f} pairs/s from the measured {found.pairs_per_second:.2f} at N = 512 ({found.name})"
        yield Row(
            "plan", "COCO2014 at paper scale, one process here", PAIRS / here / 3600, "hours", note=note
        )
    if here is not None and found.gpu:
        gpu, source = here, f"measured here ({found.name})"
    else:
        peak = flops.PEAKS[COMPUTED_GPU]["bfloat16"]
        gpu = COMPUTED_MFU * peak / flops.training_flops(config, KEYPOINTS)
        source = f"computed, not measured: {COMPUTED_MFU:.0%} of {COMPUTED_GPU}'s bfloat16 peak"
    for gpus in (1, 4, 8):
        share = 1.0 if gpus == 1 else ASSUMED_EFFICIENCY
        kind = "assumed"
        if gpus > 1 and found.gpu and found.efficiency is not None:
            share, kind = found.efficiency, "measured"
        note = f"{scale}; {gpu * gpus * share:.0f} pairs/s, {source}"
        note += f", {share:.0%} efficiency {kind}" if gpus > 1 else ""
        hours = PAIRS / (gpu * gpus * share) / 3600
        yield Row("plan", f"COCO2014 at paper scale, {gpus} GPU{'s' * (gpus > 1)}", hours, "hours", note=note)
    if found.views_per_second:
        hours = 2 * COCO2014_IMAGES / found.views_per_second / 3600
        note = f"measured {found.views_per_second:.1f} views/s at the preset's view size"
        yield Row("plan", "keypoint stage, COCO2014, 2 views an image, here", hours, "hours", note=note)
