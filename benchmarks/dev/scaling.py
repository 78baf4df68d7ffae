"""What 1 to 64 GPUs would do, computed from measured parts: `python -m benchmarks.dev.scaling`. Nothing is run.

A step takes the longer of its kernels and the host that launches them, plus the part of the gradient's exchange that
the backward pass does not hide. Measured on an H100 (docs/performance.md): kernels and host of a step of 128 pairs, D =
128, ragged up to 1,024 keypoints. The host's time does not depend on the pairs. The exchange is NCCL's ring: 2 (n - 1)
/ n of the bytes by each GPU, at published rates, and a latency a bucket. Between nodes it is the rate of the GPU's part
of the node's adapters. Half of the gradient, that of the stacked weights, is ready only at the end of the backward
pass.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple, Optional, Sequence

from pipeline import errors
from pipeline.errors import RequestError
from pipeline.processes.distributed import BUCKET_MB
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

KERNELS_MS, HOST_MS, PAIRS = 61.0, 190.0, 128  # of a step, measured
LAUNCHES_BEFORE, LAUNCHES = (
    5926,
    1925,
)  # of a ragged step, `python -m benchmarks.dev.launches`, when that was measured and now
BACKWARD = 2 / 3  # of the kernels' time
EARLY = 0.5  # fraction of the gradient's bytes that are ready before the end of the backward pass
GPUS_OF_A_NODE = 8
# NVLink 4: 370 GB/s without NVLink SHARP (NVIDIA/nccl-tests issue 212, a maintainer). An adapter of 400 Gb/s: 41 GB/s
# and 50 us, of the times of 4 to 32 MiB there (issue 232; 46 to 48 of large messages, issue 290).
IN_NODE_GB_S, IN_NODE_US = 370.0, 20.0
ADAPTER_GB_S, ADAPTER_US = 41.0, 50.0
ENOUGH = 0.9  # of the pairs/s of as many GPUs alone


class Model(NamedTuple):
    """ms_a_pair, host_ms: of a step; bytes: of the gradient; adapters: of 400 Gb/s a node."""

    ms_a_pair: float
    host_ms: float
    bytes: float
    adapters: int

    def exchange_ms(self, gpus: int) -> float:
        """Exchange of the whole gradient if nothing hid it."""
        if gpus == 1:
            return 0.0
        buckets = max(1.0, self.bytes / (BUCKET_MB << 20))
        several = gpus > GPUS_OF_A_NODE
        rate = min(IN_NODE_GB_S, ADAPTER_GB_S * self.adapters) if several else IN_NODE_GB_S
        latency = IN_NODE_US + ADAPTER_US * several
        return 1e3 * 2 * (gpus - 1) / gpus * self.bytes / (1e9 * rate) + 1e-3 * buckets * latency

    def step_ms(self, gpus: int, pairs: float) -> float:
        """A step of `pairs` pairs on each GPU."""
        work = max(self.ms_a_pair * pairs, self.host_ms)
        exchange = self.exchange_ms(gpus)
        hidden = min(EARLY * exchange, BACKWARD * work)
        return work + exchange - hidden

    def rate(self, gpus: int, pairs: float) -> float:
        """Pairs/s of all GPUs."""
        return 1e3 * gpus * pairs / self.step_ms(gpus, pairs)

    def efficiency(self, gpus: int, pairs: float) -> float:
        """Fraction of the rate that as many GPUs would reach if their kernels ran back to back."""
        return self.rate(gpus, pairs) * self.ms_a_pair / (1e3 * gpus)

    def least_pairs(self, gpus: int) -> int:
        """Pairs on each GPU from which the efficiency is `ENOUGH`; with fewer, more GPUs help little."""
        low, high = 1, 1
        while self.efficiency(gpus, high) < ENOUGH:
            low, high = high, 2 * high
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.efficiency(gpus, middle) >= ENOUGH else (middle + 1, high)
        return high


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.scaling", description=str(__doc__).splitlines()[0])
    parser.add_argument("--host-ms", type=float, help="of a step; default: as measured, and by the launches now")
    parser.add_argument("--ms-a-pair", type=float, default=KERNELS_MS / PAIRS, help="of kernels")
    parser.add_argument("--dim", type=int, default=128, help="D, for the bytes of the gradient")
    parser.add_argument("--adapters", type=int, default=8, help="of 400 Gb/s a node")
    parser.add_argument("--batch", type=int, default=512, help="pairs of a step that all GPUs share")
    options = parser.parse_args(argv)
    if min(options.ms_a_pair, options.adapters, options.batch) <= 0 or (options.host_ms or 0) < 0:
        raise RequestError("--ms-a-pair, --adapters and --batch must be above 0, --host-ms 0 or more")
    if options.dim % 4 or options.dim < 4:
        raise RequestError("--dim must be a multiple of 4")
    numbers = sum(p.numel() for p in SuperGlue(SuperGlueConfig(dim=options.dim, neighbours=True)).parameters())
    hosts = [HOST_MS, HOST_MS * LAUNCHES / LAUNCHES_BEFORE] if options.host_ms is None else [options.host_ms]
    for host_ms in hosts:
        model = Model(options.ms_a_pair, host_ms, 4.0 * numbers, options.adapters)
        print(
            f"host {host_ms:.0f} ms a step, kernels {model.ms_a_pair:.3f} ms a pair, gradient {4e-6 * numbers:.1f} MB"
        )
        print(f"| GPUs | exchange, ms | pairs/s, {PAIRS} a GPU | efficiency | pairs a GPU for {ENOUGH:.0%} | "
              f"pairs/s, {options.batch} in all |\n|---|---|---|---|---|---|")  # fmt: skip
        for gpus in (1, 2, 4, 8, 16, 32, 64):
            shared = f"{model.rate(gpus, options.batch / gpus):,.0f}"
            cells = (gpus, f"{model.exchange_ms(gpus):.2f}", f"{model.rate(gpus, PAIRS):,.0f}",
                     f"{model.efficiency(gpus, PAIRS):.0%}", model.least_pairs(gpus), shared)  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |")
        print()
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
