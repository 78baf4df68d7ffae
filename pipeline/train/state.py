"""The state of a training, as one set of tensors and one JSON."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from pipeline.train.optimization import MovingAverage, optimizer_tensors, restore_optimizer
from superglue_sift.superglue import SuperGlue

BEST_PREFIX = "best."  # of the best model's tensors inside a checkpoint


class TrainState:
    """Model, optimiser, scaler, moving average, position and best score of one training."""

    PLAIN = ("step", "best", "best_step", "best_figures", "skipped", "validated")

    def __init__(self, model: SuperGlue, optimizer, scaler, ema: MovingAverage) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.ema = ema
        self.step = 0  # optimiser steps done
        self.best: Optional[float] = None  # best validation f1 so far
        self.best_step = 0
        self.best_figures: Dict[str, float] = {}  # all metrics of that validation
        self.best_weights: Dict[str, Tensor] = {}  # on the host
        self.validated = -1  # step of the last validation
        self.skipped = 0  # steps not applied because the gradient was not finite

    def tensors(self) -> Dict[str, Tensor]:
        """Everything that is a tensor, by name."""
        kinds = {
            "model.": self.model.state_dict(),
            "optimizer.": optimizer_tensors(self.optimizer),
            "average.": self.ema.values,
            BEST_PREFIX: self.best_weights,
        }
        tensors = {
            prefix + name: value
            for prefix, values in kinds.items()
            for name, value in values.items()
        }
        return {**tensors, "rng.cpu": torch.get_rng_state()}

    def info(self) -> Dict[str, Any]:
        """Everything else, as JSON values."""
        plain = {name: getattr(self, name) for name in self.PLAIN}
        return {"model": self.model.config.to_dict(), **plain, "scaler": self.scaler.state_dict()}

    def restore(self, tensors: Dict[str, Tensor], info: Dict[str, Any]) -> None:
        """Load a saved state."""
        self.model.load_state_dict(_part(tensors, "model."))
        restore_optimizer(self.optimizer, _part(tensors, "optimizer."))
        self.ema.restore(_part(tensors, "average."))
        torch.set_rng_state(tensors["rng.cpu"])
        if info["scaler"]:  # empty if saved in a precision without scaling
            self.scaler.load_state_dict(info["scaler"])
        self.best_weights = _part(tensors, BEST_PREFIX)
        for name in self.PLAIN:
            setattr(self, name, info.get(name, getattr(self, name)))

    def keep_best(self, metrics: Dict[str, float]) -> bool:
        """Keep a copy of the weights if this validation is the best so far; returns whether it
        is.
        """
        if self.best is not None and metrics["f1"] <= self.best:
            return False
        self.best = metrics["f1"]
        self.best_step = self.step
        self.best_figures = metrics
        self.best_weights = {k: v.detach().cpu().clone() for k, v in self.weights().items()}
        return True

    def weights(self) -> Dict[str, Tensor]:
        """The weights to validate and to ship: the moving average if there is one."""
        return self.ema.values or self.model.state_dict()


def _part(tensors: Dict[str, Tensor], prefix: str) -> Dict[str, Tensor]:
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


def initialize_from(
    model: SuperGlue, tensors: Dict[str, Tensor]
) -> Tuple[List[str], List[str], List[str]]:
    """Load the weights of another model that fit. Returns the names taken, skipped (shape differs),
    missing there.
    """
    given = _part(tensors, "model.") or tensors
    weights = model.state_dict()
    taken = [n for n in weights if n in given and given[n].shape == weights[n].shape]
    skipped = [n for n in weights if n in given and given[n].shape != weights[n].shape]
    missing = [n for n in weights if n not in given]
    model.load_state_dict({**weights, **{n: given[n] for n in taken}})
    return taken, skipped, missing
