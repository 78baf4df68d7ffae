"""All that a training must remember, as one set of tensors and one JSON, and what it may be resumed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from pipeline.files import file_sha256, json_digest
from pipeline.runtime.code import code_digest
from pipeline.schema import TrainParams
from pipeline.training.optimization import MovingAverage, optimizer_tensors, restore_optimizer
from superglue_sift.superglue import SuperGlue

Fingerprint = Dict[str, Any]

BEST_PREFIX = "best."  # of the best model's tensors inside a checkpoint
CODE = ("pipeline.training.trainer",)  # with what it imports: everything that can change a weight
# but for what writes files, whose bytes are verified, and what reports
OUTSIDE = (
    "pipeline.runtime.checkpoint",
    "pipeline.training.logger",
    "pipeline.training.resume",
    "superglue_sift.weights",
)


# What a fingerprint has beside the parameters; each stands in a best model's JSON under the same name.
OF_THE_RUN = ("world_size", "initial_weights", "data", "code")


def stated(train: TrainParams) -> Dict[str, Any]:
    """The section as JSON values; of `init_from` the file's name, as `initial_weights` says which one that is."""
    return {**train.model_dump(), "init_from": Path(train.init_from).name}


def fingerprint(train: TrainParams, data_digest: str, world_size: int) -> Fingerprint:
    """What must be equal for a resumed run to be the interrupted one: parameters, data and code.

    The number of processes is no part of it, unless it decides the batch or the learning rate.
    """
    values: Fingerprint = {f"train.{k}": v for k, v in stated(train).items()}
    if train.batch_per_rank or train.lr_scaling != "none":
        values["world_size"] = world_size
    if train.init_from:
        values["initial_weights"] = file_sha256(train.init_from)[:16]
    values["data"] = data_digest
    values["code"] = code_digest(CODE, OUTSIDE)
    return values


def fingerprint_of(info: Dict[str, Any]) -> Fingerprint:
    """The fingerprint of a checkpoint's or a best model's JSON."""
    if "fingerprint" in info:
        return info["fingerprint"]
    values = {f"train.{k}": v for k, v in info.get("train", {}).items()}
    return {**values, **{k: info[k] for k in OF_THE_RUN if k in info}}


def identity(values: Fingerprint) -> str:
    """A name for the training of this fingerprint, equal wherever it is run, whatever the code has become since."""
    return json_digest({key: value for key, value in values.items() if key != "code"})


def changed_keys(saved: Fingerprint, ours: Fingerprint) -> List[str]:
    """The keys that differ."""
    return [key for key in sorted(set(saved) | set(ours)) if saved.get(key) != ours.get(key)]


class TrainState:
    """Model, optimiser, scaler, moving average, position and best score of one training."""

    PLAIN = ("step", "best", "best_step", "best_figures", "skipped")

    def __init__(self, model: SuperGlue, optimizer, scaler, ema: MovingAverage) -> None:
        self.model, self.optimizer, self.scaler, self.ema = model, optimizer, scaler, ema
        self.step = 0  # optimiser steps done
        self.best: Optional[float] = None  # best validation f1 so far
        self.best_step = 0
        self.best_figures: Dict[str, float] = {}  # all of that validation
        self.best_weights: Dict[str, Tensor] = {}  # on the host
        self.skipped = 0  # steps not applied because the gradient was not finite

    def tensors(self) -> Dict[str, Tensor]:
        """Everything that is a tensor, by name."""
        kinds = {
            "model.": self.model.state_dict(),
            "optimizer.": optimizer_tensors(self.optimizer),
            "average.": self.ema.values,
            BEST_PREFIX: self.best_weights,
        }
        tensors = {prefix + name: value for prefix, values in kinds.items() for name, value in values.items()}
        return {**tensors, "rng.cpu": torch.get_rng_state()}

    def info(self) -> Dict[str, Any]:
        """Everything else, as JSON values."""
        plain = {name: getattr(self, name) for name in self.PLAIN}
        return {"model": self.model.config.to_dict(), **plain, "scaler": self.scaler.state_dict()}

    def restore(self, tensors: Dict[str, Tensor], info: Dict[str, Any]) -> None:
        """Become the state that was saved."""
        self.model.load_state_dict(_part(tensors, "model."))
        restore_optimizer(self.optimizer, _part(tensors, "optimizer."))
        self.ema.restore(_part(tensors, "average."))
        torch.set_rng_state(tensors["rng.cpu"])
        if info["scaler"]:  # empty: it was saved in another precision, which scales nothing
            self.scaler.load_state_dict(info["scaler"])
        self.best_weights = _part(tensors, BEST_PREFIX)
        for name in self.PLAIN:
            setattr(self, name, info[name])

    def keep_best(self, figures: Dict[str, float]) -> bool:
        """Remember the model as it is when no validation was better; tells whether it does."""
        if self.best is not None and figures["f1"] <= self.best:
            return False
        self.best, self.best_step, self.best_figures = figures["f1"], self.step, figures
        self.best_weights = {k: v.detach().cpu().clone() for k, v in self.model.state_dict().items()}
        return True

    def weights(self) -> Dict[str, Tensor]:
        """The weights to validate and to ship: the moving average where there is one."""
        return self.ema.values or self.model.state_dict()


def _part(tensors: Dict[str, Tensor], prefix: str) -> Dict[str, Tensor]:
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


def initialize_from(model: SuperGlue, tensors: Dict[str, Tensor]) -> Tuple[List[str], List[str], List[str]]:
    """Take over what fits from another model's weights: names taken, skipped (shape differs), missing there."""
    given = _part(tensors, "model.") or tensors
    own = model.state_dict()
    taken = [n for n in own if n in given and given[n].shape == own[n].shape]
    skipped = [n for n in own if n in given and given[n].shape != own[n].shape]
    missing = [n for n in own if n not in given]
    model.load_state_dict({**own, **{n: given[n] for n in taken}})
    return taken, skipped, missing
