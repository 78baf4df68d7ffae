"""A trained matcher from its file, ready to use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Dict, Optional, Tuple

import torch

from pipeline.errors import RequestError
from pipeline.matching.superglue import SuperGlue, SuperGlueConfig
from pipeline.runtime import checkpoint
from pipeline.stack import exact_float32


def load_model(
    path: Path, device: str = "cpu", sinkhorn_iterations: Optional[int] = None
) -> Tuple[SuperGlue, dict]:
    """The network in evaluation mode on `device`, and the description stored beside it.

    sinkhorn_iterations: replaces the number the model was trained with.
    Raises RequestError: no such file, damaged, or not a SuperGlue of this project.
    """
    path = Path(path)
    if not path.is_file():
        raise RequestError(
            f"{path}: no such model; train one with `make repro`, or name one with --model FILE.safetensors"
        )
    try:
        tensors, info = checkpoint.load_model_file(path)
    except checkpoint.BadCheckpoint as error:
        raise RequestError(str(error)) from error
    try:
        config = SuperGlueConfig(**info["model"])
        model = SuperGlue(config)
        model.load_state_dict(weights_of(tensors))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(f"{path}: not a SuperGlue model of this project ({reason})") from error
    if sinkhorn_iterations:
        model.config = dataclasses.replace(config, sinkhorn_iterations=sinkhorn_iterations)
    return model.to(device).eval(), info


def weights_of(tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """The network's weights in a file: all of a model's, those to ship of a training checkpoint.

    A checkpoint keeps them as `model.*`, and a moving average, where there is one, as `average.*`.
    """
    weights = {name[len("model.") :]: value for name, value in tensors.items() if name.startswith("model.")}
    average = {
        name[len("average.") :]: value for name, value in tensors.items() if name.startswith("average.")
    }
    return {**weights, **average} or tensors


def choose_device(name: str) -> str:
    """'auto' -> 'cuda' where there is one, else 'cpu'. Raises RequestError for one this machine lacks."""
    exact_float32()
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise RequestError(f"--device {name}: not available here ({str(error).splitlines()[0]})") from error
    return name
