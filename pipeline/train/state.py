"""All that a training must remember, as one set of tensors and one JSON."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from pipeline.train.optimization import MovingAverage, optimizer_tensors, restore_optimizer
from superglue_sift.network.superglue import SuperGlue

BEST_PREFIX = "best."  # of the best model's tensors inside a checkpoint


class TrainState:
    """Model, optimiser, scaler, moving average, position and best score of one training."""

    PLAIN = ("step", "best", "best_step", "best_figures", "skipped", "validated")

    def __init__(self, model: SuperGlue, optimizer, scaler, ema: MovingAverage) -> None:
        self.model, self.optimizer, self.scaler, self.ema = model, optimizer, scaler, ema
        self.step = 0  # optimiser steps done
        self.best: Optional[float] = None  # best validation f1 so far
        self.best_step = 0
        self.best_figures: Dict[str, float] = {}  # all of that validation
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
            setattr(self, name, info.get(name, getattr(self, name)))

    def keep_best(self, figures: Dict[str, float]) -> bool:
        """Remember the model as it is when no validation was better; tells whether it does."""
        if self.best is not None and figures["f1"] <= self.best:
            return False
        self.best, self.best_step, self.best_figures = figures["f1"], self.step, figures
        self.best_weights = {k: v.detach().cpu().clone() for k, v in self.weights().items()}
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
