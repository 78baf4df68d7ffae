"""Normalisation of keypoints (T, C), padding included."""

from __future__ import annotations

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor, nn

from superglue_sift.torch_compat import layer_norm

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over all ranks, differentiably


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

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.momentum = momentum
        self.eps = eps
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
        counted = x.new_ones((x.shape[0], 1)) if valid is None else valid.to(x.dtype).unsqueeze(1)

        def add_up(values: Tensor) -> Tensor:
            return values.sum(0) if valid is None else (values * counted).sum(0)

        first = reduce(torch.cat([add_up(x), counted.sum(0)]))
        count = first[-1].detach().clamp(min=1.0)
        mean = first[:-1] / count
        var = reduce(add_up((x - mean).square())) / count
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
