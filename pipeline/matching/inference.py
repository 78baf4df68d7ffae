"""The trained network made ready for matching: what depends on weights alone is computed once.

Per layer the merge of the heads goes into the first map of the MLP, and a BatchNorm into the map before it. In
bfloat16 the weights are stored so, instead of cast at each call; the residual stream, the keypoint encoder, the scores
and the transport stay float32.
"""

from __future__ import annotations

import copy
from typing import List, Tuple

import torch
from torch import Tensor, nn

from pipeline.matching.attention import AttentionalLayer, ragged_attention
from pipeline.matching.normalization import TokenBatchNorm
from pipeline.matching.superglue import SuperGlue


def folded(model: SuperGlue, precision: str = "float32") -> SuperGlue:
    """A copy of `model` for inference: equal to rounding in float32, faster.

    Args:
        model: on any device; its own weights are not touched.
        precision: float32, bfloat16 or float16, of the layers' products.
    """
    ready = copy.deepcopy(model).eval().requires_grad_(False)
    dtype = getattr(torch, precision)
    ready.keypoint_encoder = _fold_encoder(ready.keypoint_encoder)
    for layers in (ready.self_attention, ready.cross_attention):
        for number, layer in enumerate(layers):
            layers[number] = FoldedLayer(layer, dtype)
    return ready


class FoldedLayer(nn.Module):
    """`AttentionalLayer` with its linear maps multiplied out."""

    def __init__(self, layer: AttentionalLayer, dtype: torch.dtype) -> None:
        super().__init__()
        first, norm, _, last = layer.mlp
        own, others = first.weight.double().chunk(2, dim=1)
        bias = first.bias.double() + others @ layer.merge.bias.double()
        message = others @ layer.merge.weight.double()
        if isinstance(norm, TokenBatchNorm):
            scale, shift = _scale_and_shift(norm)
            own, message, bias = scale[:, None] * own, scale[:, None] * message, scale * bias + shift
            norm = nn.Identity()
        self.heads = layer.heads
        self.norm = norm.to(dtype)
        named = {"own": own, "message": message.t().contiguous(), "bias": bias}
        named.update(last_weight=last.weight, last_bias=last.bias)
        named.update(heads_weight=layer.query_key_value.weight, heads_bias=layer.query_key_value.bias)
        for name, value in named.items():
            self.register_buffer(name, value.detach().to(dtype))

    def forward(self, x: Tensor, counts: List[int], partner: List[int]) -> Tensor:
        """x (S, D) packed float32 -> (S, D) float32."""
        linear = nn.functional.linear
        state = x.to(self.own.dtype)
        heads = linear(state, self.heads_weight, self.heads_bias)
        q, k, v = heads.view(len(x), 3, self.heads, x.shape[1] // self.heads).unbind(1)
        message = ragged_attention(q, k, v, counts, partner).reshape(x.shape)
        hidden = torch.addmm(linear(state, self.own, self.bias), message, self.message)
        return x + linear(self.norm(hidden).relu_(), self.last_weight, self.last_bias)


def _scale_and_shift(norm: TokenBatchNorm) -> Tuple[Tensor, Tensor]:
    """What a BatchNorm does to a channel in evaluation: times `scale`, plus `shift`; float64."""
    scale = norm.weight.double() * torch.rsqrt(norm.running_var.double() + norm.eps)
    return scale, norm.bias.double() - norm.running_mean.double() * scale


def _fold_encoder(encoder: nn.Sequential) -> nn.Sequential:
    modules: List[nn.Module] = []
    for module in encoder:
        if isinstance(module, TokenBatchNorm):
            scale, shift = _scale_and_shift(module)
            before = modules[-1]
            dtype = before.weight.dtype
            before.weight.data = (scale[:, None] * before.weight.double()).to(dtype)
            before.bias.data = (scale * before.bias.double() + shift).to(dtype)
        else:
            modules.append(module)
    return nn.Sequential(*modules)
