"""Muon for the matrices of the attention layers, Adam for everything else, in one optimiser.

Muon (Jordan et al. 2024) steps along the orthogonalised momentum of a matrix, scaled to the size of
Adam's step (Liu et al. 2025, arXiv 2502.16982, section 2.2), so that one learning rate serves both.
torch's version (from 2.9 on) computes in bfloat16 and for whole parameters; this one is float32,
and splits stacked parameters such as query, key and value.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List

import torch
from torch import Tensor, nn

from pipeline import distributed
from pipeline.compat import lerp_
from superglue_sift.network.superglue import SuperGlue
from superglue_sift.torch_compat import sqrt

# Newton-Schulz iteration of degree five, coefficients of Jordan's report: singular values end
# between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
ADAM_RMS = 0.2  # root mean square of a typical step of Adam, divided by its learning rate
MOMENTUM = 0.95
BETAS = (0.9, 0.999)
EPS = 1e-8

FOREACH: Any = torch  # the stubs lack its operators over lists of tensors

Parameters = List[Any]  # each has a gradient, which the stubs do not know


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximately the nearest (semi-)orthogonal matrices, (K, A, B): singular values near 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


def blocks(matrix: Tensor, side: int) -> Tensor:
    """Cut matrices (..., A, B) into squares (K, side, side), row by row; `side` divides A and B."""
    # (..., rows, side, columns, side)
    cut = matrix.unflatten(-1, (-1, side)).unflatten(-3, (-1, side))
    return cut.transpose(-3, -2).reshape(-1, side, side)


def from_blocks(squares: Tensor, shape: torch.Size) -> Tensor:
    """Inverse of `blocks`: the matrices of `shape` (..., A, B)."""
    side = squares.shape[1]
    cut = squares.view(*shape[:-2], shape[-2] // side, shape[-1] // side, side, side)
    return cut.transpose(-3, -2).reshape(shape)


class Muon(torch.optim.Optimizer):
    """Muon for the weights of a SuperGlue's attention layers, Adam for the rest.

    lr: learning rate of both. The ranks share the work of Muon.
    """

    def __init__(self, model: SuperGlue, lr: float) -> None:
        self.side = model.config.dim  # all matrices of the layers consist of squares of this side
        kinds: Dict[bool, List[nn.Parameter]] = {True: [], False: []}
        for name, p in model.named_parameters():
            if p.requires_grad:
                kinds["attention" in name and p.ndim == 2].append(p)
        groups = [{"params": params, "muon": muon} for muon, params in kinds.items() if params]
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One step of all parameters that have a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if group["muon"]:
                self._muon(parameters, group["lr"])
            else:
                self._adam(parameters, group["lr"])

    def _muon(self, parameters: Parameters, lr: float) -> None:
        by_shape: Dict[torch.Size, Parameters] = {}
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            by_shape.setdefault(p.shape, []).append(p)
        momenta = [self.state[p]["momentum_buffer"] for p in parameters]
        lerp_(momenta, [p.grad for p in parameters], 1 - MOMENTUM)
        directions = []
        for alike in by_shape.values():  # a few launches for each shape instead of each parameter
            buffers = torch.stack([self.state[p]["momentum_buffer"] for p in alike])
            nesterov = torch.stack([p.grad for p in alike]).lerp_(buffers, MOMENTUM)
            directions.append(blocks(nesterov, self.side))
        steps = distributed.map_rows_over_ranks(orthogonalize, torch.cat(directions))
        sizes = [len(squares) for squares in directions]
        for alike, squares in zip(by_shape.values(), steps.split(sizes)):
            updates = from_blocks(squares, torch.Size((len(alike), *alike[0].shape)))
            FOREACH._foreach_add_(
                alike, list(updates.unbind()), alpha=-lr * ADAM_RMS * math.sqrt(self.side)
            )

    def _adam(self, parameters: Parameters, lr: float) -> None:
        gradients = [p.grad for p in parameters]
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states):
            if not state:
                state.update(step=0.0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            # A tensor after `load_state_dict`
            state["step"] = float(state["step"]) + 1
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        lerp_(means, gradients, 1 - BETAS[0])
        FOREACH._foreach_mul_(squares, BETAS[1])
        FOREACH._foreach_addcmul_(squares, gradients, gradients, 1 - BETAS[1])
        denominators = FOREACH._foreach_div(
            squares, [1 - BETAS[1] ** state["step"] for state in states]
        )
        # as one tensor, and not by `_foreach_sqrt_`, whose bits differ between processors
        roots = sqrt(torch.cat([each.flatten() for each in denominators]))
        parts = roots.split([each.numel() for each in denominators])
        denominators = [part.view_as(each) for part, each in zip(parts, denominators)]
        FOREACH._foreach_add_(denominators, EPS)
        FOREACH._foreach_addcdiv_(
            parameters,
            means,
            denominators,
            [-lr / (1 - BETAS[0] ** state["step"]) for state in states],
        )
