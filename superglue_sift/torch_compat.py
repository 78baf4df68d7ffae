"""Differences between versions of torch, one function each, with the reason beside it: from torch 1.10 to 2.x.

Nothing else in the library asks for a version.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Optional

import torch
from torch import Tensor, nn


def without_cudnn() -> ContextManager[Any]:
    """cuDNN makes a plan for each new shape, 70 ms of a core on an H100; the other kernels need none."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:  # torch 2.2 or older, which has none
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def has_fused_attention() -> bool:
    """Is there a kernel that never holds the weights of a whole batch (torch 2.0)?"""
    return hasattr(torch.nn.functional, "scaled_dot_product_attention")


def has_packed_attention(q: Tensor) -> bool:
    """Is there a fused kernel for packed sequences of any lengths (torch 2.10, Ampere or newer, half precision)?"""
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.dtype in (torch.float16, torch.bfloat16)
    return fits and q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0) and _varlen() is not None


def _varlen() -> Optional[Callable[..., Any]]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def packed_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, partner_starts: Tensor, longest: int) -> Tensor:
    """Attention of packed sequences q (S, H, d), k and v (S', H, d), where `has_packed_attention`.

    starts, partner_starts: (B + 1,) int32, where each sequence begins. longest: no sequence is longer.
    """
    varlen = _varlen()
    assert varlen is not None
    return varlen(q, k, v, starts, partner_starts, longest, longest)


def has_byte_products() -> bool:
    """Does the CPU multiply int8 matrices faster than float32 ones, and torch let it (2.4; AVX-512 with VNNI)?"""
    supported = getattr(getattr(torch, "cpu", None), "_is_vnni_supported", None)
    return hasattr(torch, "_int_mm") and supported is not None and bool(supported())


def byte_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a (n, d) int8 times b (d, m) int8 into `out` (n, m) int32, where `has_byte_products`."""
    return torch._int_mm(a, b, out=out)  # pyright: ignore


def softmax_(logits: Tensor) -> None:
    """Softmax over the last axis, in place; torch 1.10 has no `out=`."""
    if has_fused_attention():
        torch.softmax(logits, -1, out=logits)
    else:
        logits.copy_(logits.softmax(-1))


def softmax_gradient_(grad: Tensor, weights: Tensor) -> None:
    """Gradient of what `weights` = softmax(., -1) was taken of, in place of `grad`, that of the weights.

    torch 1.10 wants to see a tensor of the input's element type, later versions name the type.
    """
    if has_fused_attention():
        torch._softmax_backward_data(grad, weights, -1, weights.dtype, grad_input=grad)  # pyright: ignore
    else:
        grad.copy_(torch._softmax_backward_data(grad, weights, -1, weights))  # pyright: ignore


def exact_float32() -> None:
    """Products of float32 in float32, not TF32: scores reach 40, where TF32 errs by 0.02. Later versions begin so."""
    torch.backends.cuda.matmul.allow_tf32 = False


def no_autocast(device_type: str):
    """A context in which nothing is cast down; torch 1.10's for the CPU accepts bfloat16 alone and needs its name."""
    if device_type == "cpu":
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=False)
    return torch.autocast(device_type, enabled=False)


def autocast(device_type: str, precision: str):
    """Mixed precision for `precision` in float32 (nothing happens), bfloat16, float16."""
    mixed = precision != "float32"
    return torch.autocast(device_type, dtype=getattr(torch, precision)) if mixed else contextlib.nullcontext()


def cast_as_autocast(x: Tensor) -> Tensor:
    """`x` as autocast would hand it to a product; torch 1.10 has a function of its own for each device."""
    kind = x.device.type
    if can_compile():
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
    if kind == "cpu":
        return x.to(torch.get_autocast_cpu_dtype()) if torch.is_autocast_cpu_enabled() else x
    return x.to(torch.get_autocast_gpu_dtype()) if torch.is_autocast_enabled() else x


class _WideLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def layer_norm(channels: int) -> nn.LayerNorm:
    """LayerNorm of (..., channels), also under `autocast`.

    torch 1.10 takes no bfloat16 beside float32 weights on the CPU: there it is computed and handed on in float32.
    """
    return nn.LayerNorm(channels) if can_compile() else _WideLayerNorm(channels)


def can_compile() -> bool:
    """Does this torch have a compiler that works on a module in place? torch 1.10 has none."""
    return hasattr(torch.nn.Module, "compile")


def can_export() -> bool:
    """Can this torch export a network whose shapes change? From 2.5 on."""
    return hasattr(getattr(getattr(torch, "export", None), "Dim", None), "AUTO")


def floats_of_bytes(data: Tensor) -> Tensor:
    """uint8 (..., 4 k) read as little-endian float32 (..., k); torch 1.10's `view` cannot change an element's size."""
    return data.view(torch.float32) if hasattr(torch.Tensor, "untyped_storage") else join_bytes(data)


def join_bytes(data: Tensor) -> Tensor:
    """`floats_of_bytes` by integer arithmetic."""
    parts = data.reshape(*data.shape[:-1], data.shape[-1] // 4, 4).to(torch.int32)
    words = parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16) | (parts[..., 3] << 24)
    return words.view(torch.float32)


def recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """`function(*arguments)` with gradient checkpointing; torch 1.10 has only the reentrant form."""
    from torch.utils.checkpoint import checkpoint

    if can_compile():
        return checkpoint(function, *arguments, use_reentrant=False)
    return checkpoint(function, *arguments)
