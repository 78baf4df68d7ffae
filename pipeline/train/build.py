"""Build what is trained: the network, its initial weights, the loss, the optimizer."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import List, Optional, Tuple

import torch
from torch import nn

from pipeline import distributed
from pipeline.errors import RequestError
from pipeline.keypoints.store import KeypointStore
from pipeline.params import RunParams, TrainParams
from pipeline.train.checkpoint import Saved, TrainState
from pipeline.train.loss import MatchingObjective
from pipeline.train.optimizer import PORTABLE, freeze_parameters, make_optimizer
from superglue_sift import torch_compat
from superglue_sift.features.extractors import descriptor_kind
from superglue_sift.network.perceptron import synchronize_batch_norms
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.network.weights import BadCheckpoint, load_model_file, select_weights


def count_pairs_per_step(train: TrainParams, run: RunParams, world_size: int) -> int:
    """Return the number of pairs of one step over all ranks."""
    return run.batch_per_rank * world_size or train.batch


def read_initial_model(path: Path) -> Saved:
    """Return the tensors and the description of the initial weights. Raises RequestError."""
    try:
        return load_model_file(path)
    except (FileNotFoundError, BadCheckpoint) as error:
        raise RequestError(f"train.init_from: {error}") from None


def seed_torch(number: int, deterministic: bool) -> None:
    """Seed torch on every device, for the initial weights.

    With `deterministic`, also ask torch and cuBLAS for reproducible kernels, which are slower on a
    GPU. All other random numbers come from generators of their own (seed, epoch, index).
    """
    torch.manual_seed(number)
    if deterministic:
        # cuBLAS reads it when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def make_network(
    train: TrainParams,
    run: RunParams,
    context: distributed.Context,
    store: Optional[KeypointStore] = None,
) -> SuperGlue:
    """Return the untrained network, on the device, with weights that `train.seed` decides.

    `store` has the keypoints that it is for. If it is None, these are SIFT keypoints.
    """
    portable_gpu = train.precision == PORTABLE and context.device.type == "cuda"
    seed_torch(train.seed, run.deterministic or portable_gpu)
    values = train.model_dump(include={field.name for field in dataclasses.fields(SuperGlueConfig)})
    values["scale_angle"] = store is None or store.scale_angle
    if store is not None:
        kind, dim = descriptor_kind(store.dtype)
        values.update(extractor=store.extractor, descriptor=kind, descriptor_dim=dim)
    return SuperGlue(SuperGlueConfig(**values)).to(context.device)


def load_initial_weights(model: SuperGlue, path: str) -> Tuple[bool, Optional[float], List[str]]:
    """Load the tensors of the model file `path` that fit.

    Returns:
        Whether `model` now is the model of the file: every tensor was taken, and every value of the
        configuration that acts on a match is equal. Then the file's match threshold, or None. It is
        None, too, if `model` is another model, for which that threshold says nothing. Then lines to
        print about what was taken and what does not fit.
    """
    tensors, info = read_initial_model(Path(path))
    stored = select_weights(tensors)
    weights = model.state_dict()
    # Take each tensor whose name and shape the network has, too.
    taken = {n: t for n, t in stored.items() if n in weights and t.shape == weights[n].shape}
    model.load_state_dict({**weights, **taken})
    messages = [f"initial weights from {path}: {len(taken)} tensors taken"]
    # Say what did not fit, and which configuration would make it fit.
    left = [name for name in weights if name not in taken]
    if left:
        messages.append(f"  not there, or of another shape: {', '.join(left)}")
    theirs = info.get("model", {})
    other = [
        f"{name}: {theirs[name]}"
        for name, value in model.config.to_dict().items()
        if theirs.get(name, value) != value
    ]
    if other:
        messages.append(f"  they were trained with {', '.join(other)}")
    acting = [text for text in other if not text.startswith("sinkhorn_iterations")]
    whole = not acting and stored.keys() == weights.keys() and not left
    if not whole:
        messages.append("  they are taken in part: validation never keeps the weights of step 0")
    return whole, info.get("match_threshold") if whole else None, messages


def build_objective_and_state(
    model: SuperGlue,
    train: TrainParams,
    run: RunParams,
    context: distributed.Context,
    precision: str,
) -> Tuple[MatchingObjective, nn.Module, TrainState]:
    """Build what trains `model`, which is the same on every rank.

    `precision` is "float32", "bfloat16" or "float16". Returns the objective, its parallel wrapper,
    which a step calls, and the state that a checkpoint holds. Raises RequestError if the layers
    cannot be compiled here.
    """
    missing = torch_compat.describe_missing_compiler(context.device.type) if run.compile else ""
    if missing:
        raise RequestError(
            f"run.compile = true: {missing}; install it, or set run.compile to false"
        )
    freeze_parameters(model, train.freeze)
    model.recompute = run.checkpoint_layers
    synchronize_batch_norms(model, distributed.sum_with_gradient)
    objective = MatchingObjective(model, precision)
    if run.compile:
        model.compile_layers()
        # -(-a // b) is a / b rounded up: compiled code needs one size for all batches
        pairs = -(-count_pairs_per_step(train, run, context.world_size) // context.world_size)
        objective.fixed_size = (-(-pairs // run.accumulate), train.max_keypoints)
    scaler = torch_compat.make_grad_scaler(precision == "float16")
    state = TrainState(model, make_optimizer(train, model), scaler)
    return objective, distributed.wrap_in_ddp(objective), state
