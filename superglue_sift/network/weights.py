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
from typing import Any, Dict, Mapping, Tuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor, nn

from superglue_sift.errors import RequestError
from superglue_sift.files import FileName, write_atomic
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig, TokenBatchNorm

FORMAT = "superglue-sift/1"  # the header has one key, since safetensors does not keep an order
THRESHOLD = 0.2  # probability of a match for models that state none (SuperGlue, section 5)
SHIPPED = Path("pretrained") / "superglue-sift.safetensors"
Tensors = Dict[str, Tensor]


class BadCheckpoint(RequestError):
    """A model file is truncated, altered or foreign. The message names the file and the reason."""


def _digest(arrays: Mapping[str, np.ndarray], text: str) -> str:
    """Compute the hex SHA-256 of the description and of names, dtypes, shapes and values."""
    digest = hashlib.sha256(text.encode())
    # Safetensors keeps no order, so sort by name.
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def model_file(tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> bytes:
    """Return the bytes of a model file with these tensors and `info` (plain JSON values)."""
    arrays = {name: t.detach().cpu().contiguous().numpy() for name, t in tensors.items()}
    text = json.dumps(info, sort_keys=True)
    header = {FORMAT: json.dumps({"info": text, "sha256": _digest(arrays, text)})}
    return save(arrays, metadata=header)


def save_model_file(path: FileName, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write `info` to a .json, then a `model_file` to `path` (.safetensors). Both have one name.

    Raises:
        OSError: If a file cannot be written.
    """
    path = Path(path)
    text = json.dumps(info, indent=2, sort_keys=True) + "\n"
    # The model comes last: where it exists, its description does.
    write_atomic(path.with_suffix(".json"), text)
    write_atomic(path, model_file(tensors, info))


def load_model_file(path: FileName) -> Tuple[Tensors, Dict[str, Any]]:
    """Read and verify a `model_file`; return its tensors and its `info`.

    Raises:
        FileNotFoundError: If there is no file, and BadCheckpoint if it is damaged or foreign.
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
            names = file.keys()  # the file itself is not iterable
            arrays = {name: file.get_tensor(name) for name in names}
        # Nothing in the file is used before its checksum is verified.
        if _digest(arrays, header["info"]) != header["sha256"]:
            raise ValueError("the checksum does not fit: the file was altered")
        info = json.loads(header["info"])
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, MemoryError) as error:
        raise BadCheckpoint(
            f"{path}: not a model file of this project ({error}); copy it again, or name another"
        ) from error
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, info


def shipped_weights() -> Path:
    """Return the path of the shipped weights, in the installed package or next to it in a clone.

    Raises:
        RequestError: If there are none.
    """
    # An installed package contains the folder, and a clone has it next to the package.
    package = Path(__file__).resolve().parents[1]
    for folder in (package, package.parent):
        if (folder / SHIPPED).is_file():
            return folder / SHIPPED
    fix = "name a trained model file: --model models/superglue.safetensors"
    raise RequestError(f"{package.parent / SHIPPED}: this copy has no weights; {fix}")


def load_model(path: FileName, device: str = "cpu") -> Tuple[SuperGlue, dict]:
    """Load a network in evaluation mode on `device`; return it with its description.

    >>> model, info = load_model(shipped_weights())
    >>> model.config.layers, info["model"]["dim"]
    (9, 128)

    Raises:
        RequestError: If there is no such file, if it is damaged, or if it is not a SuperGlue model.
    """
    try:
        tensors, info = load_model_file(path)
        config = SuperGlueConfig(**info["model"])
        weights = weights_of(tensors)
        # A small file could ask for a network that does not fit the memory, so count its weights
        # before the network is created. Its large matrices are the projection of descriptors, and
        # ten of dim x dim in each of two attention layers: three for query, key and value, one to
        # merge the heads, and six for the MLP.
        least = config.dim * (config.descriptor_dim + 20 * config.layers * config.dim)
        count = sum(tensor.numel() for tensor in weights.values())
        if count < least:
            raise ValueError(f"{count} weights, its configuration needs {least} or more")
        model = SuperGlue(config)
        model.load_state_dict(weights)
    except FileNotFoundError:
        raise RequestError(f"{path}: no such model; train one first, or name another") from None
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(
            f"{path}: not a SuperGlue model of this project ({reason:.200})"
        ) from error
    return model.to(device).eval(), info


def weights_of(tensors: Tensors) -> Tensors:
    """Return the weights in the tensors of a file: `model.*` of a checkpoint, all of a model."""
    prefix = "model."
    named = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
    return named or tensors


def fuse_for_inference(model: SuperGlue, precision: str = "float32") -> SuperGlue:
    """Return a faster copy of `model` for matching.

    In float32 its results are equal up to rounding.

    The merge of the heads is multiplied into the first map of the MLP, since they follow each other
    without a nonlinearity. The layers' weights are cast once to `precision`: float32, bfloat16 or
    float16.
    """
    fused = copy.deepcopy(model).eval().requires_grad_(False)
    layers: Any = fused.layers
    for layer in layers:
        # The columns of the first map that take the message, not the state
        first, norm = layer.mlp[:2]
        merge = layer.merge.double()
        dim = len(merge.weight)
        of_message = first.weight[:, dim:].double()
        first.bias.data += (of_message @ merge.bias).to(first.bias.dtype)
        first.weight.data[:, dim:] = of_message @ merge.weight
        layer.merge = nn.Identity()
        layer.to(getattr(torch, precision))
        if isinstance(norm, TokenBatchNorm):
            norm.float()  # it computes in float32, from statistics that need its digits
    return fused


def match_threshold(info: Mapping[str, Any]) -> float:
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
    """Resolve "auto" to "cuda" if available, else "cpu".

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
