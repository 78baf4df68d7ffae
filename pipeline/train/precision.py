"""Precision of a training's layers: what `train.precision` means on this device."""

from __future__ import annotations

from typing import AbstractSet, NamedTuple, Optional, Tuple

import torch

from pipeline import compat
from pipeline.errors import RequestError

# A device supports the precisions before its own choice
BY_SUPPORT = ("float32", "float16", "bfloat16")
# compute capabilities from which bfloat16, float16 have matrix units
AMPERE = (8, 0)
VOLTA = (7, 0)
# CPU flags: products of bfloat16 in matrix units, in vector units
AMX = "amx_bf16"
AVX512 = "avx512_bf16"
AUTO = "auto: "  # how the reason of `auto` begins
PORTABLE = "portable"


class Choice(NamedTuple):
    """float32, bfloat16 or float16 (whose loss is scaled), and why."""

    precision: str
    reason: str

    def __str__(self) -> str:
        return f"precision: {self.precision} ({self.reason})"


def resolve(
    asked: str, capability: Optional[Tuple[int, int]], cpu_flags: AbstractSet[str]
) -> Choice:
    """The precision for `asked` (auto, portable, float32, bfloat16, float16).

    Args:
        capability: compute capability of the GPU; None: no GPU.
        cpu_flags: of /proc/cpuinfo.

    Raises:
        RequestError: bfloat16 on a GPU before Ampere.
    """
    if asked == PORTABLE:
        same = "x86-64 processor with AVX2" if capability is None else "GPU of this kind"
        return Choice("float32", f"portable: the same bytes on every {same}")
    if capability is None:
        if asked == "float16":
            return Choice("float32", "train.precision: float16 does nothing on a CPU; set auto")
        # AMX multiplies bfloat16 faster. Vector units (AVX512) do so on some processors and take
        # 1.5 times as long on others (docs/performance.md). A rule and no measurement at the start:
        # on a busy machine that comes out differently each time, and then so do the weights.
        amx = AMX in cpu_flags
        fast = "bfloat16" if amx else "float32"
        reason = "this CPU has AMX" if amx else "this CPU, or this torch, has no AMX"
    else:
        reason = "compute capability {}.{}".format(*capability)
        if asked == "bfloat16" and capability < AMPERE:
            raise RequestError(
                "train.precision: bfloat16 needs a GPU of compute capability 8.0 (Ampere) or"
                f" newer, this one has {reason}: set float16, or auto"
            )
        fast = (
            "bfloat16" if capability >= AMPERE else "float16" if capability >= VOLTA else "float32"
        )
    return (
        Choice(fast, AUTO + reason) if asked == "auto" else Choice(asked, "as train.precision asks")
    )


def resume(asked: str, before: str, now: Choice, gpu: bool, cpu_flags: AbstractSet[str]) -> Choice:
    """The precision of a training that resumes.

    `auto` keeps on a CPU the precision that the training has, if the CPU can multiply in it: what
    is fast on a GPU or on another CPU is no reason to round differently.

    Args:
        before: precision of the checkpoint.
        now: the choice for a training from scratch on this device.
    """
    able = before == "float32" or (before == "bfloat16" and not cpu_flags.isdisjoint((AMX, AVX512)))
    if asked != "auto" or before == now.precision or gpu or not able:
        return now
    return Choice(
        before,
        f"{AUTO}as before; from scratch it would be {now.precision}:"
        f" {now.reason.replace(AUTO, '')}",
    )


def on(asked: str, device: torch.device) -> Choice:
    """`resolve` for this device."""
    gpu = device.type == "cuda"
    return resolve(
        asked, torch.cuda.get_device_capability(device) if gpu else None, compat.cpu_flags()
    )
