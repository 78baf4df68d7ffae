"""Checkpoints of a training: files of `superglue_sift.weights`, written atomically."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple, Union

from torch import Tensor

from superglue_sift.weights import BadCheckpoint, Tensors, load_model_file, save_model_file


class Checkpoints:
    """The checkpoints of one training: `step-00000100.safetensors`, the newest `keep` of them, and
    `best`.
    """

    def __init__(self, folder: Union[str, Path], keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep

    def save(self, step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step`, then delete the oldest beyond `keep`. One process at a
        time writes here.
        """
        for partial in self.folder.glob(".*.tmp"):  # of killed writers, which would fill the disk
            partial.unlink(missing_ok=True)
        path = self.folder / f"step-{step:08d}.safetensors"
        save_model_file(path, tensors, info)
        for old in self._newest_first()[self.keep :]:
            old.with_suffix(".json").unlink(missing_ok=True)
            old.unlink(missing_ok=True)
        return path

    def save_best(self, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        """Replace the best model."""
        save_model_file(self.folder / "best.safetensors", tensors, info)

    def load_newest(self) -> Tuple[Optional[Tuple[Tensors, Dict[str, Any]]], list]:
        """The newest undamaged checkpoint, or None, and one line for each newer damaged one."""
        warnings = []
        for path in self._newest_first():
            try:
                return load_model_file(path), warnings
            except BadCheckpoint as error:
                warnings.append(str(error))
        return None, warnings

    def _newest_first(self) -> list:
        return sorted(self.folder.glob("step-*.safetensors"), reverse=True)
