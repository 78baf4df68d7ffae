"""Multi-head attention between ragged sets of keypoints (SuperGlue, section 3.1, equations 3 to 5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pipeline import stack
from pipeline.matching.packing import Edges
from pipeline.stack import no_autocast, scaled_dot_product_attention, softmax_gradient


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, edges: Edges) -> Tensor:
    """Attention of each sequence to its partner sequence, exact: no token of another image has any weight.

    Args:
        q, k, v: (S, H, d) packed tokens of H heads.
        edges: whose tokens they are, and who attends to whom.

    Returns:
        (S, H, d). A sequence whose partner is empty receives zeros.
    """
    if not edges.partner:
        return q
    learns = torch.is_grad_enabled() and q.requires_grad
    if q.device.type == "cpu" and (learns or not edges.packing.full):
        return _one_by_one(q, k, v, edges)
    if not edges.packing.full and min(edges.counts) > 0 and stack.has_packed_attention(q):
        return _packed(q, k, v, edges)
    return _padded(q, k, v, edges)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, edges: Edges) -> Tensor:
    """One unpadded call a sequence: no mask, no wasted work; launches cost nothing on a CPU."""
    queries, keys, values = (t.split(edges.packing.counts) for t in (q, k, v))
    learns = torch.is_grad_enabled() and q.requires_grad
    attend = _WithOwnGradient.apply if learns and q.dtype == torch.bfloat16 else scaled_dot_product_attention
    messages = []
    for i, j in enumerate(edges.partner):
        if len(queries[i]) == 0 or len(keys[j]) == 0:
            messages.append(torch.zeros_like(queries[i]))
            continue
        # (1, H, n, d) without a copy; what comes back lies as (n, H, d) in memory
        heads = (t.transpose(0, 1).unsqueeze(0) for t in (queries[i], keys[j], values[j]))
        messages.append(attend(*heads).squeeze(0).transpose(0, 1))
    return torch.cat(messages)


class _WithOwnGradient(torch.autograd.Function):
    """The fused kernel forward; backward as plain products, whose weights are computed again and not kept.

    On a CPU the fused kernel's own backward pass is slower in bfloat16 than in float32, while plain products use the
    matrix units (docs/performance.md has the figures).
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # (1, H, n, d) as (H, n, d), without the stride of the other heads
        q, k, v, grad = (t.squeeze(0).contiguous() for t in (*ctx.saved_tensors, grad))
        scale = 1 / math.sqrt(q.shape[-1])
        with no_autocast("cpu"):
            weights = torch.bmm(q * scale, k.transpose(1, 2)).softmax(-1)
            d_v = torch.bmm(weights.transpose(1, 2), grad)
            d_logits = softmax_gradient(torch.bmm(grad, v.transpose(1, 2)), weights)
            d_q, d_k = torch.bmm(d_logits, k), torch.bmm(d_logits.transpose(1, 2), q)
        return d_q.mul_(scale).unsqueeze(0), d_k.mul_(scale).unsqueeze(0), d_v.unsqueeze(0)


def _packed(q: Tensor, k: Tensor, v: Tensor, edges: Edges) -> Tensor:
    """One call on the packed tokens, for a GPU whose fused kernel takes sequences of any lengths."""
    if edges.partners is not None:
        k, v = (t.index_select(0, edges.partner_rows) for t in (k, v))
    theirs = edges.partner_packing
    return stack.packed_attention(q, k, v, edges.packing.starts, theirs.starts, edges.packing.width)


def _padded(q: Tensor, k: Tensor, v: Tensor, edges: Edges) -> Tensor:
    """One padded call for the batch, masked where there is padding: few launches on a GPU."""
    packing = edges.packing
    queries, keys, values = (packing.pad(t).transpose(1, 2) for t in (q, k, v))  # (B, H, N, d)
    if edges.partners is not None:
        keys, values = (t.index_select(0, edges.partners) for t in (keys, values))
    mask = None if packing.full else edges.visible
    return packing.pack(scaled_dot_product_attention(queries, keys, values, mask).transpose(1, 2))


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

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        """x (S, D) packed -> (S, D)."""
        q, k, v = self.query_key_value(x).view(x.shape[0], 3, self.heads, x.shape[1] // self.heads).unbind(1)
        message = ragged_attention(q, k, v, edges)
        return x + self.mlp(x, message.reshape(x.shape), self.merge)
