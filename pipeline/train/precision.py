"""Precision of a training's layers: what `train.precision` means on this device."""

from __future__ import annotations

from typing import AbstractSet, NamedTuple, Optional, Tuple

import torch

from pipeline import compat
from pipeline.errors import RequestError

BY_SUPPORT = ("float32", "float16", "bfloat16")  # a device supports the precisions before its own choice
AMPERE, VOLTA = (8, 0), (7, 0)  # compute capabilities from which bfloat16, float16 have matrix units


class Choice(NamedTuple):
    """float32, bfloat16 or float16 (whose loss is scaled), and why."""

    precision: str
    reason: str

    def __str__(self) -> str:
        return f"precision: {self.precision} ({self.reason})"


def resolve(asked: str, capability: Optional[Tuple[int, int]], cpu_flags: AbstractSet[str]) -> Choice:
    """The precision for `asked` (auto, float32, bfloat16, float16).

    Args:
        capability: compute capability of the GPU; None: no GPU.
        cpu_flags: of /proc/cpuinfo. With avx512_bf16 alone auto stays float32: bfloat16 has 0.77x its speed for small
            networks, 1.4x for those of the presets (docs/performance.md).

    Raises:
        RequestError: bfloat16 on a GPU before Ampere.
    """
    if capability is None:
        if asked == "float16":
            return Choice("float32", "train.precision: float16 does nothing on a CPU; set auto")
        fast, reason = "bfloat16", "this CPU has AMX"
        if "amx_bf16" not in cpu_flags:
            fast, reason = "float32", "this CPU has no AMX"
            if "avx512_bf16" in cpu_flags:
                reason += "; train.precision: bfloat16 trains large networks 1.4x as fast, small ones 0.8x"
    else:
        reason = "compute capability {}.{}".format(*capability)
        if asked == "bfloat16" and capability < AMPERE:
            raise RequestError(
                f"train.precision: bfloat16 needs a GPU of compute capability 8.0 (Ampere) or newer, this one has "
                f"{reason}: set float16, or auto"
            )
        fast = "bfloat16" if capability >= AMPERE else "float16" if capability >= VOLTA else "float32"
    return Choice(fast, f"auto: {reason}") if asked == "auto" else Choice(asked, "as train.precision asks")


def on(asked: str, device: torch.device) -> Choice:
    """`resolve` for this device."""
    gpu = device.type == "cuda"
    return resolve(asked, torch.cuda.get_device_capability(device) if gpu else None, compat.cpu_flags())
