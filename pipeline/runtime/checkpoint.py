"""Model and checkpoint files: safetensors with their JSON inside, written atomically, verified when read.

One file is one checkpoint: tensors, and in the header the JSON that says what they are and a SHA-256 over
both. A file that is torn, flipped or not ours is recognised before anything of it is used, and nothing in
it can run code. The `.json` beside it repeats the JSON for people; no one reads it back.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple, Union

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from pipeline.files import write_atomic
from pipeline.runtime import faults

FORMAT = "superglue-sift/1"  # the one key of the header: several would come in no fixed order
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


def _write(path: Path, data: bytes) -> None:
    write_atomic(path, data, at=lambda moment: faults.at(f"ckpt_{moment}"))


def save_model_file(path: Union[str, Path], tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write tensors and `info` (plain JSON values) to `path` (.safetensors), and `info` beside it as .json."""
    path = Path(path)
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    text = json.dumps(info, sort_keys=True)
    header = {FORMAT: json.dumps({"info": text, "sha256": _digest(arrays, text)})}
    _write(path, save({k: np.asarray(a, order="C") for k, a in arrays.items()}, metadata=header))
    _write(path.with_suffix(".json"), (json.dumps(info, indent=2, sort_keys=True) + "\n").encode())


def load_model_file(path: Union[str, Path]) -> Tuple[Tensors, Dict[str, Any]]:
    """Read and verify a file of `save_model_file`.

    Raises:
        FileNotFoundError: there is none.
        BadCheckpoint: it is not whole and as it was written.
    """
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
            raise BadCheckpoint(
                f"{path}: the checksum does not fit: the file was altered after it was written"
            )
        info = json.loads(header["info"])
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, MemoryError) as error:
        raise BadCheckpoint(f"{path}: not readable as safetensors ({error})") from error
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, info


class Checkpoints:
    """The checkpoints of one training: `step-00000100.safetensors`, the newest `keep` of them, and `best`."""

    def __init__(self, folder: Union[str, Path], keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep

    def save(self, step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step`, then drop the oldest beyond `keep`. One process at a time writes here."""
        self._drop_halves()
        path = self.folder / f"step-{step:08d}.safetensors"
        save_model_file(path, tensors, info)
        faults.at("ckpt_prune")
        for old in self._newest_first()[self.keep :]:
            old.with_suffix(".json").unlink(missing_ok=True)
            old.unlink(missing_ok=True)
        return path

    def save_best(self, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> Path:
        """Replace the best model."""
        path = self.folder / "best.safetensors"
        save_model_file(path, tensors, info)
        return path

    def load_newest(self) -> Tuple[Optional[Tuple[Tensors, Dict[str, Any]]], list]:
        """The newest checkpoint that is whole, or None, and one line for each newer one that is not."""
        complaints = []
        for path in self._newest_first():
            try:
                return load_model_file(path), complaints
            except BadCheckpoint as error:
                complaints.append(str(error))
        return None, complaints

    def clear(self) -> None:
        """Remove every checkpoint and `best`: they belong to another training."""
        self._drop_halves()
        for path in [*self.folder.glob("step-*"), *self.folder.glob("best.*")]:
            path.unlink(missing_ok=True)

    def _drop_halves(self) -> None:
        """What a writer that was killed left behind would otherwise fill the disk, kill by kill."""
        for path in self.folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def _newest_first(self) -> list:
        return sorted(self.folder.glob("step-*.safetensors"), reverse=True)
