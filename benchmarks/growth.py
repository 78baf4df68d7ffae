"""How time grows with the number of keypoints and of pairs: measured slope beside the one the operations foretell."""

from __future__ import annotations

import math
from typing import Dict, Iterator, Sequence, Tuple

import numpy as np

from benchmarks import flops
from benchmarks.row import Row
from pipeline.matching.superglue import SuperGlueConfig


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Exponent p of y ~ x^p, by least squares over the logarithms."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def slopes(rows: Sequence[Row], config: SuperGlueConfig) -> Iterator[Row]:
    """From the cells of the grid: time of a batch against N at each batch, and against the batch at each N."""
    cells: Dict[Tuple[str, int, int], float] = {
        row.size: row.value * row.size[2] for row in rows if row.size and row.value is not None
    }
    for what in sorted({key[0] for key in cells}):
        own = {key[1:]: value for key, value in cells.items() if key[0] == what}
        for pairs in sorted({key[1] for key in own}):
            counts = sorted(n for n, b in own if b == pairs)
            if len(counts) > 1:
                work = [sum(flops.forward_flops(config, n).values()) for n in counts]
                yield slope_row(f"{what}: time against N, batch {pairs}", counts, [own[n, pairs] for n in counts],
                           slope(counts, work))  # fmt: skip
        for count in sorted({key[0] for key in own}):
            batches = sorted(b for n, b in own if n == count)
            if len(batches) > 1:
                yield slope_row(
                    f"{what}: time against batch, N = {count}", batches, [own[count, b] for b in batches], 1.0
                )


def slope_row(what: str, xs: Sequence[float], ys: Sequence[float], expected: float) -> Row:
    """Measured exponent of `ys` over `xs` beside the expected one."""
    over = ", ".join(str(x) for x in xs)
    if min(ys) <= 0:
        return Row("growth", what, skipped=f"too little to measure over {over}")
    found = slope(xs, ys)
    judged = "" if math.isclose(found, expected, abs_tol=0.25) else "; not as the operations foretell"
    return Row("growth", what, found, "exponent", note=f"expected {expected:.2f} over {over}{judged}")
