"""Floating-point operations of a pair, counted from the shapes, and the peak rate of a device.

A multiplication with its addition counts as two. Backward counts as twice forward. Element-wise work and the
exponentials of the softmax are left out, as is customary for model FLOP utilisation (MFU).
"""

from __future__ import annotations

import functools
import time
from typing import Dict, Optional, Tuple

import torch

from pipeline.train.step_graphs import layer_operations
from superglue_sift.network.superglue import ENCODER_WIDTHS, SIFT_DIM, SuperGlueConfig

# Dense peak in FLOP/s by a word in the device's name, from the vendors' data sheets, without sparsity.
PEAKS: Dict[str, Dict[str, float]] = {
    "H200": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "H100": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "A100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
    "L40S": {"bfloat16": 362e12, "float16": 362e12, "float32": 91.6e12},
    "V100": {"float16": 125e12, "float32": 15.7e12},
    "T4": {"float16": 65e12, "float32": 8.1e12},
}


def forward_flops(config: SuperGlueConfig, keypoints: int) -> Dict[str, float]:
    """Operations of one pair with `keypoints` in each view, by part: linear, attention, sinkhorn, rest."""
    N, D = keypoints, config.dim
    linear, attention = layer_operations(N, N, D)
    widths = [6 if config.scale_angle else 3, *ENCODER_WIDTHS, D]
    encoder = sum(a * b for a, b in zip(widths, widths[1:])) + SIFT_DIM * D
    return {
        "linear": float(config.layers * linear),
        "attention": float(config.layers * attention),
        "sinkhorn": 2.0 * 2 * config.sinkhorn_iterations * (N + 1) ** 2,
        "rest": 2.0 * (2 * N * (encoder + D * D) + N * N * D),
    }


def training_flops(config: SuperGlueConfig, keypoints: int) -> float:
    """Operations of forward and backward of one pair."""
    return 3.0 * sum(forward_flops(config, keypoints).values())


def peak(device: torch.device, precision: str) -> Tuple[Optional[float], str]:
    """FLOP/s of the device and the source of the number; None if unknown.

    For a GPU: of its data sheet, with the fraction that a product of large matrices reaches. For a CPU: the measured
    rate of a matrix product with torch's current threads.
    """
    if device.type == "cpu":
        return measured_rate(precision), "of a measured matrix product"
    name = torch.cuda.get_device_name(device)
    for word, rates in PEAKS.items():
        if word in name and precision in rates:
            reached = gpu_rate(device, precision) / rates[precision]
            sheet = f"of {rates[precision] / 1e12:.0f} TFLOP/s, data sheet of {word}"
            return rates[precision], f"{sheet}; a matrix product reaches {reached:.0%}"
    return None, f"no peak known for {name} in {precision}"


def measured_rate(precision: str = "float32", side: int = 1024, seconds: float = 0.5) -> float:
    """FLOP/s of a square matrix product, the best of those that fit into `seconds`.

    Computed from processor time and torch's threads, so that other work on the machine does not matter.
    """
    dtype = getattr(torch, precision)
    a, b = torch.randn(side, side).to(dtype), torch.randn(side, side).to(dtype)
    best = 0.0
    torch.mm(a, b)
    end = time.process_time() + seconds
    while best == 0.0 or time.process_time() < end:
        begun = time.process_time()
        torch.mm(a, b)
        best = max(best, torch.get_num_threads() * 2.0 * side**3 / (time.process_time() - begun))
    return best


@functools.lru_cache(maxsize=8)
def gpu_rate(device: torch.device, precision: str, side: int = 8192, calls: int = 20) -> float:
    """FLOP/s of a square matrix product on a GPU, by wall time."""
    a, b = (torch.randn(side, side, device=device, dtype=getattr(torch, precision)) for _ in "ab")
    out = torch.mm(a, b)
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(calls):
        torch.mm(a, b, out=out)
    torch.cuda.synchronize(device)
    return calls * 2.0 * side**3 / (time.perf_counter() - begun)
