"""Optimiser, and the learning rate as a function of the step."""

from __future__ import annotations

import fnmatch
import math
from typing import Any, Dict, List, Sequence

import torch
from torch import Tensor, nn

from pipeline import compat
from pipeline.errors import RequestError
from pipeline.params import TrainParams
from pipeline.train.muon import Muon
from superglue_sift.network.superglue import SuperGlue

# The paper's decay, 0.999998 per step after step 200,000: by this factor in `decay_start` steps.
DECAY = math.exp(-0.4)


def learning_rate(train: TrainParams, step: int, world_size: int = 1) -> float:
    """Learning rate of global step 0, 1, 2, ..., a function of the step alone.

    `constant_decay` is the paper's: constant, then exponential from `decay_start` on. `cosine`
    falls to 0 at the last step; `wsd` is constant until `decay_start`, then falls linearly to 0.
    Each starts with a linear warm-up over `warmup_steps`. `lr_scaling` scales it with the number of
    processes (linear: Goyal 2017), for `batch_per_rank`.
    """
    scales = {"none": 1.0, "linear": world_size, "sqrt": math.sqrt(world_size)}
    lr = train.lr * scales[train.lr_scaling]
    if step < train.warmup_steps:
        return lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant_decay":
        return lr * DECAY ** (max(0, step - train.decay_start) / max(1, train.decay_start))
    if train.schedule == "wsd":
        return lr * min(1.0, (train.steps - step) / max(1, train.steps - train.decay_start))
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    return lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def freeze(model: nn.Module, patterns: Sequence[str]) -> List[str]:
    """Freeze the parameters whose names match one of the shell-style `patterns`. Returns their
    names.

    Raises RequestError if a pattern matches no parameter.
    """
    parameters = dict(model.named_parameters())
    frozen = set()
    for pattern in patterns:
        matching = fnmatch.filter(parameters, pattern)
        if not matching:
            some = ", ".join(list(parameters)[:3])
            raise RequestError(
                f"train.freeze: {pattern!r} fits no parameter; names look like {some}"
            )
        frozen.update(matching)
    for name in frozen:
        parameters[name].requires_grad_(False)
    return sorted(frozen)


def make_optimizer(train: TrainParams, model: SuperGlue) -> torch.optim.Optimizer:
    """Adam, Muon or SGD (momentum 0.9) over the parameters that are not frozen."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise RequestError("train.freeze: no parameter is left to train")
    if train.optimizer == "muon":
        return Muon(model, train.lr)
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=train.lr, momentum=0.9)
    options: Any = compat.fused_adam()
    return torch.optim.Adam(parameters, lr=train.lr, **options)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Dict[str, Tensor]:
    """The optimiser's state as named tensors: `<parameter index>.<name>`."""
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Dict[str, Tensor]) -> None:
    """Restore the state that `optimizer_tensors` returned."""
    state: Dict[int, dict] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        # Adam's step is a number in torch 1.10, a tensor in later versions
        plain = name == "step" and not hasattr(torch, "compile")
        state.setdefault(int(index), {})[name] = int(tensor.item()) if plain else tensor
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
