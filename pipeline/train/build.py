"""Build what is trained: the network, its initial weights, the loss, the optimizer."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from pipeline import distributed
from pipeline.errors import RequestError
from pipeline.keypoints.store import KeypointStore
from pipeline.params import RunParams, TrainParams
from pipeline.train.checkpoint import TrainState
from pipeline.train.loss import MatchingObjective
from pipeline.train.optimizer import PORTABLE, freeze_parameters, make_optimizer
from superglue_sift import torch_compat
from superglue_sift.network.perceptron import synchronize_batch_norms
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.network.weights import BadCheckpoint, ModelFile, load_model_file, select_weights


def count_pairs_per_step(train: TrainParams, run: RunParams, world_size: int) -> int:
    """Return the number of pairs of one step over all ranks.

    Args:
        train: the section `train`.
        run: the section `run`.
        world_size: number of ranks.
    """
    return run.batch_per_rank * world_size or train.batch


def read_initial_model(path: Path) -> ModelFile:
    """Read the tensors and the description of the initial weights.

    Raises:
        RequestError: If the file is missing or damaged.
    """
    try:
        return load_model_file(path)
    except (FileNotFoundError, BadCheckpoint) as error:
        raise RequestError(f"train.init_from: {error}") from None


def make_network(
    train: TrainParams,
    run: RunParams,
    context: distributed.Context,
    store: Optional[KeypointStore] = None,
) -> SuperGlue:
    """Make the untrained network, on the device, with weights that `train.seed` decides.

    All other random numbers come from separate generators, which seed, epoch and index determine.

    Args:
        train: the section `train`.
        run: the section `run`.
        context: this process among the ranks.
        store: the keypoints that the network is for. If it is None, they are SIFT keypoints.
    """
    torch.manual_seed(train.seed)
    if run.deterministic or (train.precision == PORTABLE and context.device.type == "cuda"):
        # The library cuBLAS reads this variable when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    inputs: Dict[str, Any] = {}
    if store is not None:
        names = ("scale_angle", "extractor", "descriptor", "descriptor_dim")
        inputs = {name: getattr(store, name) for name in names}
    config = SuperGlueConfig(**dataclasses.asdict(train.model), **inputs)
    return SuperGlue(config).to(context.device)


def load_initial_weights(model: SuperGlue, path: str) -> Tuple[bool, Optional[float], List[str]]:
    """Load the tensors of a model file that fit the network.

    Args:
        model: the network, whose weights change.
        path: the model file.

    Returns:
        Three values. The first is whether the network now is the model of the file: every tensor
        was taken, and every value of the configuration that acts on a match is equal. The second is
        the match threshold of the file. It is None if the file has none, or if the network is not
        its model. The third is a list of lines to print, about what was taken and what does not
        fit.

    Raises:
        RequestError: If the file is missing or damaged.
    """
    tensors, info = read_initial_model(Path(path))
    file_weights = select_weights(tensors)
    weights = model.state_dict()
    matching = {
        name: tensor
        for name, tensor in file_weights.items()
        if name in weights and tensor.shape == weights[name].shape
    }
    model.load_state_dict({**weights, **matching})
    messages = [f"initial weights from {path}: {len(matching)} tensors taken"]
    # Say what did not fit, and which configuration would make it fit.
    missing_names = [name for name in weights if name not in matching]
    if missing_names:
        messages.append(f"  not there, or of another shape: {', '.join(missing_names)}")
    file_config = info.get("model", {})
    differences = [
        f"{name}: {file_config[name]}"
        for name, value in model.config.to_dict().items()
        if file_config.get(name, value) != value
    ]
    if differences:
        messages.append(f"  they were trained with {', '.join(differences)}")
    acting_differences = [
        text for text in differences if not text.startswith("sinkhorn_iterations")
    ]
    is_same_model = (
        not acting_differences and file_weights.keys() == weights.keys() and not missing_names
    )
    if not is_same_model:
        messages.append("  they are taken in part: validation never keeps the weights of step 0")
    return is_same_model, info.get("match_threshold") if is_same_model else None, messages


def build_objective_and_state(
    model: SuperGlue,
    train: TrainParams,
    run: RunParams,
    context: distributed.Context,
    precision: str,
) -> Tuple[MatchingObjective, nn.Module, TrainState]:
    """Build what trains a network, which is the same on every rank.

    Args:
        model: the network. Some of its parameters are frozen, and its layers may be compiled.
        train: the section `train`.
        run: the section `run`.
        context: this process among the ranks.
        precision: "float32", "bfloat16" or "float16".

    Returns:
        The objective, the same in DistributedDataParallel, which a step calls, and the state that a
        checkpoint holds.

    Raises:
        RequestError: If nothing is left to train.
    """
    freeze_parameters(model, train.freeze)
    model.recompute = run.checkpoint_layers
    synchronize_batch_norms(model, distributed.sum_with_gradient)
    objective = MatchingObjective(model, precision)
    if run.compile:
        model.compile_layers()
        # Compiled code needs one size for all batches. -(-a // b) is a / b, rounded up.
        pairs = -(-count_pairs_per_step(train, run, context.world_size) // context.world_size)
        objective.fixed_size = (-(-pairs // run.accumulate), train.max_keypoints)
    scaler = torch_compat.make_grad_scaler(precision == "float16")
    state = TrainState(model, make_optimizer(train, model), scaler)
    return objective, distributed.wrap_in_ddp(objective), state
