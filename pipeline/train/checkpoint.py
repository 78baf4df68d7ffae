"""The state of a training, and its checkpoints: files of `superglue_sift.network.weights`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from pipeline import distributed
from pipeline.errors import WorkError
from pipeline.train.optimization import optimizer_tensors, restore_optimizer
from superglue_sift.network.superglue import SuperGlue
from superglue_sift.network.weights import BadCheckpoint, load_model_file, save_model_file

BEST = "best.safetensors"
PLAIN = ("step", "best", "best_step", "best_figures", "skipped", "validated")  # of `TrainState`
Saved = Tuple[Dict[str, Tensor], Dict[str, Any]]  # tensors and JSON of a checkpoint


@dataclass
class TrainState:
    """Model, optimiser, scaler, position and best score of one training."""

    model: SuperGlue
    optimizer: Any
    scaler: Any
    step: int = 0  # optimiser steps done
    best: Optional[float] = None  # best validation f1 so far
    best_step: int = 0
    best_figures: Dict[str, float] = field(default_factory=dict)  # of that validation
    best_weights: Dict[str, Tensor] = field(default_factory=dict)  # on the host
    validated: int = -1  # step of the last validation
    skipped: int = 0  # steps not applied because the gradient was not finite

    def tensors(self) -> Dict[str, Tensor]:
        """Everything that is a tensor, by name."""
        kinds = {
            "model.": self.model.state_dict(),
            "optimizer.": optimizer_tensors(self.optimizer),
            "best.": self.best_weights,
            "rng.": {"cpu": torch.get_rng_state()},
        }
        return {
            prefix + name: value
            for prefix, values in kinds.items()
            for name, value in values.items()
        }

    def info(self) -> Dict[str, Any]:
        """Everything else, as JSON values."""
        plain = {name: getattr(self, name) for name in PLAIN}
        return {"model": self.model.config.to_dict(), **plain, "scaler": self.scaler.state_dict()}

    def restore(self, tensors: Dict[str, Tensor], info: Dict[str, Any]) -> None:
        """Load a saved state."""
        self.model.load_state_dict(part(tensors, "model."))
        restore_optimizer(self.optimizer, part(tensors, "optimizer."))
        torch.set_rng_state(tensors["rng.cpu"])
        if info["scaler"]:  # empty if saved in a precision without scaling
            self.scaler.load_state_dict(info["scaler"])
        self.best_weights = part(tensors, "best.")
        for name in PLAIN:
            setattr(self, name, info[name])

    def keep_best(self, metrics: Dict[str, float]) -> bool:
        """Keep a copy of the weights if this validation is the best so far; whether it is."""
        if self.best is not None and metrics["f1"] <= self.best:
            return False
        self.best = metrics["f1"]
        self.best_step = self.step
        self.best_figures = metrics
        weights = self.model.state_dict()
        self.best_weights = {k: v.detach().cpu().clone() for k, v in weights.items()}
        return True

    def compare_ranks(self, is_main: bool) -> None:
        """Compare weights and optimiser of all ranks, to the bit; all ranks call it.

        Raises WorkError on rank 0, SystemExit on the others, if they differ.
        """
        own = self._checksum() if distributed.several() else 0
        first, *others = distributed.all_gather(own)
        wrong = [f"rank {rank}" for rank, other in enumerate(others, 1) if other != first]
        if wrong and not is_main:
            raise SystemExit(1)
        if wrong:
            raise WorkError(
                f"step {self.step}: weights or optimiser of {', '.join(wrong)} differ from those of"
                " rank 0: memory or network may be at fault. No checkpoint of this step was saved;"
                " the same command resumes from the previous one"
            )

    def _checksum(self) -> int:
        """CRC-32 of parameters and optimiser, without buffers: unsynchronised statistics differ."""
        tensors = {**dict(self.model.named_parameters()), **optimizer_tensors(self.optimizer)}
        crc = 0
        for _, tensor in sorted(tensors.items()):
            crc = zlib.crc32(tensor.detach().cpu().contiguous().numpy().data, crc)
        return crc


def part(tensors: Mapping[str, Tensor], prefix: str) -> Dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


class Checkpoints(NamedTuple):
    """The checkpoints of a training: `step-00000100.safetensors`, the newest two, and `best`."""

    folder: Path

    def save(self, step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`, then delete all but the newest two.

        One process at a time writes here.
        """
        for partial in self.folder.glob(".*.tmp"):  # of killed writers, which would fill the disk
            partial.unlink(missing_ok=True)
        save_model_file(self.folder / f"step-{step:08d}.safetensors", tensors, info)
        for old in self._newest_first()[2:]:
            old.with_suffix(".json").unlink(missing_ok=True)
            old.unlink(missing_ok=True)

    def save_best(self, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        """Replace the best model."""
        save_model_file(self.folder / BEST, tensors, info)

    def load_newest(self) -> Tuple[Optional[Saved], List[str]]:
        """The newest undamaged checkpoint, or None, and one line for each newer damaged one."""
        warnings: List[str] = []
        for path in self._newest_first():
            try:
                return load_model_file(path), warnings
            except BadCheckpoint as error:
                warnings.append(str(error))
        return None, warnings

    def _newest_first(self) -> List[Path]:
        return sorted(self.folder.glob("step-*.safetensors"), reverse=True)
