"""Multi-head attention between ragged sets of keypoints (SuperGlue, section 3.1, equations 3 to 5).

Tokens of all images of a batch lie packed one after another, (S, D) with S the sum of the counts, so that
linear layers and norms never see padding. Only attention itself needs to know where an image begins.
"""

from __future__ import annotations

import math
from typing import List

import torch
from torch import Tensor, nn

from pipeline.stack import no_autocast, scaled_dot_product_attention


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, counts: List[int], partner: List[int]) -> Tensor:
    """Attention of each sequence to its partner sequence, exact: no token of another image has any weight.

    Args:
        q, k, v: (S, H, d) packed tokens of H heads.
        counts: tokens of each sequence, sum S.
        partner: for each sequence the index of the one it attends to (itself in self-attention).

    Returns:
        (S, H, d). A sequence whose partner is empty receives zeros.
    """
    if q.device.type == "cpu":
        return _one_by_one(q, k, v, counts, partner)
    return _padded(q, k, v, counts, partner)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, counts: List[int], partner: List[int]) -> Tensor:
    """One unpadded call a sequence: no mask, no wasted work; launches cost nothing on a CPU."""
    queries, keys, values = (t.split(counts) for t in (q, k, v))
    learns = torch.is_grad_enabled() and q.requires_grad
    attend = _WithOwnGradient.apply if learns and q.dtype == torch.bfloat16 else scaled_dot_product_attention
    messages = []
    for i, j in enumerate(partner):
        if counts[i] == 0 or counts[j] == 0:
            messages.append(torch.zeros_like(queries[i]))
            continue
        # (1, H, n, d) without a copy; what comes back lies as (n, H, d) in memory
        heads = (t.transpose(0, 1).unsqueeze(0) for t in (queries[i], keys[j], values[j]))
        messages.append(attend(*heads).squeeze(0).transpose(0, 1))
    return torch.cat(messages) if messages else q


class _WithOwnGradient(torch.autograd.Function):
    """The fused kernel forward; backward as plain products, whose weights are computed again and not kept.

    On a CPU the fused kernel's own backward pass is slower in bfloat16 than in float32, while plain products use the
    matrix units: a training step takes 0.7 times as long (docs/performance.md).
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx, grad: Tensor):
        with torch.enable_grad(), no_autocast(grad.device.type):
            q, k, v = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            weights = ((q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)).softmax(-1)
            return torch.autograd.grad(weights @ v, (q, k, v), grad)


def _padded(q: Tensor, k: Tensor, v: Tensor, counts: List[int], partner: List[int]) -> Tensor:
    """One padded and masked call for the batch: few launches on a GPU."""
    if not counts:
        return q
    longest = max(max(counts), 1)
    lengths = torch.tensor(counts, device=q.device)
    valid = torch.arange(longest, device=q.device) < lengths[:, None]

    def pad(packed: Tensor) -> Tensor:
        full = packed.new_zeros((len(counts), longest, *packed.shape[1:]))
        full[valid] = packed
        return full.transpose(1, 2)  # (B, H, N, d)

    index = torch.tensor(partner, device=q.device)
    visible = valid[index]
    # a softmax over no key at all is nan: let such a sequence see its (zero) padding instead
    visible = visible | ~visible.any(-1, keepdim=True)
    message = scaled_dot_product_attention(pad(q), pad(k)[index], pad(v)[index], visible[:, None, None, :])
    return message.transpose(1, 2)[valid]


class _Update(nn.Sequential):
    """MLP([x, merge(message)]): Linear, norm, ReLU, Linear.

    The merge and the first Linear are one map of the message, so their product is taken of the weights, which are few,
    rather than of the tokens; and what the two halves of the input give is added, not their concatenation made.
    """

    def forward(self, x: Tensor, message: Tensor, merge: nn.Linear) -> Tensor:
        """x, message (S, D) -> (S, D)."""
        first = self[0]
        own, others = first.weight.split(x.shape[1], dim=1)
        bias = torch.addmv(first.bias, others, merge.bias)
        hidden = torch.addmm(nn.functional.linear(x, own, bias), message, (others @ merge.weight).t())
        for module in list(self)[1:]:
            hidden = module(hidden)
        return hidden


class AttentionalLayer(nn.Module):
    """One residual update of every keypoint: x <- x + MLP([x, message]) (equation 3)."""

    def __init__(self, dim: int, heads: int, norm: nn.Module) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} is not divisible by heads {heads}")
        self.heads = heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.merge = nn.Linear(dim, dim)
        self.mlp = _Update(nn.Linear(2 * dim, 2 * dim), norm, nn.ReLU(), nn.Linear(2 * dim, dim))
        # each layer starts as the identity: the untrained network is then a soft nearest-neighbour matcher
        nn.init.zeros_(self.mlp[-1].weight)
        nn.init.zeros_(self.mlp[-1].bias)

    def forward(self, x: Tensor, counts: List[int], partner: List[int]) -> Tensor:
        """x (S, D) packed -> (S, D)."""
        q, k, v = self.query_key_value(x).view(x.shape[0], 3, self.heads, x.shape[1] // self.heads).unbind(1)
        message = ragged_attention(q, k, v, counts, partner)
        return x + self.mlp(x, message.reshape(x.shape), self.merge)
