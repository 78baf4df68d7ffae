"""A plain SuperGlue to compare with, written from the paper (arXiv 1911.11763) the way a reader
would first write it.

Convolutions of width 1 over (B, D, N), attention by einsum with all weights stored, autograd
through Sinkhorn in the log domain, a dense target for the loss. With our weights (`plain_from`)
both compute the same. All views of a batch have the same number of keypoints.
"""

from __future__ import annotations

import math
from typing import List

import torch
from torch import Tensor, nn

from superglue_sift.batch import Images, Keypoints
from superglue_sift.descriptors import root_sift
from superglue_sift.pair_inputs import choose_orientations
from superglue_sift.superglue import (
    ENCODER_WIDTHS,
    SIFT_DIM,
    SuperGlue,
    SuperGlueConfig,
    geometry_of,
)
from superglue_sift.truth import UNMATCHED, Truth


def sinkhorn(scores: Tensor, dustbin: Tensor, iterations: int) -> Tensor:
    """Log assignment (B, M + 1, N + 1) from scores (B, M, N), equation 9 as it stands, in the log
    domain.
    """
    B, m, n = scores.shape
    right = dustbin.expand(B, m, 1)
    below = dustbin.expand(B, 1, n + 1)
    Z = torch.cat([torch.cat([scores, right], 2), below], 1)
    norm = -math.log(m + n)
    log_mu = torch.cat([scores.new_zeros(m), scores.new_tensor([math.log(n)])]) + norm
    log_nu = torch.cat([scores.new_zeros(n), scores.new_tensor([math.log(m)])]) + norm
    u = torch.zeros_like(Z[:, :, 0])
    v = torch.zeros_like(Z[:, 0, :])
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(Z + v.unsqueeze(1), dim=2)
        v = log_nu - torch.logsumexp(Z + u.unsqueeze(2), dim=1)
    return Z + u.unsqueeze(2) + v.unsqueeze(1) - norm


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of (B, C, N); contiguous, because the next layer would copy it at
    more cost.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2).contiguous()


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm1d(channels) if kind == "batch" else ChannelNorm(channels)


def _perceptron(widths: List[int], norm: str) -> nn.Sequential:
    layers: List[nn.Module] = []
    for a, b in zip(widths[:-2], widths[1:-1]):
        layers += [nn.Conv1d(a, b, 1), _norm(norm, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv1d(widths[-2], widths[-1], 1))


class PlainLayer(nn.Module):
    """Multi-head attention and the residual update, (B, D, N)."""

    def __init__(self, dim: int, heads: int, norm: str) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Conv1d(dim, dim, 1) for _ in range(3))
        self.merge = nn.Conv1d(dim, dim, 1)
        self.mlp = _perceptron([2 * dim, 2 * dim, dim], norm)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        B, D, _ = x.shape
        q, k, v = (
            conv(t).view(B, self.heads, D // self.heads, -1)
            for conv, t in ((self.query, x), (self.key, source), (self.value, source))
        )
        weights = torch.einsum("bhdn,bhdm->bhnm", q, k).div((D // self.heads) ** 0.5).softmax(-1)
        message = torch.einsum("bhnm,bhdm->bhdn", weights, v).reshape(B, D, -1)
        return self.mlp(torch.cat([x, self.merge(message)], 1))


class PlainSuperGlue(nn.Module):
    """The network; `forward` returns one tensor (B, M + 1, N + 1)."""

    def __init__(self, config: SuperGlueConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.projection = nn.Conv1d(SIFT_DIM, dim, 1)
        inputs = 6 if config.scale_angle else 3
        self.encoder = _perceptron([inputs, *ENCODER_WIDTHS, dim], config.norm)
        self.layers = nn.ModuleList(
            PlainLayer(dim, config.heads, config.norm) for _ in range(2 * config.layers)
        )
        self.final = nn.Conv1d(dim, dim, 1)
        self.dustbin = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch) -> Tensor:
        batch = choose_orientations(batch)
        x0, x1 = (self._encoded(batch, side) for side in "01")
        for i, layer in enumerate(self.layers):
            source0, source1 = (x0, x1) if i % 2 == 0 else (x1, x0)
            x0 = x0 + layer(x0, source0)
            x1 = x1 + layer(x1, source1)
        scores = torch.einsum("bdn,bdm->bnm", self.final(x0), self.final(x1)) / self.config.dim**0.5
        return sinkhorn(scores, self.dustbin, self.config.sinkhorn_iterations)

    def _encoded(self, batch, side: str) -> Tensor:
        dtype = self.dustbin.dtype
        descriptors = root_sift(getattr(batch, "descriptors" + side)).to(dtype).transpose(1, 2)
        fields = ("keypoints", "scores", "scales", "angles", "descriptors")
        size = getattr(batch, "image_size" + side)[:, None]
        keypoints = Keypoints(
            *(getattr(batch, name + side) for name in fields), size, Images([], [], [])
        )
        geometry = geometry_of(keypoints, self.config.scale_angle).to(dtype).transpose(1, 2)
        return self.projection(descriptors) + self.encoder(geometry)


def dense_loss(log_P: Tensor, truth: Truth) -> Tensor:
    """The loss of `pipeline.train.objective`, (B,), through a target as large as the assignment."""
    losses = []
    for P, matches0, matches1 in zip(log_P, *truth):
        target = torch.zeros_like(P)
        left = torch.nonzero(matches0 >= 0)[:, 0]
        lone0 = torch.nonzero(matches0 == UNMATCHED)[:, 0]
        lone1 = torch.nonzero(matches1 == UNMATCHED)[:, 0]
        target[left, matches0[left]] = 1
        target[lone0, -1] = 1
        target[-1, lone1] = 1
        losses.append(-(P * target).sum() / target.sum().clamp(min=1))
    return torch.stack(losses)


def plain_from(model: SuperGlue) -> PlainSuperGlue:
    """A plain network with the weights of ours, in the same mode. Raises ValueError for missing
    options.
    """
    plain = PlainSuperGlue(model.config)
    ours = dict(model.state_dict())
    with torch.no_grad():
        plain.dustbin.copy_(ours.pop("dustbin"))
        _copy(plain.projection, ours, "descriptor_projection")
        _copy(plain.final, ours, "final_projection")
        _copy_all(plain.encoder, ours, "keypoint_encoder")
        for i, layer in enumerate(plain.layers):
            kind = ("self_attention", "cross_attention")[i % 2]
            _copy_layer(layer, ours, f"{kind}.{i // 2}")
    if ours:
        raise ValueError(f"the plain network has no {', '.join(ours)}")
    return plain.train(model.training)


def _copy_layer(layer: PlainLayer, ours: dict, name: str) -> None:
    weights = ours.pop(f"{name}.query_key_value.weight").chunk(3)
    biases = ours.pop(f"{name}.query_key_value.bias").chunk(3)
    for conv, weight, bias in zip((layer.query, layer.key, layer.value), weights, biases):
        conv.weight.copy_(weight.unsqueeze(-1))
        conv.bias.copy_(bias)
    _copy(layer.merge, ours, f"{name}.merge")
    _copy_all(layer.mlp, ours, f"{name}.mlp")


def _copy_all(sequence: nn.Sequential, ours: dict, name: str) -> None:
    for place, module in enumerate(sequence):
        if not isinstance(module, nn.ReLU):
            _copy(module, ours, f"{name}.{place}")


def _copy(module: nn.Module, ours: dict, name: str) -> None:
    target = getattr(module, "norm", module)
    for key in [key for key in ours if key.startswith(name + ".")]:
        value = ours.pop(key)
        held = getattr(target, key[len(name) + 1 :])
        held.copy_(value.unsqueeze(-1) if held.dim() == 3 else value)
