"""Normalisation of packed tokens (S, C), which have no padding."""

from __future__ import annotations

from typing import Callable, Optional

import torch
from torch import Tensor, nn

from superglue_sift.torch_compat import layer_norm

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over all ranks, differentiably


class TokenBatchNorm(nn.Module):
    """Batch normalisation over all tokens of the batch, with `reduce` of all ranks.

    Statistics equal those of one process with the whole batch, for any numbers of tokens per rank (torch's
    SyncBatchNorm needs a GPU). A batch without tokens does not change the running statistics.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.momentum, self.eps = momentum, eps
        self.reduce: Optional[Reduce] = None

    def forward(self, x: Tensor) -> Tensor:
        """x (S, C) -> (S, C), computed in float32 also under autocast."""
        x32 = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, var = self._statistics(x32) if self.training else (self.running_mean, self.running_var)
        return ((x32 - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias).to(x.dtype)

    def _statistics(self, x: Tensor):
        """Mean, then variance, in two passes: a difference of large squares would lose digits."""
        reduce = self.reduce or (lambda tensor: tensor)
        first = reduce(torch.cat([x.sum(0), x.new_tensor([float(x.shape[0])])]))
        count = first[-1].detach().clamp(min=1.0)
        mean = first[:-1] / count
        var = reduce((x - mean).square().sum(0)) / count
        with torch.no_grad():
            # a tensor, which avoids a device-to-host synchronisation
            step = self.momentum * (first[-1] > 0).to(first.dtype)
            self.running_mean += step * (mean - self.running_mean)
            self.running_var += step * (var * count / (count - 1).clamp(min=1.0) - self.running_var)
        return mean, var


def token_norm(kind: str, channels: int) -> nn.Module:
    """The norm of a hidden layer: "layer" or "batch"."""
    if kind not in ("layer", "batch"):
        raise ValueError(f"norm {kind!r}: must be layer or batch")
    return layer_norm(channels) if kind == "layer" else TokenBatchNorm(channels)


def synchronize(model: nn.Module, reduce: Optional[Reduce]) -> None:
    """Set `reduce` of every TokenBatchNorm of the model; None: statistics of this rank only."""
    for module in model.modules():
        if isinstance(module, TokenBatchNorm):
            module.reduce = reduce
