"""Choose the optimizer of a training, its learning rate, and the precision of the network's layers.

Muon (Jordan et al. 2024) takes steps along the orthogonalized momentum of a matrix. They have the
size of Adam's steps (Liu et al. 2025, arXiv 2502.16982, section 2.2), so one learning rate serves
the matrices of the attention layers and all other parameters, which Adam optimizes. The version of
torch (from 2.9 on) computes in bfloat16, and orthogonalizes whole parameters. This one computes in
float32, and splits stacked parameters such as query, key and value.
"""

from __future__ import annotations

import fnmatch
import math
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import Tensor, nn

from pipeline import distributed
from pipeline.errors import RequestError
from pipeline.params import RunParams, TrainParams
from superglue_sift import torch_compat
from superglue_sift.network.superglue import SuperGlue
from superglue_sift.torch_compat import sqrt

# The learning rate falls by this factor in `decay_start` steps. The paper's decay is 0.999998 per
# step from step 200,000 on, and 0.999998 ** 200,000 = exp(-0.4).
DECAY = math.exp(-0.4)

# Coefficients of a Newton-Schulz iteration of degree five, from Jordan's report. Singular values
# end between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
ADAM_RMS = 0.2  # Root mean square of a typical step of Adam, divided by its learning rate
MOMENTUM = 0.95
BETAS = (0.9, 0.999)
EPS = 1e-8

# Compute capabilities from which GPUs have matrix units for bfloat16 and for float16.
AMPERE = (8, 0)
VOLTA = (7, 0)
PORTABLE = "portable"

FOREACH: Any = torch  # The stubs lack its operators over lists of tensors

Parameters = List[Any]  # Each has a gradient, which the stubs do not know
# Type of a device, the precisions that are fast on it, and a reason.
Abilities = Tuple[str, Tuple[str, ...], str]
Precision = Tuple[str, str]  # A precision (float32, bfloat16 or float16), and why it was chosen


def compute_learning_rate(
    train: TrainParams, run: RunParams, step: int, world_size: int = 1
) -> float:
    """Return the learning rate of global step 0, 1, 2, ..., a function of the step alone.

    The rate begins with a linear warm-up over `warmup_steps`. The schedule `constant_decay` is the
    one of the paper: constant, then exponential from `decay_start` on. `cosine` falls to 0 at the
    last step. `wsd` is constant until `decay_start`, then falls linearly to 0. `run.lr_scaling`
    scales the rate with the number of processes (linear: Goyal 2017), for `run.batch_per_rank`.

    Args:
        train: the section `train`.
        run: the section `run`.
        step: number of steps so far.
        world_size: number of processes.
    """
    scales = {"none": 1.0, "linear": world_size, "sqrt": math.sqrt(world_size)}
    lr = train.lr * scales[run.lr_scaling]
    if step < train.warmup_steps:
        return lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant_decay":
        return lr * DECAY ** (max(0, step - train.decay_start) / max(1, train.decay_start))
    if train.schedule == "wsd":
        return lr * min(1.0, (train.steps - step) / max(1, train.steps - train.decay_start))
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    return lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match one of the patterns.

    Args:
        model: the network, whose parameters change.
        patterns: patterns of names, as a shell has them for files.

    Raises:
        RequestError: If a pattern matches no parameter.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matching = fnmatch.filter(parameters, pattern)
        if not matching:
            examples = ", ".join(list(parameters)[:3])
            raise RequestError(
                f"train.freeze: {pattern!r} fits no parameter; names look like {examples}"
            )
        for name in matching:
            parameters[name].requires_grad_(False)


def make_optimizer(train: TrainParams, model: SuperGlue) -> torch.optim.Optimizer:
    """Make Adam, Muon or SGD (momentum 0.9) for the parameters that are not frozen.

    Raises:
        RequestError: If all parameters are frozen.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise RequestError("train.freeze: no parameter is left to train")
    if train.optimizer == "muon":
        return Muon(model, train.lr)
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=train.lr, momentum=0.9)
    options: Any = torch_compat.get_fused_adam_options()
    return torch.optim.Adam(parameters, lr=train.lr, **options)


def collect_optimizer_tensors(optimizer: torch.optim.Optimizer) -> Dict[str, Tensor]:
    """Return the state of an optimizer as tensors. A name is `<index of parameter>.<name>`."""
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Dict[str, Tensor]) -> None:
    """Set the state of an optimizer to what `collect_optimizer_tensors` returned."""
    state: Dict[int, dict] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        value = torch_compat.restore_optimizer_value(name, tensor)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return approximately the nearest (semi-)orthogonal matrix of each matrix (K, A, B).

    The singular values of the result lie near 1.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    # The iteration converges for singular values of at most 1, which division by the norm ensures.
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


def cut_into_blocks(matrix: Tensor, width: int) -> Tensor:
    """Cut matrices (..., A, B), whose sides `width` divides, into squares (K, width, width)."""
    # (..., rows, width, columns, width)
    cut = matrix.unflatten(-1, (-1, width)).unflatten(-3, (-1, width))
    return cut.transpose(-3, -2).reshape(-1, width, width)


def join_blocks(squares: Tensor, shape: torch.Size) -> Tensor:
    """Join squares (K, width, width) to matrices of `shape` (..., A, B), as before the cut."""
    width = squares.shape[1]
    cut = squares.view(*shape[:-2], shape[-2] // width, shape[-1] // width, width, width)
    return cut.transpose(-3, -2).reshape(shape)


class Muon(torch.optim.Optimizer):
    """Muon for the weights of a SuperGlue's attention layers, and Adam for all other parameters.

    Both use the learning rate `lr`. The ranks share the work of Muon.
    """

    def __init__(self, model: SuperGlue, lr: float) -> None:
        self.width = model.config.dim  # The matrices of the layers consist of squares of this side
        groups_by_method: Dict[bool, List[nn.Parameter]] = {True: [], False: []}
        for name, p in model.named_parameters():
            if p.requires_grad:
                groups_by_method["attention" in name and p.ndim == 2].append(p)
        groups = [
            {"params": params, "muon": muon} for muon, params in groups_by_method.items() if params
        ]
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Do one step of all parameters that have a gradient."""
        for group in self.param_groups:
            update = self._step_muon if group["muon"] else self._step_adam
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                update(parameters, group["lr"])

    def _step_muon(self, parameters: Parameters, lr: float) -> None:
        by_shape: Dict[torch.Size, Parameters] = {}
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            by_shape.setdefault(p.shape, []).append(p)
        momenta = [self.state[p]["momentum_buffer"] for p in parameters]
        torch_compat.interpolate_in_place(momenta, [p.grad for p in parameters], 1 - MOMENTUM)
        directions = []
        # One stack for each shape needs fewer launches of kernels.
        for same_shape in by_shape.values():
            buffers = torch.stack([self.state[p]["momentum_buffer"] for p in same_shape])
            nesterov = torch.stack([p.grad for p in same_shape]).lerp_(buffers, MOMENTUM)
            directions.append(cut_into_blocks(nesterov, self.width))
        # (K, width, width): the squares of all shapes together. Each rank orthogonalizes a part.
        steps = distributed.map_rows_over_ranks(orthogonalize, torch.cat(directions))
        sizes = [len(squares) for squares in directions]
        for same_shape, squares in zip(by_shape.values(), steps.split(sizes)):
            updates = join_blocks(squares, torch.Size((len(same_shape), *same_shape[0].shape)))
            FOREACH._foreach_add_(
                same_shape, list(updates.unbind()), alpha=-lr * ADAM_RMS * math.sqrt(self.width)
            )

    def _step_adam(self, parameters: Parameters, lr: float) -> None:
        gradients = [p.grad for p in parameters]
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states):
            if not state:
                state.update(step=0.0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            # The step is a tensor after `load_state_dict`.
            state["step"] = float(state["step"]) + 1
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch_compat.interpolate_in_place(means, gradients, 1 - BETAS[0])
        FOREACH._foreach_mul_(squares, BETAS[1])
        FOREACH._foreach_addcmul_(squares, gradients, gradients, 1 - BETAS[1])
        denominators = FOREACH._foreach_div(
            squares, [1 - BETAS[1] ** state["step"] for state in states]
        )
        # Take the roots in one tensor: the bits of `_foreach_sqrt_` differ between processors.
        roots = sqrt(torch.cat([denominator.flatten() for denominator in denominators]))
        parts = roots.split([denominator.numel() for denominator in denominators])
        denominators = [part.view_as(denominator) for part, denominator in zip(parts, denominators)]
        FOREACH._foreach_add_(denominators, EPS)
        FOREACH._foreach_addcdiv_(
            parameters,
            means,
            denominators,
            [-lr / (1 - BETAS[0] ** state["step"]) for state in states],
        )


def detect_abilities(device: torch.device) -> Abilities:
    """Return the type of a device, the precisions that are fast on it (the best first), and why."""
    if device.type == "cpu":
        # AMX multiplies bfloat16 faster than float32. Vector units (AVX512) do so on some
        # processors, and on others bfloat16 takes 1.65 times as long. The choice follows a rule. A
        # measurement would give another result each time on a busy machine, and so other weights.
        if torch_compat.has_amx():
            return "cpu", ("bfloat16", "float32"), "this CPU has AMX"
        return "cpu", ("float32",), "this CPU, or this torch, has no AMX"
    capability = torch.cuda.get_device_capability(device)
    reason = "compute capability {}.{}".format(*capability)
    if capability >= AMPERE:
        return device.type, ("bfloat16", "float16", "float32"), reason
    return device.type, ("float16", "float32") if capability >= VOLTA else ("float32",), reason


def choose_precision(precision: str, abilities: Sequence[Abilities]) -> Precision:
    """Return the precision in which the ranks compute, and why.

    All ranks have one precision, because they compute one gradient. For "auto" it is the best one
    that is fast on every device.

    Args:
        precision: the key `train.precision`: "auto", "portable", "float32", "bfloat16" or
            "float16".
        abilities: `detect_abilities` of the device of each rank.

    Raises:
        RequestError: If `precision` is "bfloat16", and a rank has a GPU before Ampere.
    """
    device_types = {device_type for device_type, _, _ in abilities}
    if precision == PORTABLE:
        machines = "x86-64 processor with AVX2" if device_types == {"cpu"} else "GPU of this kind"
        return "float32", f"portable: the same bytes on every {machines}"
    if precision == "float16" and "cpu" in device_types:
        return "float32", "train.precision: float16 does nothing on a CPU; set auto"
    if precision == "bfloat16":
        for rank, (device_type, fast, reason) in enumerate(abilities):
            if device_type != "cpu" and precision not in fast:
                raise RequestError(
                    "train.precision: bfloat16 needs a GPU of compute capability 8.0 (Ampere) or"
                    f" newer, that of rank {rank} has {reason}: set float16, or auto"
                )
    if precision != "auto":
        return precision, "as train.precision asks"
    common_precisions = [
        name for name in abilities[0][1] if all(name in fast for _, fast, _ in abilities)
    ]
    reasons = list(dict.fromkeys(reason for _, _, reason in abilities))
    best_of_all = ", the best of all ranks" if len(reasons) > 1 else ""
    return common_precisions[0], f"auto: {', '.join(reasons)}{best_of_all}"
