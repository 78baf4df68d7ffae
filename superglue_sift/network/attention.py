"""A layer of the network: attention between keypoints, then a perceptron (SuperGlue, section 3.1,
equations 3 to 5); its norms; rotary positions.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, ContextManager, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from superglue_sift.network.batch import Images
from superglue_sift.torch_compat import LayerNorm, chunked_attention, is_traced

# Initial standard deviation of the frequencies of rotary positions, radians over half an image
SPREAD = 2.0
Reduce = Callable[[Tensor], Tensor]  # sums a tensor over all ranks, differentiably


class AttentionalLayer(nn.Module):
    """One update of every keypoint: x <- x + MLP([x, message]) (equation 3)."""

    def __init__(self, dim: int, heads: int, norm: str) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.merge: nn.Module = nn.Linear(dim, dim)
        first = nn.Linear(2 * dim, 2 * dim)
        last = nn.Linear(2 * dim, dim)
        self.mlp = MLP(first, token_norm(norm, 2 * dim), nn.ReLU(inplace=True), last)
        # the layer starts as the identity: the untrained network is then a soft nearest-neighbour
        # matcher
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(
        self,
        x: Tensor,
        images: Images,
        dtype: Optional[torch.dtype],
        cross: bool,
        rotation: Optional[Tensor] = None,
    ) -> Tensor:
        """x (T, D) -> (T, D).

        dtype: of the products by autocast, None: that of the weights. The residual stream is not
        rounded to it. cross: whether each image attends to the other image of its pair, else to
        itself. rotation: of queries and keys, (2, T, d / 2), see `rotate`.
        """
        state = x.to(dtype or self.query_key_value.weight.dtype)
        # in the layer, not around all of them: gradient checkpointing runs it again
        with torch.autocast(x.device.type, dtype=dtype) if dtype else contextlib.nullcontext():
            message = self.attend(state, images, cross, rotation)
            return x + self.mlp([state, message], images.valid)

    def attend(self, x: Tensor, images: Images, cross: bool, rotation: Optional[Tensor]) -> Tensor:
        """Messages (T, D), from the merged heads (equations 4 and 5)."""
        heads = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))  # (T, 3, H, d)
        if rotation is not None:
            heads = torch.cat([rotate(heads[:, :2], rotation[:, :, None, None]), heads[:, 2:]], 1)
        # 3 x (B, H, N, d) each
        sides = [side.permute(2, 0, 3, 1, 4).unbind() for side in images.split(heads)]
        messages = []
        for i, (query, _, _) in enumerate(sides):
            source = i ^ 1 if cross else i
            _, key, value = sides[source]
            message = attention(query, key, value, images.visible[source])
            occupied = images.occupied[source]
            if occupied is not None:  # nothing comes from an image without keypoints
                message = message * occupied
            messages.append(self.merge(message.transpose(1, 2).flatten(2)))  # (B, N, D)
        return images.join(messages)


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Optional[Tensor]) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, without storing the weights (equation 4).

    query (B, H, M, d); key, value (B, H, N, d); visible (B, 1, 1, N) bool, True for keys to attend
    to, None: all. Returns (B, H, M, d).
    """
    if not hasattr(nn.functional, "scaled_dot_product_attention"):
        return chunked_attention(query, key, value, visible)
    learns = torch.is_grad_enabled() and query.requires_grad
    if learns and query.dtype == torch.bfloat16 and query.device.type == "cpu":
        return _PlainGradient.apply(query, key, value, visible)
    return _by_kernel(query, key, value, visible)


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, visible: Optional[Tensor]) -> Tensor:
    if visible is not None and is_traced():
        # what the kernel does; for a bool mask ONNX also tests all weights for nan, which takes
        # half of the time of a pair
        visible = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, -math.inf)
    with _without_cudnn() if query.is_cuda else contextlib.nullcontext():
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)


def _without_cudnn() -> ContextManager[Any]:
    """A context without cuDNN, which plans for each new shape: 70 ms of a core on an H100."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:  # torch 2.2 or older
        return contextlib.nullcontext()
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


class _PlainGradient(torch.autograd.Function):
    """Attention whose gradient takes plain products and computes the weights again, image by image.

    On a CPU the fused kernel's gradient is no faster in bfloat16 than in float32, while plain
    products use the matrix units: a training step of 8 pairs of up to 512 keypoints takes 0.8 of
    the time. Softmax and its gradient are in place, in memory that stays in the cache.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, visible: Optional[Tensor]
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, visible)
        return _by_kernel(query, key, value, visible)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        query, key, value, visible = ctx.saved_tensors
        B, H, M, d = query.shape
        gradients = [torch.empty_like(t) for t in (query, key, value)]
        weights, d_logits = query.new_empty((2, H, M, key.shape[2]))
        softmax_gradient = torch._softmax_backward_data  # pyright: ignore
        for i in range(B):
            q, k, v, g = (t[i].contiguous() for t in (query, key, value, grad))
            k = k / math.sqrt(d)
            torch.bmm(q, k.transpose(1, 2), out=weights)
            if visible is not None:
                weights[..., int(visible[i].sum()) :] = -math.inf  # padding comes last
            torch.softmax(weights, -1, out=weights)
            torch.bmm(g, v.transpose(1, 2), out=d_logits)
            softmax_gradient(d_logits, weights, -1, weights.dtype, grad_input=d_logits)
            gradients[0][i] = torch.bmm(d_logits, k)
            gradients[1][i] = torch.bmm(d_logits.transpose(1, 2), q).div_(math.sqrt(d))
            gradients[2][i] = torch.bmm(weights.transpose(1, 2), g)
        return (*gradients, None)


class RotaryPositions(nn.Module):
    """Rotary embedding of 2-D positions, with learned frequencies (Su et al. 2021; LightGlue,
    section 3.1).

    Inner products of rotated queries and keys depend on the relative positions of keypoints.
    """

    def __init__(self, channels: int) -> None:
        """channels: d of each head, even."""
        super().__init__()
        if channels % 2:
            raise ValueError(
                f"rotary positions need an even number of channels per head, not {channels}"
            )
        self.frequencies = nn.Parameter(SPREAD * torch.randn(2, channels // 2))

    def forward(self, positions: Tensor) -> Tensor:
        """positions (T, 2) of order one -> cos and sin (2, T, d / 2), for `rotate`."""
        angles = positions @ self.frequencies
        return torch.stack([angles.cos(), angles.sin()])


def rotate(vectors: Tensor, rotation: Tensor) -> Tensor:
    """Rotate vectors (..., d): entries i and i + d / 2 are a point of the plane; keeps the dtype.

    rotation: cos and sin of the angles, (2, ..., d / 2), broadcast.
    """
    a, b = vectors.chunk(2, -1)
    cos, sin = rotation.to(vectors.dtype).unbind(0)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class MLP(nn.Sequential):
    """A perceptron of keypoints, whose BatchNorm leaves out padding."""

    def forward(self, inputs: Sequence[Tensor], valid: Optional[Tensor] = None) -> Tensor:
        """(T, C) from the concatenation of `inputs`, (T, C0), (T, C1), ...

        The products of each input are added, so that the concatenation, a fifth of what a training
        step keeps for the gradient, need not exist. valid: (T,) bool, False for padding; None:
        there is none.
        """
        first: Any = self[0]
        weights = first.weight.to(inputs[0].dtype).split([each.shape[1] for each in inputs], 1)
        x = nn.functional.linear(inputs[0], weights[0], first.bias)
        for each, weight in zip(inputs[1:], weights[1:]):
            x = torch.addmm(x, each, weight.t())
        for module in list(self)[1:]:
            x = module(x, valid) if isinstance(module, TokenBatchNorm) else module(x)
        return x


class TokenBatchNorm(nn.Module):
    """Batch normalisation over all keypoints of the batch, with `reduce` of all ranks.

    Statistics equal those of one process with the whole batch, for any numbers of keypoints per
    rank (torch's SyncBatchNorm needs a GPU). A batch without keypoints does not change the running
    statistics.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor

    momentum = 0.1
    eps = 1e-5

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.reduce: Optional[Reduce] = None

    def forward(self, x: Tensor, valid: Optional[Tensor] = None) -> Tensor:
        """x (T, C) -> (T, C), computed in float32 also under autocast.

        valid: (T,) bool, False for padding, which does not count; None: there is none.
        """
        x32 = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, var = (
            self._statistics(x32, valid) if self.training else (self.running_mean, self.running_var)
        )
        return ((x32 - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias).to(x.dtype)

    def _statistics(self, x: Tensor, valid: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        """Mean, then variance, in two passes: a difference of large squares would lose digits."""
        reduce = self.reduce or (lambda tensor: tensor)
        counted = torch.ones_like(x[:, :1]) if valid is None else valid.to(x.dtype).unsqueeze(1)
        first = reduce(torch.cat([(x * counted).sum(0), counted.sum(0)]))
        count = first[-1].detach().clamp(min=1.0)
        mean = first[:-1] / count
        var = reduce(((x - mean).square() * counted).sum(0)) / count
        with torch.no_grad():
            # a tensor, which avoids a device-to-host synchronisation
            step = self.momentum * (first[-1] > 0).to(first.dtype)
            self.running_mean += step * (mean - self.running_mean)
            self.running_var += step * (var * count / (count - 1).clamp(min=1.0) - self.running_var)
        return mean, var


def token_norm(kind: str, channels: int) -> nn.Module:
    """The norm of a hidden layer: "layer" or "batch"."""
    return LayerNorm(channels) if kind == "layer" else TokenBatchNorm(channels)


def synchronize(model: nn.Module, reduce: Optional[Reduce]) -> None:
    """Set `reduce` of every TokenBatchNorm of the model; None: statistics of this rank only."""
    for module in model.modules():
        if isinstance(module, TokenBatchNorm):
            module.reduce = reduce
