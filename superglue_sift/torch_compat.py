"""Differences between torch 1.10 and 2.x, one function each. The rest of the library does not
depend on the version.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from typing import Any, Callable, ContextManager, Dict, Optional

import torch
from torch import Tensor, nn

MAX_WEIGHTS = 1 << 26  # of attention at a time, in torch 1.10: 256 MiB in float32


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Optional[Tensor] = None
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of q (B, H, M, d), k and v (B, H, N, d), without storing the
    weights.

    visible: (B, 1, 1, N) bool, True for keys to attend to; None: all. torch 1.10 has no kernel for
    it: there chunks of queries are computed one by one, and again for the gradient.
    """
    kernel = getattr(torch.nn.functional, "scaled_dot_product_attention", None)
    if kernel is not None:
        if visible is not None and is_traced():
            # what the kernel does; for a bool mask ONNX also tests all weights for nan, which takes
            # half of the time of a pair
            visible = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -math.inf)
        with _without_cudnn() if q.is_cuda else contextlib.nullcontext():
            return kernel(q, k, v, attn_mask=visible)
    rows = max(MAX_WEIGHTS // max(q.shape[0] * q.shape[1] * k.shape[2], 1), 1)
    learns = torch.is_grad_enabled()
    parts = [checkpoint(learns, plain_attention, part, k, v, visible) for part in q.split(rows, 2)]
    return torch.cat(parts, 2)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, visible: Optional[Tensor]) -> Tensor:
    """`scaled_dot_product_attention` with plain products; softmax in float32 or wider."""
    logits = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(
        q.shape[-1]
    )
    if visible is not None:
        logits = logits.masked_fill(~visible, -math.inf)
    return logits.softmax(-1).to(q.dtype) @ v


def _without_cudnn() -> ContextManager[Any]:
    """A context without cuDNN, which plans for each new shape: 70 ms of a core on an H100."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:  # torch 2.2 or older
        return contextlib.nullcontext()
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


def exact_float32() -> None:
    """Disable TF32, the default of torch 1.10: scores reach 40, where TF32 has errors of 0.02."""
    torch.backends.cuda.matmul.allow_tf32 = False


def no_autocast(device_type: str) -> ContextManager[Any]:
    """A context without autocast; on the CPU, torch 1.10 accepts only an explicit bfloat16."""
    if _autocast_dtype(device_type) is None:
        return contextlib.nullcontext()
    if device_type == "cpu":
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=False)
    return torch.autocast(device_type, enabled=False)


def autocast(device_type: str, precision: str):
    """Autocast to `precision`: float32 (no effect), bfloat16 or float16."""
    mixed = precision != "float32"
    return (
        torch.autocast(device_type, dtype=getattr(torch, precision))
        if mixed
        else contextlib.nullcontext()
    )


def cast_as_autocast(x: Tensor) -> Tensor:
    """Cast `x` as autocast casts inputs of products."""
    dtype = _autocast_dtype(x.device.type)
    return x if dtype is None else x.to(dtype)


def _autocast_dtype(kind: str) -> Optional[torch.dtype]:
    """The dtype of autocast, None without; torch 1.10 has separate functions for each device, and
    `meta` has none.
    """
    if kind == "meta":
        return None
    if can_compile():
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


class _WideLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def layer_norm(channels: int) -> nn.LayerNorm:
    """LayerNorm of (..., channels), also under `autocast`: torch 1.10 on the CPU cannot mix
    bfloat16 and float32.
    """
    return nn.LayerNorm(channels) if can_compile() else _WideLayerNorm(channels)


def can_compile() -> bool:
    """Whether torch can compile a module in place (2.x)."""
    return hasattr(torch.nn.Module, "compile")


def no_compiler(device_type: str) -> str:
    """Why `torch.compile` cannot run here; "" if it can. torch 2 needs a C++ compiler, on a GPU a C
    compiler.
    """
    if not can_compile():
        return "this torch has no compiler"
    names = ("cc", "gcc", "clang") if device_type == "cuda" else ("g++", "clang++")
    asked = os.environ.get("CC" if device_type == "cuda" else "CXX", names[0])
    if any(shutil.which(name) for name in (asked, *names)):
        return ""
    return (
        f"there is no C{'' if device_type == 'cuda' else '++'} compiler ({' or '.join(names[-2:])})"
    )


def is_traced() -> bool:
    """Whether `torch.compile` or `torch.export` reads the code (torch 2.1)."""
    compiler: Any = getattr(torch, "compiler", None)
    return hasattr(compiler, "is_compiling") and compiler.is_compiling()


def can_export() -> bool:
    """Whether torch can export a network with dynamic shapes (2.5)."""
    return hasattr(getattr(getattr(torch, "export", None), "Dim", None), "AUTO")


def floats_of_bytes(data: Tensor) -> Tensor:
    """View uint8 (..., 4 k) as little-endian float32 (..., k); torch 1.10's `view` cannot change
    the element size.
    """
    return (
        data.view(torch.float32) if hasattr(torch.Tensor, "untyped_storage") else join_bytes(data)
    )


def join_bytes(data: Tensor) -> Tensor:
    """`floats_of_bytes` with integer arithmetic."""
    parts = data.reshape(*data.shape[:-1], data.shape[-1] // 4, 4).to(torch.int32)
    words = parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16) | (parts[..., 3] << 24)
    return words.view(torch.float32)


def checkpoint(recompute: bool, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call `function(*arguments)`; `recompute`: with gradient checkpointing.

    torch 1.10 has only its reentrant form. Without the state of random generators, of which the
    network uses none: a CUDA graph cannot read it.
    """
    from torch.utils import checkpoint as torch_checkpoint

    if not recompute:
        return function(*arguments)
    how: Dict[str, Any] = {"use_reentrant": False} if can_compile() else {}
    return torch_checkpoint.checkpoint(function, *arguments, preserve_rng_state=False, **how)
