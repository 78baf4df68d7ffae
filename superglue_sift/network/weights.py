"""Write and read model files, and load a trained network.

A model file is safetensors. Its header holds a JSON description and a SHA-256 of the description
and the tensors. A truncated, altered or foreign file is rejected before it is used, and nothing in
a file can run code. A `.json` of the same name repeats the description for people and tools.
"""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Tuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor, nn

from superglue_sift.errors import RequestError
from superglue_sift.files import FileName, write_atomically
from superglue_sift.network.perceptron import TokenBatchNorm
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

# The only key of the header, since safetensors does not keep the order of keys
FORMAT = "superglue-sift/1"
# Minimum probability of a match for models that state none (SuperGlue, section 5)
THRESHOLD = 0.2
SHIPPED = Path("pretrained") / "superglue-sift.safetensors"
Tensors = Dict[str, Tensor]


class BadCheckpoint(RequestError):
    """A model file is truncated, altered or foreign. The message names the file and the reason."""


def _compute_sha256(arrays: Mapping[str, np.ndarray], text: str) -> str:
    """Compute the hex SHA-256 of the description and of names, dtypes, shapes and values."""
    sha256 = hashlib.sha256(text.encode())
    # Safetensors keeps no order, so sort by name.
    for name, array in sorted(arrays.items()):
        sha256.update(f"{name} {array.dtype.str} {array.shape}".encode())
        sha256.update(array.tobytes())
    return sha256.hexdigest()


def encode_model_file(tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> bytes:
    """Return the bytes of a model file.

    Args:
        tensors: the tensors by name.
        info: the description, as plain JSON values.
    """
    arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
    text = json.dumps(info, sort_keys=True)
    header = {FORMAT: json.dumps({"info": text, "sha256": _compute_sha256(arrays, text)})}
    return save(arrays, metadata=header)


def save_model_file(path: FileName, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write a model file, and its description as JSON beside it.

    Args:
        path: the model file, which ends in `.safetensors`. The description has the same name with
            `.json`.
        tensors: the tensors by name.
        info: the description, as plain JSON values.

    Raises:
        OSError: If a file cannot be written.
    """
    path = Path(path)
    text = json.dumps(info, indent=2, sort_keys=True) + "\n"
    # The model is written last, so that a model never lacks its description.
    write_atomically(path.with_suffix(".json"), text)
    write_atomically(path, encode_model_file(tensors, info))


class ModelFile(NamedTuple):
    """The content of a model file: a model, or a checkpoint of a training.

    Attributes:
        tensors: the tensors by name.
        info: the description, as JSON values.
    """

    tensors: Tensors
    info: Dict[str, Any]


def load_model_file(path: FileName) -> ModelFile:
    """Read and verify a model file.

    Raises:
        FileNotFoundError: If there is no such file.
        BadCheckpoint: If the file is damaged or foreign.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            if FORMAT not in metadata:
                raise ValueError(f"its header lacks {FORMAT}")
            header = json.loads(metadata[FORMAT])
            names = file.keys()  # The file itself is not iterable.
            arrays = {name: file.get_tensor(name) for name in names}
        # Nothing in the file is used before its checksum is verified.
        if _compute_sha256(arrays, header["info"]) != header["sha256"]:
            raise ValueError("the checksum does not fit: the file was altered")
        info = json.loads(header["info"])
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, MemoryError) as error:
        raise BadCheckpoint(
            f"{path}: not a model file of this project ({error}); copy it again, or name another"
        ) from error
    return ModelFile({name: torch.from_numpy(array) for name, array in arrays.items()}, info)


def find_shipped_weights() -> Path:
    """Return the path of the shipped weights, in the installed package or next to it in a clone.

    Raises:
        RequestError: If there are none.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package, package.parent):
        if (folder / SHIPPED).is_file():
            return folder / SHIPPED
    fix = "name a trained model file: --model models/superglue.safetensors"
    raise RequestError(f"{package.parent / SHIPPED}: this copy has no weights; {fix}")


def load_model(path: FileName, device: str = "cpu") -> Tuple[SuperGlue, dict]:
    """Load a network from a model file or a checkpoint.

    Args:
        path: the file, which ends in `.safetensors`.
        device: where the network goes, such as "cpu" or "cuda:0".

    Returns:
        The network in evaluation mode, and the description of its file.

    Raises:
        RequestError: If there is no such file, if it is damaged, or if it is not a SuperGlue model.

    Example:
        >>> model, info = load_model(find_shipped_weights())
        >>> model.config.layers, info["model"]["dim"]
        (9, 128)
    """
    try:
        tensors, info = load_model_file(path)
        config = SuperGlueConfig(**info["model"])
        weights = select_weights(tensors)
        # A small file could ask for a network that does not fit the memory, so count its weights
        # before the network is created. The large matrices of a network are the projection of
        # descriptors, and ten of dim x dim in each of two attention layers: three for query, key
        # and value, one to merge the heads, and six for the MLP.
        least = config.dim * (config.descriptor_dim + 20 * config.layers * config.dim)
        count = sum(tensor.numel() for tensor in weights.values())
        if count < least:
            raise ValueError(f"{count} weights, its configuration needs {least} or more")
        model = SuperGlue(config)
        model.load_state_dict(weights)
    except FileNotFoundError:
        raise RequestError(f"{path}: no such model; train one first, or name another") from None
    except (KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(
            f"{path}: not a SuperGlue model of this project ({reason:.200})"
        ) from error
    return model.to(device).eval(), info


def select_weights(tensors: Tensors) -> Tensors:
    """Select the weights of the network among the tensors of a file.

    They are `model.*` in a checkpoint, and all tensors in a model file.
    """
    return select_by_prefix(tensors, "model.") or tensors


def select_by_prefix(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with `prefix`, by their names without the prefix."""
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


def fuse_for_inference(model: SuperGlue, precision: str = "float32") -> SuperGlue:
    """Return a faster copy of `model` for matching.

    The linear map that merges the heads is multiplied into the first map of the MLP, since no
    nonlinearity lies between them. In float32 the results are equal up to rounding.

    Args:
        model: the network.
        precision: the weights of the layers are cast to it: float32, bfloat16 or float16.
    """
    fused = copy.deepcopy(model).eval().requires_grad_(False)
    layers: Any = fused.layers
    for layer in layers:
        first, norm = layer.mlp[:2]
        merge = layer.merge.double()
        # The first map takes the state by its first columns, and the message by the others.
        dim = len(merge.weight)
        message_weight = first.weight[:, dim:].double()
        first.bias.data += (message_weight @ merge.bias).to(first.bias.dtype)
        first.weight.data[:, dim:] = message_weight @ merge.weight
        layer.merge = nn.Identity()
        layer.to(getattr(torch, precision))
        if isinstance(norm, TokenBatchNorm):
            norm.float()  # It computes in float32, and its statistics need these digits.
    return fused


def read_match_threshold(info: Mapping[str, Any]) -> float:
    """Return the minimum probability of a match that a model's `info` states, or else THRESHOLD.

    Raises:
        RequestError: For a value that is not a probability.
    """
    value = info.get("match_threshold", THRESHOLD)
    if type(value) not in (int, float) or not 0.0 <= value <= 1.0:
        raise RequestError(
            f"the model's match_threshold is {value!r}: must be between 0 and 1; name another model"
        )
    return float(value)


def choose_device(name: str) -> str:
    """Return the device of a name, and check that it works.

    This turns TF32 off in torch, for all that the process computes.

    Args:
        name: "cpu", "cuda", "cuda:N", or "auto" for "cuda" if there is a GPU, else "cpu".

    Raises:
        RequestError: If this machine lacks the device.
    """
    # torch 1.10 turns TF32 on, which has errors of 0.02 where scores reach 40.
    torch.backends.cuda.matmul.allow_tf32 = False
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(name).type not in ("cpu", "cuda"):
            raise RuntimeError("neither a CPU nor a GPU of NVIDIA or AMD")
        # Only an allocation shows whether the device works.
        torch.zeros(1, dtype=torch.float32, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(
            f"device {name}: not available here; name auto, cpu, cuda or cuda:N ({reason:.80})"
        ) from error
    return name
