"""Differences between the two software stacks, one function each, with the reason.

Stack "cu111": Python 3.9 + torch 1.10. Stack "modern": Python 3.11 + torch 2.x.
`superglue_sift.torch_compat` has those of the network; no other code checks versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, FrozenSet, List

import torch
from torch import Tensor

from superglue_sift.torch_compat import can_compile


def grad_scaler(enabled: bool):
    """Loss scaling for float16; moved from `torch.cuda.amp` to `torch.amp` in torch 2.3."""
    if hasattr(getattr(torch, "amp", torch), "GradScaler"):
        return torch.amp.GradScaler("cuda", enabled=enabled)
    return torch.cuda.amp.GradScaler(enabled=enabled)


def fused_adam() -> Dict[str, bool]:
    """Options of Adam for one pass over all parameters, in a quarter of the time; torch 1.10 has
    none.
    """
    return {"fused": True} if can_compile() else {}


def lerp_(values: List[Tensor], targets: List[Tensor], weight: float) -> None:
    """Interpolate each value towards its target by `weight`, in one launch; torch 1.10 needs one
    for each.
    """
    foreach = getattr(torch, "_foreach_lerp_", None)
    if foreach is not None:
        foreach(values, targets, weight)
        return
    for value, target in zip(values, targets):
        value.lerp_(target, weight)


def backend(device_type: str) -> str:
    """Backend of torch.distributed: NCCL for GPU tensors, gloo for the rest; torch 1.10 allows only
    one.
    """
    if device_type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if can_compile() else "nccl"


def cpu_flags() -> FrozenSet[str]:
    """The CPU flags of /proc/cpuinfo; none with torch 1.10, which does not use AMX."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if can_compile() and file.is_file() else ""
    return frozenset(
        next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    )


def dali_package() -> str:
    """pip requirement of NVIDIA DALI; later cuda110 packages only fetch the wheel from NVIDIA's
    index.
    """
    return "nvidia-dali-cuda130==2.4.0" if can_compile() else "nvidia-dali-cuda110==1.34.0"
