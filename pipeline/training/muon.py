"""Muon for the matrices of the attention layers, Adam for everything else, in one optimiser.

Muon (Jordan et al. 2024) steps along the orthogonalised momentum of a matrix, scaled to the size of Adam's step (Liu et
al. 2025, arXiv 2502.16982, section 2.2), so that one learning rate serves both. torch's own (from 2.9 on) is bfloat16
and for whole parameters; this one is float32, and takes apart what a parameter stacks: query, key and value, for
instance.
"""

from __future__ import annotations

import math
from typing import List, Tuple

import torch
from torch import Tensor, nn

from pipeline.runtime import distributed
from superglue_sift.superglue import SuperGlue

# Newton-Schulz iteration of degree five, coefficients of Jordan's report: singular values end between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
ADAM_SIZE = 0.2  # root mean square of a typical step of Adam, over its learning rate
MOMENTUM, BETAS, EPS = 0.95, (0.9, 0.999), 1e-8

Gradients = List[Tuple[nn.Parameter, Tensor]]


def orthogonalized(matrices: Tensor) -> Tensor:
    """(K, A, B) -> the nearest (semi-)orthogonal matrices, about: singular values near 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


def blocks(matrix: Tensor, side: int) -> Tensor:
    """The squares of a matrix (A, B) whose sides are multiples of `side`, row by row: (K, side, side)."""
    cut = matrix.unflatten(0, (-1, side)).unflatten(2, (-1, side))  # (rows, side, columns, side)
    return cut.transpose(1, 2).reshape(-1, side, side)


def from_blocks(squares: Tensor, shape: torch.Size) -> Tensor:
    """The matrix of these `blocks`."""
    side = squares.shape[1]
    return squares.view(shape[0] // side, shape[1] // side, side, side).transpose(1, 2).reshape(shape)


class Muon(torch.optim.Optimizer):
    """Muon for the weights of a SuperGlue's attention layers, Adam for the rest.

    lr, weight_decay: of both; the decay is AdamW's. alone: each rank does all matrices, so that no rounding depends on
    how many ranks there are; else they share.
    """

    def __init__(self, model: SuperGlue, lr: float, weight_decay: float = 0.0, alone: bool = False) -> None:
        self.alone = alone
        self.side = model.config.dim  # of the squares that all matrices of the layers are made of
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if "attention" in name and p.ndim == 2]
        rest = [p for name, p in named if not ("attention" in name and p.ndim == 2)]
        groups = [{"params": matrices, "muon": True}, {"params": rest, "muon": False}]
        super().__init__([g for g in groups if g["params"]], {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One step of all parameters that have a gradient."""
        for group in self.param_groups:
            own = [(p, p.grad) for p in group["params"] if p.grad is not None]
            for p, _ in own:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            if group["muon"]:
                self._muon(own, group["lr"])
            else:
                self._adam(own, group["lr"])

    def _muon(self, own: Gradients, lr: float) -> None:
        directions = []
        for p, gradient in own:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            buffer = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
            directions.append(blocks(gradient.lerp(buffer, MOMENTUM), self.side))  # Nesterov's
        matrices = torch.cat(directions)
        over_ranks = distributed.map_rows_over_ranks
        found = orthogonalized(matrices) if self.alone else over_ranks(orthogonalized, matrices)
        steps = found.split([len(squares) for squares in directions])
        for (p, _), squares in zip(own, steps):
            p.sub_(from_blocks(squares, p.shape), alpha=lr * ADAM_SIZE * math.sqrt(self.side))

    def _adam(self, own: Gradients, lr: float) -> None:
        for p, gradient in own:
            state = self.state[p]
            if not state:
                state["step"] = 0
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            step = int(state["step"]) + 1  # a plain number again where torch 1.10 restored it
            state["step"] = torch.tensor(float(step))
            corrections = [1 - beta**step for beta in BETAS]
            mean = state["exp_avg"].lerp_(gradient, 1 - BETAS[0])
            square = state["exp_avg_sq"].mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            denominator = (square / corrections[1]).sqrt_().add_(EPS)
            p.addcdiv_(mean, denominator, value=-lr / corrections[0])
