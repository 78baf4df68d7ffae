"""Progress of a training: one line on a terminal, redrawn; plain lines in a log."""

from __future__ import annotations

import math
from typing import Mapping, Optional

from superglue_sift.progress import Progress

SMOOTHING = 0.9  # of the loss from step to step


class LiveLine:
    """Shows steps, time left, loss, F1 of the last validation and of the ratio test.

    Args:
        steps, done: number of steps of the training, and of those done before.
        baseline: F1 of the ratio test on the validation pairs.
        best: best F1 so far; None before the first validation.
        shown: False on every rank but the first.
    """

    def __init__(
        self, steps: int, done: int, baseline: float, best: Optional[float], shown: bool
    ) -> None:
        self.bar = Progress(total=steps, initial=done, desc="train", unit="step", disable=not shown)
        self.baseline = baseline
        self.best = best
        self.shown = shown
        self._loss = math.nan
        self._validation = ""

    def step(self, sums: Mapping[str, float]) -> None:
        """Show a step. sums: `StepResult.sums` of this rank."""
        loss = sums["loss"] / max(sums["pairs"], 1.0)
        if math.isfinite(loss):
            self._loss = (
                SMOOTHING * self._loss + (1 - SMOOTHING) * loss
                if math.isfinite(self._loss)
                else loss
            )
        self._show()
        self.bar.update(1)

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a validation; in a log it has a line of its own."""
        f1 = metrics["f1"]
        gain = "" if self.best is None else f" ({100 * (f1 - self.best):+.1f})"
        self._validation = f"F1 {100 * f1:.1f}{gain}"
        self._show()
        if self.shown and not self.bar.terminal:
            gain = (
                "" if self.best is None else f", {100 * (f1 - self.best):+.1f} from the best before"
            )
            self.bar.say(
                f"validation at step {step}: F1 {100 * f1:.1f} %{gain}; ratio test"
                f" {100 * self.baseline:.1f} %; loss {metrics['loss']:.3f}, precision"
                f" {100 * metrics['precision']:.1f} %, recall {100 * metrics['recall']:.1f} %"
            )
        self.best = f1 if self.best is None else max(self.best, f1)

    def _show(self) -> None:
        loss = f"loss {self._loss:.2f}" if math.isfinite(self._loss) else ""
        # A narrow terminal cuts the end off
        shown = (loss, self._validation, f"ratio test {100 * self.baseline:.1f}")
        self.bar.show(", ".join(filter(None, shown)))

    def close(self) -> None:
        """Write the last line."""
        self.bar.close()
