"""Precision of a training's layers: what `train.precision` means on this device."""

from __future__ import annotations

from typing import AbstractSet, Mapping, NamedTuple, Optional, Tuple

import torch

from pipeline import compat
from pipeline.errors import RequestError

BY_SUPPORT = ("float32", "float16", "bfloat16")  # a device supports the precisions before its own choice
AMPERE, VOLTA = (8, 0), (7, 0)  # compute capabilities from which bfloat16, float16 have matrix units
AMX, AVX512 = "amx_bf16", "avx512_bf16"  # CPU flags: products of bfloat16 in matrix units, in vector units
TIMED = ("float32", "bfloat16")  # what `step_time` measures where `Choice.undecided`
AUTO = "auto: "  # how the reason of `auto` begins
MIN_SPEEDUP = 1.1  # of bfloat16, to be chosen by time


class Choice(NamedTuple):
    """float32, bfloat16 or float16 (whose loss is scaled), and why.

    undecided: bfloat16 may be faster; only a measurement tells.
    """

    precision: str
    reason: str
    undecided: bool = False

    def __str__(self) -> str:
        return f"precision: {self.precision} ({self.reason})"


def resolve(asked: str, capability: Optional[Tuple[int, int]], cpu_flags: AbstractSet[str]) -> Choice:
    """The precision for `asked` (auto, float32, bfloat16, float16).

    Args:
        capability: compute capability of the GPU; None: no GPU.
        cpu_flags: of /proc/cpuinfo. With avx512_bf16 alone auto is undecided: bfloat16 has 0.77x the speed of float32
            for small networks, 1.4x for those of the presets (docs/performance.md).

    Raises:
        RequestError: bfloat16 on a GPU before Ampere.
    """
    undecided = False
    if capability is None:
        if asked == "float16":
            return Choice("float32", "train.precision: float16 does nothing on a CPU; set auto")
        undecided = AVX512 in cpu_flags and AMX not in cpu_flags
        fast, reason = ("bfloat16", "this CPU has AMX") if AMX in cpu_flags else ("float32", "this CPU has no AMX")
    else:
        reason = "compute capability {}.{}".format(*capability)
        if asked == "bfloat16" and capability < AMPERE:
            raise RequestError(
                f"train.precision: bfloat16 needs a GPU of compute capability 8.0 (Ampere) or newer, this one has "
                f"{reason}: set float16, or auto"
            )
        fast = "bfloat16" if capability >= AMPERE else "float16" if capability >= VOLTA else "float32"
    return Choice(fast, AUTO + reason, undecided) if asked == "auto" else Choice(asked, "as train.precision asks")


def faster(seconds: Mapping[str, float]) -> Choice:
    """The choice of `auto` for a CPU where a pair takes `seconds` in each precision of `TIMED`."""
    chosen = "bfloat16" if seconds["float32"] >= MIN_SPEEDUP * seconds["bfloat16"] else "float32"
    measured = " and ".join(f"{1000 * seconds[name]:.3g} ms in {name}" for name in TIMED)
    return Choice(chosen, f"{AUTO}a pair takes {measured}, measured here")


def resumed(asked: str, before: str, now: Choice, gpu: bool, cpu_flags: AbstractSet[str]) -> Choice:
    """The precision of a training that resumes.

    `auto` keeps on a CPU the precision that the training has, if the CPU can multiply in it: a measurement may come out
    otherwise when it is repeated, and what is fast on a GPU or on another CPU is no reason to round differently.

    Args:
        before: precision of the checkpoint.
        now: the choice for a training from scratch on this device.
    """
    able = before == "float32" or (before == "bfloat16" and not cpu_flags.isdisjoint((AMX, AVX512)))
    if asked != "auto" or before == now.precision or gpu or not able:
        return now
    return Choice(before, f"{AUTO}as before; from scratch it would be {now.precision}: {now.reason.replace(AUTO, '')}")


def on(asked: str, device: torch.device) -> Choice:
    """`resolve` for this device."""
    gpu = device.type == "cuda"
    return resolve(asked, torch.cuda.get_device_capability(device) if gpu else None, compat.cpu_flags())
