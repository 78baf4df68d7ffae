"""Differences between the two software stacks, one function each, with the reason.

Stack "cu111" is Python 3.9 with torch 1.10. Stack "modern" is Python 3.11 with torch 2.x. The
differences of the network are in `superglue_sift.torch_compat`. No other code checks versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List

import torch
from torch import Tensor

from superglue_sift.torch_compat import can_compile


def grad_scaler(enabled: bool):
    """Return the scaler of the loss for float16. It moved to `torch.amp` in torch 2.3."""
    # torch 1.10 has no `torch.amp`
    if hasattr(getattr(torch, "amp", torch), "GradScaler"):
        return torch.amp.GradScaler("cuda", enabled=enabled)
    return torch.cuda.amp.GradScaler(enabled=enabled)


def fused_adam() -> Dict[str, bool]:
    """Return the options of Adam for one pass over all parameters, which takes a quarter of the
    time.

    torch 1.10 has no such option.
    """
    return {"fused": True} if can_compile() else {}


def lerp_(values: List[Tensor], targets: List[Tensor], weight: float) -> None:
    """Interpolate each value towards its target by `weight`, in place, in one launch.

    torch 1.10 needs one launch for each value.
    """
    foreach = getattr(torch, "_foreach_lerp_", None)
    if foreach is not None:
        foreach(values, targets, weight)
        return
    for value, target in zip(values, targets):
        value.lerp_(target, weight)


def backend(device_type: str) -> str:
    """Return the backend of torch.distributed: NCCL for GPU tensors, gloo for the rest.

    torch 1.10 allows only one backend.
    """
    if device_type != "cuda":
        return "gloo"
    # torch 2: one backend for each kind of tensor
    return "cpu:gloo,cuda:nccl" if can_compile() else "nccl"


def has_amx() -> bool:
    """Return whether this CPU has matrix units for bfloat16. torch 1.10 does not use them."""
    file = Path("/proc/cpuinfo")
    return can_compile() and file.is_file() and "amx_bf16" in file.read_text()


def dali_package() -> str:
    """Return the pip requirement of NVIDIA DALI.

    Later cuda110 packages only fetch the wheel from NVIDIA's index.
    """
    return "nvidia-dali-cuda130==2.4.0" if can_compile() else "nvidia-dali-cuda110==1.34.0"
