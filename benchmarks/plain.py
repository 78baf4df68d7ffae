"""Compute a plain SuperGlue, written from the paper (arXiv 1911.11763) as a reader would.

It has convolutions of width 1 over (B, D, N), attention by einsum with all weights stored, autograd
through Sinkhorn in the log domain, and a dense target for the loss. It computes what the project's
network computes, with the same parameters. All views of a batch have the same number of keypoints,
and options beyond the paper (rotary positions, neighbors) are left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from superglue_sift.features.features import Features
from superglue_sift.network.batch import choose_orientations, join_keypoints, normalize_descriptors
from superglue_sift.network.ground_truth import UNMATCHED, TrueMatches
from superglue_sift.network.perceptron import TokenBatchNorm
from superglue_sift.network.superglue import AttentionalLayer, SuperGlue, encode_geometry


def compute_sinkhorn(scores: Tensor, dustbin: Tensor, iterations: int) -> Tensor:
    """Compute the log assignment (B, M + 1, N + 1) from scores (B, M, N) by equation 9."""
    _, m, n = scores.shape
    # The dustbins: a column for keypoints of image 0, and a row for keypoints of image 1
    column = dustbin.expand(len(scores), m, 1)
    row = dustbin.expand(len(scores), 1, n + 1)
    Z = torch.cat([torch.cat([scores, column], 2), row], 1)
    # Each keypoint has the mass 1, and a dustbin that of all keypoints of the other image.
    norm = -math.log(m + n)
    log_mu = scores.new_tensor([0.0] * m + [math.log(n)]) + norm
    log_nu = scores.new_tensor([0.0] * n + [math.log(m)]) + norm
    u = torch.zeros_like(Z[:, :, 0])
    v = torch.zeros_like(Z[:, 0, :])
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(Z + v.unsqueeze(1), dim=2)
        v = log_nu - torch.logsumexp(Z + u.unsqueeze(2), dim=1)
    return Z + u.unsqueeze(2) + v.unsqueeze(1) - norm


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply a linear map to the channels of (B, C, N) as a convolution of width 1."""
    return functional.conv1d(x, weight.unsqueeze(2), bias)


def apply_mlp(mlp: nn.Sequential, x: Tensor) -> Tensor:
    """Apply an MLP to the channels of (B, C, N)."""
    for module in mlp:
        if isinstance(module, nn.Linear):
            x = apply_linear(x, module.weight, module.bias)
        elif isinstance(module, TokenBatchNorm):
            means = module.running_mean, module.running_var
            x = functional.batch_norm(x, *means, module.weight, module.bias, module.training)
        elif isinstance(module, nn.LayerNorm):
            # The next layer would copy a tensor that is not contiguous, which takes longer.
            x = module(x.transpose(1, 2)).transpose(1, 2).contiguous()
        else:
            x = module(x)
    return x


def apply_layer(layer: AttentionalLayer, x: Tensor, source: Tensor) -> Tensor:
    """Compute multi-head attention, and add the update of the states.

    Args:
        layer: the layer, whose parameters are used.
        x: the states of an image, (B, D, N).
        source: the states of the image to which it attends, (B, D, M).

    Returns:
        The new states, (B, D, N).
    """
    weights = layer.query_key_value.weight.chunk(3)
    biases = layer.query_key_value.bias.chunk(3)
    # (B, D, N) -> (B, heads, D / heads, N)
    q, k, v = (
        apply_linear(states, weight, bias).unflatten(1, (layer.heads, -1))
        for states, weight, bias in zip((x, source, source), weights, biases)
    )
    attention = torch.einsum("bhdn,bhdm->bhnm", q, k).div(q.shape[2] ** 0.5).softmax(-1)
    message = torch.einsum("bhnm,bhdm->bhdn", attention, v).flatten(1, 2)
    merged = apply_linear(message, layer.merge.weight, layer.merge.bias)
    return apply_mlp(layer.mlp, torch.cat([x, merged], 1))


def assign(model: SuperGlue, images0: Features, images1: Features) -> Tensor:
    """Compute the log assignments (B, M + 1, N + 1) of pairs, which `model` computes as well."""
    keypoints, images = join_keypoints([choose_orientations(images0, images1)])
    units = normalize_descriptors(keypoints.descriptors[:, 0], "sift").to(model.dustbin)
    positions = encode_geometry(keypoints, model.config.scale_angle).to(model.dustbin)
    # (T, C) -> (B, D, N) of each view
    project = model.descriptor_projection
    x0, x1 = (
        apply_linear(unit.transpose(1, 2), project.weight, project.bias)
        + apply_mlp(model.keypoint_encoder, position.transpose(1, 2))
        for unit, position in zip(*map(images.split_by_image, (units, positions)))
    )
    for within, across in zip(model.self_attention, model.cross_attention):
        x0 = x0 + apply_layer(within, x0, x0)
        x1 = x1 + apply_layer(within, x1, x1)
        x0, x1 = x0 + apply_layer(across, x0, x1), x1 + apply_layer(across, x1, x0)
    last = model.final_projection
    projected = [apply_linear(x, last.weight, last.bias) for x in (x0, x1)]
    scores = torch.einsum("bdn,bdm->bnm", *projected) / model.config.dim**0.5
    return compute_sinkhorn(scores, model.dustbin, model.config.sinkhorn_iterations)


def compute_dense_loss(log_P: Tensor, truth: TrueMatches) -> Tensor:
    """Compute the loss of `pipeline.train.loss`, (B,), by a target as large as the assignment."""
    losses = []
    for P, matches0, matches1 in zip(log_P, *truth):
        # (M + 1, N + 1): 1 for each match and for each keypoint without one
        target = torch.zeros_like(P)
        rows = torch.nonzero(matches0 >= 0)[:, 0]
        target[rows, matches0[rows]] = 1
        target[:-1, -1] = (matches0 == UNMATCHED).to(P)
        target[-1, :-1] = (matches1 == UNMATCHED).to(P)
        losses.append(-(P * target).sum() / target.sum().clamp(min=1))
    return torch.stack(losses)
