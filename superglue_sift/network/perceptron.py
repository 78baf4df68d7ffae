"""Multilayer perceptrons of keypoints, whose BatchNorm leaves out padding and spans all ranks."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from superglue_sift.torch_compat import LayerNorm

# Parameters are created with these options, since a program that uses the matcher may have changed
# torch's default dtype or default device.
FLOAT32: Any = {"dtype": torch.float32, "device": "cpu"}
# A function that sums a tensor over all ranks, and has a gradient
SumRanks = Callable[[Tensor], Tensor]


class MLP(nn.Sequential):
    """A multilayer perceptron of the states of keypoints. Its BatchNorm leaves out padding."""

    def forward(self, inputs: Sequence[Tensor], valid: Optional[Tensor] = None) -> Tensor:
        """Compute (T, C) from the concatenation of `inputs`, (T, C0), (T, C1), ...

        The products of each input are added, so that the concatenation need not exist. It would be
        a fifth of what a training step keeps for the gradient.

        Args:
            inputs: tensors of T rows.
            valid: (T,) bool, False for padding. If None, there is no padding.
        """
        first: Any = self[0]
        # Split the columns of the first map by the input that they belong to.
        weights = first.weight.to(inputs[0].dtype).split([tensor.shape[1] for tensor in inputs], 1)
        # (T, C0), (T, C1), ... -> (T, hidden)
        x = nn.functional.linear(inputs[0], weights[0], first.bias)
        for tensor, weight in zip(inputs[1:], weights[1:]):
            x = torch.addmm(x, tensor, weight.t())
        for module in list(self)[1:]:
            x = module(x, valid) if isinstance(module, TokenBatchNorm) else module(x)
        return x


class TokenBatchNorm(nn.Module):
    """Normalize over all keypoints of the batch, with sums of all ranks by `sum_ranks`.

    The statistics equal those of one process with the whole batch, for any numbers of keypoints of
    the ranks. torch's SyncBatchNorm could not do this without a GPU. A batch without keypoints does
    not change the running statistics.
    """

    running_mean: Tensor
    running_var: Tensor

    momentum = 0.1
    eps = 1e-5

    def __init__(self, channels: int, **options: Any) -> None:
        """Create the norm.

        Args:
            channels: C, width of a row.
            options: dtype and device of the parameters.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, **options))
        self.bias = nn.Parameter(torch.zeros(channels, **options))
        self.register_buffer("running_mean", torch.zeros(channels, **options))
        self.register_buffer("running_var", torch.ones(channels, **options))
        self.sum_ranks: Optional[SumRanks] = None

    def forward(self, x: Tensor, valid: Optional[Tensor] = None) -> Tensor:
        """Normalize rows, in float32 also under autocast.

        Args:
            x: (T, C).
            valid: (T,) bool, False for padding, which does not count. If None, there is no padding.

        Returns:
            (T, C) in the dtype of x.
        """
        x32 = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = self.running_mean
        var = self.running_var
        if self.training:
            mean, var = self._update_statistics(x32, valid)
        return ((x32 - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias).to(x.dtype)

    def _update_statistics(self, x: Tensor, valid: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        """Compute mean and variance (C,) of the keypoints, and update the running statistics.

        The mean is computed first, since a difference of large squares would lose digits.
        """
        sum_ranks = self.sum_ranks or (lambda tensor: tensor)
        weights = torch.ones_like(x[:, :1]) if valid is None else valid.to(x.dtype).unsqueeze(1)
        # One reduction sums the values and the number of keypoints over all ranks.
        sums = sum_ranks(torch.cat([(x * weights).sum(0), weights.sum(0)]))
        count = sums[-1].detach().clamp(min=1.0)
        mean = sums[:-1] / count
        var = sum_ranks(((x - mean).square() * weights).sum(0)) / count
        with torch.no_grad():
            # The step is a tensor, so that the host does not wait for the device.
            step = self.momentum * (sums[-1] > 0).to(sums.dtype)
            # Keep the unbiased variance, as torch's BatchNorm does.
            self.running_mean += step * (mean - self.running_mean)
            self.running_var += step * (var * count / (count - 1).clamp(min=1.0) - self.running_var)
        return mean, var


NORMS = {"layer": LayerNorm, "batch": TokenBatchNorm}  # norms of hidden layers


def synchronize_batch_norms(model: nn.Module, sum_ranks: Optional[SumRanks]) -> None:
    """Let every TokenBatchNorm of a network compute its statistics over all ranks.

    Args:
        model: the network.
        sum_ranks: sums a tensor over all ranks. If None, each rank has its own statistics.
    """
    for module in model.modules():
        if isinstance(module, TokenBatchNorm):
            module.sum_ranks = sum_ranks
