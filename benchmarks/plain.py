"""Compare with a plain SuperGlue, written from the paper (arXiv 1911.11763) as a reader would.

It has convolutions of width 1 over (B, D, N), attention by einsum with all weights stored, autograd
through Sinkhorn in the log domain, and a dense target for the loss. With equal weights
(`plain_from`) it computes what the project's network does. All views of a batch have the same
number of keypoints.
"""

from __future__ import annotations

import math
from typing import List

import torch
from torch import Tensor, nn

from superglue_sift.network.batch import choose_orientations, join_keypoints, unit_vectors
from superglue_sift.network.ground_truth import UNMATCHED, Truth
from superglue_sift.network.superglue import (
    ENCODER_WIDTHS,
    SIFT_DIM,
    SuperGlue,
    SuperGlueConfig,
    geometry_of,
)


def sinkhorn(scores: Tensor, dustbin: Tensor, iterations: int) -> Tensor:
    """Compute the log assignment (B, M + 1, N + 1) from scores (B, M, N) by equation 9."""
    B, m, n = scores.shape
    # the dustbins: a column of image 0's unmatched keypoints, and a row of image 1's
    right = dustbin.expand(B, m, 1)
    below = dustbin.expand(B, 1, n + 1)
    Z = torch.cat([torch.cat([scores, right], 2), below], 1)
    # each keypoint has the mass 1, and a dustbin that of all keypoints of the other image
    norm = -math.log(m + n)
    log_mu = scores.new_tensor([0.0] * m + [math.log(n)]) + norm
    log_nu = scores.new_tensor([0.0] * n + [math.log(m)]) + norm
    u = torch.zeros_like(Z[:, :, 0])
    v = torch.zeros_like(Z[:, 0, :])
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(Z + v.unsqueeze(1), dim=2)
        v = log_nu - torch.logsumexp(Z + u.unsqueeze(2), dim=1)
    return Z + u.unsqueeze(2) + v.unsqueeze(1) - norm


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of (B, C, N)."""

    def forward(self, x: Tensor) -> Tensor:
        # contiguous, because the next layer would copy it at more cost
        return super().forward(x.transpose(1, 2)).transpose(1, 2).contiguous()


NORMS = {"batch": nn.BatchNorm1d, "layer": ChannelNorm}


def _perceptron(widths: List[int], norm: str) -> nn.Sequential:
    layers: List[nn.Module] = []
    for a, b in zip(widths[:-2], widths[1:-1]):
        layers += [nn.Conv1d(a, b, 1), NORMS[norm](b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv1d(widths[-2], widths[-1], 1))


class PlainLayer(nn.Module):
    """Multi-head attention and the residual update of (B, D, N)."""

    def __init__(self, dim: int, heads: int, norm: str) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Conv1d(dim, dim, 1) for _ in range(3))
        self.merge = nn.Conv1d(dim, dim, 1)
        self.mlp = _perceptron([2 * dim, 2 * dim, dim], norm)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        # (B, D, N) -> (B, heads, D / heads, N)
        B, D, _ = x.shape
        q, k, v = (
            conv(t).view(B, self.heads, D // self.heads, -1)
            for conv, t in ((self.query, x), (self.key, source), (self.value, source))
        )
        weights = torch.einsum("bhdn,bhdm->bhnm", q, k).div((D // self.heads) ** 0.5).softmax(-1)
        message = torch.einsum("bhnm,bhdm->bhdn", weights, v).reshape(B, D, -1)
        return self.mlp(torch.cat([x, self.merge(message)], 1))


class PlainSuperGlue(nn.Module):
    """The network. `forward` returns the log assignments (B, M + 1, N + 1) of a PairBatch."""

    def __init__(self, config: SuperGlueConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.descriptor_projection = nn.Conv1d(SIFT_DIM, dim, 1)
        inputs = 6 if config.scale_angle else 3
        self.keypoint_encoder = _perceptron([inputs, *ENCODER_WIDTHS, dim], config.norm)
        self.self_attention, self.cross_attention = (
            nn.ModuleList(PlainLayer(dim, config.heads, config.norm) for _ in range(config.layers))
            for _ in range(2)
        )
        self.final_projection = nn.Conv1d(dim, dim, 1)
        self.dustbin = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch) -> Tensor:
        batch = choose_orientations(batch)
        x0, x1 = self._encode(batch)
        for within, across in zip(self.self_attention, self.cross_attention):
            # self-attention, then cross-attention of both views at a time
            x0 = x0 + within(x0, x0)
            x1 = x1 + within(x1, x1)
            y0 = x0 + across(x0, x1)
            x1 = x1 + across(x1, x0)
            x0 = y0
        projected = self.final_projection(x0), self.final_projection(x1)
        scores = torch.einsum("bdn,bdm->bnm", *projected) / self.config.dim**0.5
        return sinkhorn(scores, self.dustbin, self.config.sinkhorn_iterations)

    def _encode(self, batch) -> List[Tensor]:
        keypoints, data, image_size, images = join_keypoints([batch])
        units = unit_vectors(data, "sift").to(self.dustbin)
        positions = geometry_of(keypoints, image_size, self.config.scale_angle).to(self.dustbin)
        return [
            self.descriptor_projection(unit.transpose(1, 2))
            + self.keypoint_encoder(position.transpose(1, 2))
            for unit, position in zip(*map(images.split, (units, positions)))
        ]


def dense_loss(log_P: Tensor, truth: Truth) -> Tensor:
    """Compute the loss of `pipeline.train.loss`, (B,), by a target as large as the assignment."""
    losses = []
    for P, matches0, matches1 in zip(log_P, *truth):
        # (M + 1, N + 1): 1 for each match and for each keypoint without one
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
    """Return a plain network with the weights of `model`, in the same mode.

    Raises RuntimeError for weights of options that the plain network has not.
    """
    plain = PlainSuperGlue(model.config)
    shapes = {name: value.shape for name, value in plain.state_dict().items()}
    weights = {}
    for name, value in model.state_dict().items():
        # one matrix for query, key and value becomes three convolutions
        kinds = ("query", "key", "value") if "query_key_value" in name else ("",)
        for kind, part in zip(kinds, value.chunk(len(kinds)) if value.dim() else [value]):
            renamed = name.replace("query_key_value", kind)
            weights[renamed] = part.reshape(shapes.get(renamed, part.shape))
    plain.load_state_dict(weights)
    return plain.train(model.training)
