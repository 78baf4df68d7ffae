"""Differences between torch 1.10 and 2.x, one function each. The rest of the library does not depend on the version."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Optional

import torch
from torch import Tensor, nn


def without_cudnn() -> ContextManager[Any]:
    """A context without cuDNN, which plans for each new shape: 70 ms of a core on an H100."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:  # torch 2.2 or older
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def has_fused_attention() -> bool:
    """Whether there is a fused attention kernel (torch 2.0)."""
    return hasattr(torch.nn.functional, "scaled_dot_product_attention")


def has_packed_attention(q: Tensor) -> bool:
    """Whether there is a fused kernel for packed sequences of any length (torch 2.10, Ampere, half precision)."""
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.dtype in (torch.float16, torch.bfloat16)
    return fits and q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0) and _varlen() is not None


def _varlen() -> Optional[Callable[..., Any]]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def packed_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, partner_starts: Tensor, longest: int) -> Tensor:
    """Attention of packed sequences q (S, H, d), k and v (S', H, d). Needs `has_packed_attention`.

    starts, partner_starts: (B + 1,) int32, the start of each sequence. longest: length of the longest sequence.
    """
    varlen = _varlen()
    assert varlen is not None
    return varlen(q, k, v, starts, partner_starts, longest, longest)


def has_byte_products() -> bool:
    """Whether products of int8 are faster than those of float32 (torch 2.4; AVX-512 with VNNI)."""
    supported = getattr(getattr(torch, "cpu", None), "_is_vnni_supported", None)
    return hasattr(torch, "_int_mm") and supported is not None and bool(supported())


def byte_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a (n, d) int8 times b (d, m) int8 into `out` (n, m) int32. Needs `has_byte_products`."""
    return torch._int_mm(a, b, out=out)  # pyright: ignore


def softmax_(logits: Tensor) -> None:
    """Softmax over the last axis, in place; torch 1.10 lacks `out=`."""
    if has_fused_attention():
        torch.softmax(logits, -1, out=logits)
    else:
        logits.copy_(logits.softmax(-1))


def softmax_gradient_(grad: Tensor, weights: Tensor) -> None:
    """Overwrite `grad`, the gradient of `weights` = softmax(logits, -1), with that of the logits.

    torch 1.10 takes a tensor of the input's dtype, later versions the dtype.
    """
    if has_fused_attention():
        torch._softmax_backward_data(grad, weights, -1, weights.dtype, grad_input=grad)  # pyright: ignore
    else:
        grad.copy_(torch._softmax_backward_data(grad, weights, -1, weights))  # pyright: ignore


def exact_float32() -> None:
    """Disable TF32, the default of torch 1.10: scores reach 40, where TF32 has errors of 0.02."""
    torch.backends.cuda.matmul.allow_tf32 = False


def no_autocast(device_type: str):
    """A context without autocast; on the CPU, torch 1.10 accepts only an explicit bfloat16."""
    if device_type == "cpu":
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=False)
    return torch.autocast(device_type, enabled=False)


def autocast(device_type: str, precision: str):
    """Autocast to `precision`: float32 (no effect), bfloat16 or float16."""
    mixed = precision != "float32"
    return torch.autocast(device_type, dtype=getattr(torch, precision)) if mixed else contextlib.nullcontext()


def cast_as_autocast(x: Tensor) -> Tensor:
    """Cast `x` as autocast casts inputs of products; torch 1.10 has a separate function for each device."""
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
    """LayerNorm of (..., channels), also under `autocast`: torch 1.10 on the CPU cannot mix bfloat16 and float32."""
    return nn.LayerNorm(channels) if can_compile() else _WideLayerNorm(channels)


def can_compile() -> bool:
    """Whether torch can compile a module in place (2.x)."""
    return hasattr(torch.nn.Module, "compile")


def can_export() -> bool:
    """Whether torch can export a network with dynamic shapes (2.5)."""
    return hasattr(getattr(getattr(torch, "export", None), "Dim", None), "AUTO")


def floats_of_bytes(data: Tensor) -> Tensor:
    """View uint8 (..., 4 k) as little-endian float32 (..., k); torch 1.10's `view` cannot change the element size."""
    return data.view(torch.float32) if hasattr(torch.Tensor, "untyped_storage") else join_bytes(data)


def join_bytes(data: Tensor) -> Tensor:
    """`floats_of_bytes` with integer arithmetic."""
    parts = data.reshape(*data.shape[:-1], data.shape[-1] // 4, 4).to(torch.int32)
    words = parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16) | (parts[..., 3] << 24)
    return words.view(torch.float32)


def recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call `function(*arguments)` with gradient checkpointing; torch 1.10 has only the reentrant form.

    Without the state of random generators, of which the network uses none: a CUDA graph cannot read it.
    """
    from torch.utils.checkpoint import checkpoint

    if can_compile():
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return checkpoint(function, *arguments, preserve_rng_state=False)
