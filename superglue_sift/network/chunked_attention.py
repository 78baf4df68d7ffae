"""Attention for torch without a fused kernel: in chunks of queries, with weights recomputed in the backward pass.

The plain formula keeps H N^2 weights per sequence and layer for the gradient: 36 GiB for 64 pairs with 1,024 keypoints,
9 layers and 4 heads in float32. Here only queries, keys and values are kept.
"""

from __future__ import annotations

import contextlib
import math
from typing import Iterator, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from superglue_sift.torch_compat import has_fused_attention, no_autocast, without_cudnn

MAX_WEIGHTS = 1 << 26  # per chunk of queries, over all sequences and heads: 256 MiB in float32


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None) -> Tensor:
    """`attention` with torch's fused kernel if available (2.0)."""
    if has_fused_attention():
        with without_cudnn() if q.is_cuda else contextlib.nullcontext():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return attention(q, k, v, mask)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of q (..., M, d), k and v (..., N, d).

    mask: broadcast to (..., 1, N), True for visible keys; the same for every query.
    """
    return _Chunked.apply(q, k, v, mask)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        out = torch.empty_like(q)
        with no_autocast(q.device.type):  # autocast already chose the dtype
            for part, weights in _weights(q, k, mask):
                out[..., part, :] = weights @ v
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        q, k, v, mask = ctx.saved_tensors
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        with no_autocast(q.device.type):  # autocast already chose the dtype
            for part, weights in _weights(q, k, mask):
                d_out = grad[..., part, :]
                d_v += weights.transpose(-1, -2) @ d_out
                d_weights = (d_out @ v.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
                wide = weights.to(d_weights.dtype)
                d_logits = (wide * (d_weights - (wide * d_weights).sum(-1, keepdim=True))).to(q.dtype)
                d_q[..., part, :] = d_logits @ k / math.sqrt(q.shape[-1])
                d_k += d_logits.transpose(-1, -2) @ q[..., part, :] / math.sqrt(q.shape[-1])
        return d_q, d_k, d_v, None


def _weights(q: Tensor, k: Tensor, mask: Optional[Tensor]) -> Iterator[Tuple[slice, Tensor]]:
    """Chunks of queries with their weights (..., m, N) in the dtype of `q`; softmax in float32 or wider."""
    M, N = q.shape[-2], k.shape[-2]
    chunk = max(MAX_WEIGHTS // max(math.prod(q.shape[:-2]) * N, 1), 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    for start in range(0, M, chunk):
        part = slice(start, start + chunk)
        logits = (q[..., part, :] @ k.transpose(-1, -2)).to(wide) / math.sqrt(q.shape[-1])
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        yield part, logits.softmax(-1).to(q.dtype)
