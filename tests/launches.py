"""Count the kernels that a training step launches on a GPU, without a GPU.

A step on tensors of the device `meta`, which have shapes and no memory, takes a GPU's path through
the code, and a dispatch mode sees its operators. An operator counts as one launch, one over a list
of tensors as many as torch's kernel for lists needs, attention as one like the fused kernels; views
and allocations count as none.
"""

import collections
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.compat import grad_scaler
from pipeline.train import trainer
from pipeline.train.loss import MatchingObjective
from pipeline.train.optimizer import Muon
from superglue_sift.features.sift import ORIENTED
from superglue_sift.network import superglue
from superglue_sift.network.batch import PairBatch
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

META = torch.device("meta")
# Beside operators that torch itself declares as views
NO_LAUNCH = "_unsafe_view lift_fresh empty empty_like empty_strided new_empty new_empty_strided"
# Tensors of each list that one launch of a kernel over 1, 2, ... lists takes (torch's
# MultiTensorApply.cuh).
TENSORS_OF_A_LAUNCH = (110, 64, 48, 36, 30)


class Launches(TorchDispatchMode):
    """Counts launches by operator; a read from the device is an error, because `meta` tensors have
    no memory.
    """

    def __init__(self):
        super().__init__()
        self.counted = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found = function(*arguments, **(keywords or {}))
        first = _first(found)
        if first is None:
            first = _first(arguments)
        name = str(function).split(".")[1]
        launches = not function.is_view and name not in NO_LAUNCH.split()
        if first is not None and first.device == META and launches:
            self.counted[name] += _launches(name, arguments, found)
        return found


def _first(values):
    while isinstance(values, (list, tuple)) and values:
        values = values[0]
    return values if isinstance(values, Tensor) else None


def _launches(name, arguments, found):
    if not name.startswith("_foreach"):
        return 1
    lists = [
        each
        for each in (*arguments, found)
        if isinstance(each, (list, tuple)) and _first(each) is not None
    ]
    return -(-len(lists[0]) // TENSORS_OF_A_LAUNCH[min(len(lists), len(TENSORS_OF_A_LAUNCH)) - 1])


class _Attention(torch.autograd.Function):
    """The shapes of attention, in one launch."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        B, H, N, d = q.shape
        return q.new_zeros((B, N, H, d)).transpose(1, 2)  # the kernels' order in memory

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        return torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)


def batch_of(counts):
    """Pairs of views of `counts` keypoints each, on `meta`."""
    records = [
        torch.empty((len(counts), max(counts), ORIENTED.itemsize), dtype=torch.uint8, device=META)
        for _ in "01"
    ]
    sizes = [torch.empty((len(counts), 2), device=META) for _ in "01"]
    H = torch.empty((len(counts), 3, 3), dtype=torch.float64, device=META)
    return PairBatch(*records, torch.tensor(counts), torch.tensor(counts), *sizes, H)


def launches_of_a_step(counts, make_optimizer=None, scaler=None):
    """Network, truth, loss, gradient, clipping and optimizer (Muon): D = 128, 9 + 9 layers,
    neighbours, T = 30.
    """
    config = SuperGlueConfig(neighbours=True, sinkhorn_iterations=30)
    model = SuperGlue(config).to(META).train()
    objective = MatchingObjective(model)
    optimizer = make_optimizer(model) if make_optimizer else Muon(model, lr=0.1)
    scaler = scaler or grad_scaler(False)
    batch = batch_of(counts)
    counting = Launches()
    stand_in = mock.patch.object(
        superglue, "attention", lambda q, k, v, visible: _Attention.apply(q, k, v)
    )
    # clipping works on lists of tensors on a GPU, on `meta` one by one
    lists = mock.patch("torch.nn.utils.clip_grad._has_foreach_support", return_value=True)
    with stand_in, lists:
        for _ in range(2):  # the first step creates the optimiser's state
            counting.counted.clear()
            with counting:
                optimizer.zero_grad()
                _, values = trainer.backward(objective, scaler, [batch], 1.0, False)
                trainer.clip_and_sum(values, optimizer, scaler)
                optimizer.step()
                scaler.update()
    return counting.counted
