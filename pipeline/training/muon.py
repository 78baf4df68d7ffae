"""Muon for the matrices of the layers, Adam for everything else, in one optimiser.

Muon (Jordan et al. 2024) steps along the orthogonalised momentum of a matrix, so that all its directions learn alike.
Its step is scaled to the size of Adam's (Liu et al. 2025, arXiv 2502.16982, section 2.2), so that one learning rate
serves both. torch has it from 2.9 on; this one runs on both stacks, in float32, and takes query, key and value apart.
"""

from __future__ import annotations

import math
from typing import Iterable, List, Tuple

import torch
from torch import Tensor, nn

# Newton-Schulz iteration of degree five, coefficients of Jordan's report: singular values end between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MATCH_ADAM = 0.2  # the root mean square of a typical Adam step over its learning rate


def orthogonalized(matrices: Tensor) -> Tensor:
    """(K, A, B) -> the nearest (semi-)orthogonal matrices, about: singular values near 1."""
    wide = matrices.transpose(1, 2) if matrices.shape[1] > matrices.shape[2] else matrices
    x = wide / wide.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if matrices.shape[1] > matrices.shape[2] else x


def matrices_of(model: nn.Module) -> List[Tuple[nn.Parameter, int]]:
    """The weights that Muon steps, and how many matrices each one stacks: those of the attention layers."""
    found = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.ndim == 2 and "attention" in name:
            found.append((parameter, 3 if "query_key_value" in name else 1))
    return found


class Muon(torch.optim.Optimizer):
    """See the module. Groups with `stacked` > 0 take Muon's step, the others Adam's."""

    def __init__(
        self, model: nn.Module, lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        stacks = matrices_of(model)
        chosen = {id(parameter) for parameter, _ in stacks}
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
        groups = [{"params": [p for p, n in stacks if n == number], "stacked": number} for number in (1, 3)]
        groups = [group for group in (*groups, {"params": rest, "stacked": 0}) if group["params"]]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        """One step of all parameters that have a gradient."""
        for group in self.param_groups:
            own = [p for p in group["params"] if p.grad is not None]
            for p in own:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            if group["stacked"]:
                self._muon(group, own)
            else:
                self._adam(group, own)

    def _muon(self, group: dict, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            buffer = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            ahead = p.grad.lerp(buffer, group["momentum"])  # Nesterov's
            stacked = ahead.view(group["stacked"], -1, ahead.shape[1])
            size = MATCH_ADAM * math.sqrt(max(stacked.shape[1:]))
            p.sub_(orthogonalized(stacked).view_as(p), alpha=group["lr"] * size)

    def _adam(self, group: dict, parameters: Iterable[nn.Parameter], betas=(0.9, 0.999), eps=1e-8) -> None:
        for p in parameters:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["step"] += 1
            step = float(state["step"])
            mean = state["exp_avg"].lerp_(p.grad, 1 - betas[0])
            square = state["exp_avg_sq"].mul_(betas[1]).addcmul_(p.grad, p.grad, value=1 - betas[1])
            denominator = (square / (1 - betas[1] ** step)).sqrt_().add_(eps)
            p.addcdiv_(mean, denominator, value=-group["lr"] / (1 - betas[0] ** step))
