"""What a person sees of a training while it runs: one line on a terminal, drawn over; plain lines in a log."""

from __future__ import annotations

import math
from typing import Mapping, Optional

from superglue_sift.progress import Progress

SMOOTHING = 0.9  # of the loss from step to step


class LiveLine:
    """Steps, time left, loss, F1 of the last validation and the F1 to beat.

    Args:
        steps, done: of the training, and of these before now.
        mark: F1 of the ratio test on the validation pairs.
        best: the best F1 so far; None before the first validation.
        shown: False on every rank but the first.
    """

    def __init__(self, steps: int, done: int, mark: float, best: Optional[float], shown: bool) -> None:
        self.bar = Progress(total=steps, initial=done, desc="train", unit="step", disable=not shown)
        self.mark, self.best, self.shown = mark, best, shown
        self._loss = math.nan
        self._validation = ""

    def step(self, sums: Mapping[str, float]) -> None:
        """A step is done. sums: `StepResult.sums` of this rank."""
        loss = sums["loss"] / max(sums["pairs"], 1.0)
        if math.isfinite(loss):
            self._loss = SMOOTHING * self._loss + (1 - SMOOTHING) * loss if math.isfinite(self._loss) else loss
        self._show()
        self.bar.update(1)

    def validated(self, step: int, figures: Mapping[str, float]) -> None:
        """A validation is done; in a log it has a line of its own."""
        f1 = figures["f1"]
        gain = "" if self.best is None else f" ({100 * (f1 - self.best):+.1f})"
        self._validation = f"F1 {100 * f1:.1f}{gain}"
        self._show()
        if self.shown and not self.bar.terminal:
            brought = "" if self.best is None else f", {100 * (f1 - self.best):+.1f} from the best before"
            self.bar.say(
                f"validation at step {step}: F1 {100 * f1:.1f} %{brought}; ratio test {100 * self.mark:.1f} %; "
                f"loss {figures['loss']:.3f}, precision {100 * figures['precision']:.1f} %, "
                f"recall {100 * figures['recall']:.1f} %"
            )
        self.best = f1 if self.best is None else max(self.best, f1)

    def _show(self) -> None:
        loss = f"loss {self._loss:.2f}" if math.isfinite(self._loss) else ""
        shown = (self._validation, f"ratio test {100 * self.mark:.1f}", loss)  # 80 columns hold them
        self.bar.show(", ".join(filter(None, shown)))

    def close(self) -> None:
        """The last line."""
        self.bar.close()
