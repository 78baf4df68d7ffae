"""Optimiser, learning rate as a function of the step, and the moving average of the weights."""

from __future__ import annotations

import fnmatch
import math
from typing import Dict, List, Sequence

import torch
from torch import Tensor, nn

from pipeline import compat
from pipeline.errors import RequestError
from pipeline.parameters.schema import TrainParams
from pipeline.train.muon import Muon
from superglue_sift.network.superglue import SuperGlue

# The paper's decay, 0.999998 for each step after 200,000, at any length: so much in `decay_start` steps.
DECAY = math.exp(-0.4)
ADAMW_DECAY = 0.01  # torch's


def learning_rate(train: TrainParams, step: int, world_size: int = 1) -> float:
    """Learning rate of global step 0, 1, 2, ...; no state, so a resumed run has it right.

    `constant_decay` is the paper's: constant, then from `decay_start` on exponential. `cosine` falls to 0 at the last
    step; `wsd` is constant until `decay_start`, then falls linearly to 0. Each rises linearly over `warmup_steps`
    first. `lr_scaling` grows it with the number of processes (Goyal 2017 for linear), for `batch_per_rank`.
    """
    factor = {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[train.lr_scaling]
    if step < train.warmup_steps:
        return train.lr * factor * (step + 1) / train.warmup_steps
    if train.schedule == "constant_decay":
        return train.lr * factor * DECAY ** (max(0, step - train.decay_start) / max(1, train.decay_start))
    if train.schedule == "wsd":
        left = (train.steps - step) / max(1, train.steps - train.decay_start)
        return train.lr * factor * min(1.0, left)
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    return train.lr * factor * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def freeze(model: nn.Module, patterns: Sequence[str]) -> List[str]:
    """Stop training of the parameters whose name fits one of the shell-style `patterns`; their names.

    RequestError where a pattern fits no parameter.
    """
    parameters = dict(model.named_parameters())
    frozen = set()
    for pattern in patterns:
        fitting = fnmatch.filter(parameters, pattern)
        if not fitting:
            some = ", ".join(list(parameters)[:3])
            raise RequestError(f"train.freeze: {pattern!r} fits no parameter; names look like {some}")
        frozen.update(fitting)
    for name in frozen:
        parameters[name].requires_grad_(False)
    return sorted(frozen)


def make_optimizer(train: TrainParams, model: SuperGlue) -> torch.optim.Optimizer:
    """Adam, AdamW, Muon or SGD (momentum 0.9) over the parameters that train."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise RequestError("train.freeze: no parameter is left to train")
    if train.optimizer == "muon":
        return Muon(model, train.lr, alone=train.bitwise_elastic)
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=train.lr, momentum=0.9)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[train.optimizer]
    decay = {"weight_decay": ADAMW_DECAY} if train.optimizer == "adamw" else {}
    return kind(parameters, lr=train.lr, **decay, **compat.fused_adam())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Dict[str, Tensor]:
    """The optimiser's memory as named tensors: `<parameter index>.<what>`."""
    state = optimizer.state_dict()["state"]
    named = ((f"{index}.{name}", value) for index, values in state.items() for name, value in values.items())
    return {name: torch.as_tensor(value) for name, value in named if value is not None}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Dict[str, Tensor]) -> None:
    """Give `optimizer` the memory that `optimizer_tensors` took."""
    state: Dict[int, dict] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        # torch 1.10 keeps Adam's step as a plain number, later versions as a tensor
        plain = name == "step" and not hasattr(torch, "compile")
        state.setdefault(int(index), {})[name] = int(tensor.item()) if plain else tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class MovingAverage:
    """Exponential moving average of a model's parameters and buffers; decay 0 keeps none."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {k: v.detach().clone() for k, v in model.state_dict().items()} if decay > 0 else {}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Move towards the model after global step `step`; the first steps weigh more, so that the start fades."""
        if not self.values:
            return
        decay = min(self.decay, (1 + step) / (10 + step))
        own = model.state_dict()
        compat.lerp_(list(self.values.values()), [own[name] for name in self.values], 1 - decay)

    def restore(self, values: Dict[str, Tensor]) -> None:
        """Take over saved averages."""
        for name, value in values.items():
            self.values[name].copy_(value)
