"""Differences between the two software stacks, one function each, with the reason beside it.

Stack "cu111": Python 3.9 + torch 1.10. Stack "modern": Python 3.11 + torch 2.x. What the network needs of torch
stands in `superglue_sift.torch_compat`; nothing else in the project asks for a version.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any, Dict, FrozenSet, List

import torch
from torch import Tensor, nn

from pipeline.errors import RequestError
from superglue_sift.torch_compat import can_compile


def grad_scaler(enabled: bool):
    """Loss scaling for float16; moved from `torch.cuda.amp` to `torch.amp` in torch 2.3."""
    if hasattr(torch.amp if hasattr(torch, "amp") else torch, "GradScaler"):
        return torch.amp.GradScaler("cuda", enabled=enabled)
    return torch.cuda.amp.GradScaler(enabled=enabled)


def fused_adam() -> Dict[str, bool]:
    """Options of Adam for one pass over all parameters, a quarter of the time; torch 1.10 has no such form."""
    return {"fused": True} if can_compile() else {}


def lerp_(values: List[Tensor], targets: List[Tensor], weight: float) -> None:
    """Move each towards its target by this share, on a GPU in one launch; torch 1.10 has one for each alone."""
    together = getattr(torch, "_foreach_lerp_", None)
    if together is not None:
        together(values, targets, weight)
        return
    for value, target in zip(values, targets):
        value.lerp_(target, weight)


def clip_grad_norm_(parameters: List[nn.Parameter], most: float) -> Tensor:
    """torch's function of this name, whose bits these are, by a few launches on a GPU; 1.10's takes some for each."""
    norms_of, multiply = (getattr(torch, name, None) for name in ("_foreach_norm", "_foreach_mul_"))
    gradients = [p.grad for p in parameters if p.grad is not None]
    # the versions between have both, and none that multiplies by a tensor
    if norms_of is None or multiply is None or not (can_compile() and gradients):
        return nn.utils.clip_grad_norm_(parameters, most)
    norm = torch.stack(norms_of(gradients)).norm()
    if most < math.inf:
        scale: Any = (most / (norm + 1e-6)).clamp(max=1.0)
        multiply(gradients, scale)
    return norm


def backend(device_type: str) -> str:
    """Of torch.distributed: gloo beside NCCL, for all but tensors of a GPU, where a group may have both (torch 2)."""
    if device_type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if can_compile() else "nccl"


def cpu_flags() -> FrozenSet[str]:
    """The processor's abilities, by their names in /proc/cpuinfo, that this torch uses: 1.10 leaves AMX alone."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if can_compile() and file.is_file() else ""
    return frozenset(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


def no_compiler(device_type: str) -> str:
    """Why `torch.compile` cannot run here; empty where it can: torch 2 needs a C++ compiler, on a GPU a C one."""
    if not can_compile():
        return "this torch has no compiler"
    names = ("cc", "gcc", "clang") if device_type == "cuda" else ("g++", "clang++")
    asked = os.environ.get("CC" if device_type == "cuda" else "CXX", names[0])
    if any(shutil.which(name) for name in (asked, *names)):
        return ""
    return f"there is no C{'' if device_type == 'cuda' else '++'} compiler ({' or '.join(names[-2:])})"


def torchvision_io(asked: str, instead: str) -> Any:
    """torchvision's decoders of images. Raises RequestError where torchvision or its decoders are missing.

    Its file for CUDA does not load beside a torch for the CPU. Whether it did shows when a decoder is asked for: of a
    missing one torch 1.10 says RuntimeError, torch 2 AttributeError.
    """
    key = asked.split(" ")[0]
    try:
        from torchvision import io

        assert torch.ops.image.decode_jpeg
    except (ImportError, RuntimeError, AttributeError):
        raise RequestError(
            f"{asked}: torchvision is not installed, or is one for another torch than {torch.__version__}, and cannot "
            f"decode; install the one made for this torch, or set {key}: {instead}"
        ) from None
    return io


def dali_package() -> str:
    """NVIDIA DALI's pip requirement: later cuda110 packages are stubs that fetch the wheel from NVIDIA's own index."""
    return "nvidia-dali-cuda130==2.4.0" if can_compile() else "nvidia-dali-cuda110==1.34.0"


def without_dali(asked: str, instead: str) -> RequestError:
    """The error of a request for DALI where it is not installed."""
    fix = f"`pip install {dali_package()}`, or {instead}"
    return RequestError(f"{asked}: NVIDIA DALI is not installed; {fix}")
