"""Model files: safetensors with their JSON inside, verified when read; and a trained network from one.

Tensors, and in the header the JSON that says what they are and a SHA-256 over both. A file that is torn, flipped or
not ours is recognised before anything of it is used, and nothing in it can run code. The `.json` beside it repeats the
JSON for people and tools.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, Union

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from superglue_sift.errors import RequestError
from superglue_sift.files import nothing, write_atomic
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.torch_compat import exact_float32

FORMAT = "superglue-sift/1"  # the one key of the header: several would come in no fixed order
SHIPPED = Path("pretrained") / "superglue-sift.safetensors"
Tensors = Dict[str, Tensor]


class BadCheckpoint(Exception):
    """The file is torn, altered, or was not written by this project. The message names file and reason."""


def _digest(arrays: Mapping[str, np.ndarray], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def model_file(tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> bytes:
    """The bytes of a model file with these tensors and `info` (plain JSON values)."""
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    text = json.dumps(info, sort_keys=True)
    header = {FORMAT: json.dumps({"info": text, "sha256": _digest(arrays, text)})}
    return save({k: np.asarray(a, order="C") for k, a in arrays.items()}, metadata=header)


def save_model_file(
    path: Union[str, Path],
    tensors: Mapping[str, Tensor],
    info: Mapping[str, Any],
    at: Callable[[str], object] = nothing,
) -> None:
    """Write a `model_file` to `path` (.safetensors), atomically, and `info` beside it as .json.

    at: see `write_atomic`.
    """
    path, text = Path(path), json.dumps(info, indent=2, sort_keys=True) + "\n"
    for file, content in ((path, model_file(tensors, info)), (path.with_suffix(".json"), text)):
        write_atomic(file, content, at)


def load_model_file(path: Union[str, Path]) -> Tuple[Tensors, Dict[str, Any]]:
    """Read and verify a `model_file`. Raises FileNotFoundError, or BadCheckpoint: it is not whole and as written."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            if FORMAT not in metadata:
                raise BadCheckpoint(f"{path}: not a model file of this project: its header lacks {FORMAT}")
            header = json.loads(metadata[FORMAT])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not iterable)
        if _digest(arrays, header["info"]) != header["sha256"]:
            raise BadCheckpoint(f"{path}: the checksum does not fit: the file was altered after it was written")
        info = json.loads(header["info"])
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, MemoryError) as error:
        raise BadCheckpoint(f"{path}: not readable as safetensors ({error})") from error
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, info


def shipped_weights() -> Path:
    """The weights that come with the library: in its folder where it was installed, beside it in a clone."""
    package = Path(__file__).resolve().parent
    for folder in (package, package.parent):
        if (folder / SHIPPED).is_file():
            return folder / SHIPPED
    trained = "name a model file (one that was trained: --model models/superglue.safetensors)"
    raise RequestError(f"{package.parent / SHIPPED}: no weights came with this copy; {trained}")


def load_model(
    path: Union[str, Path], device: str = "cpu", sinkhorn_iterations: Optional[int] = None
) -> Tuple[SuperGlue, dict]:
    """The network in evaluation mode on `device`, and the description stored beside it.

    sinkhorn_iterations: other than the model's. RequestError: no such file, damaged, or no SuperGlue of this project.
    """
    try:
        tensors, info = load_model_file(path)
        config = SuperGlueConfig(**info["model"])
        weights = weights_of(tensors)
        _check_shapes(config, weights)
        model = SuperGlue(config)
        model.load_state_dict(weights)
    except FileNotFoundError:
        other = "train one first, or name another with --model FILE.safetensors"
        raise RequestError(f"{path}: no such model; {other}") from None
    except BadCheckpoint as error:
        raise RequestError(str(error)) from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(f"{path}: not a SuperGlue model of this project ({reason})") from error
    if sinkhorn_iterations:
        model.config = dataclasses.replace(config, sinkhorn_iterations=sinkhorn_iterations)
    return model.to(device).eval(), info


def _check_shapes(config: SuperGlueConfig, weights: Tensors) -> None:
    """ValueError where a network of this configuration would be larger than the file, before any of it is made."""
    expected = {"descriptor_projection.weight": (config.dim, config.descriptor_dim)}
    for layer, kind in itertools.product(range(config.layers), ("self", "cross")):
        expected[f"{kind}_attention.{layer}.query_key_value.weight"] = (3 * config.dim, config.dim)
    for name, shape in expected.items():
        found = tuple(weights[name].shape) if name in weights else "nothing"
        if found != shape:
            raise ValueError(f"{name}: has {found}, its configuration says {shape}")


def weights_of(tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """The network's weights in a file: all of a model; of a checkpoint `model.*`, or their moving `average.*`."""
    weights = {name[len("model.") :]: value for name, value in tensors.items() if name.startswith("model.")}
    average = {name[len("average.") :]: value for name, value in tensors.items() if name.startswith("average.")}
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
