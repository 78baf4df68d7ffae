"""The same pairs under one growing disturbance: how much blur, darkness, noise or JPEG a matcher bears.

View 0 stays clean; view 1 is disturbed by exactly the amount that stands in the table. Homographies are those of
`heldout` and the same at every level, so the lines of one disturbance differ in nothing else.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Tuple

import cv2
import numpy as np
import torch

from pipeline.evaluation.difficulty import line_of
from pipeline.evaluation.heldout import HeldOutPairs
from pipeline.evaluation.pairs import Scene
from pipeline.evaluation.run import Settings, evaluate
from pipeline.runtime.distributed import Context


def brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """Light times `factor`: darker below 1, saturating above."""
    return cv2.convertScaleAbs(image, alpha=factor)


def blur(image: np.ndarray, deviation: float) -> np.ndarray:
    """Gaussian blur with a standard deviation in pixels; 0 is none."""
    return cv2.GaussianBlur(image, (0, 0), deviation) if deviation > 0 else image


def noise(image: np.ndarray, deviation: float) -> np.ndarray:
    """Gaussian noise with a standard deviation in gray levels, the same for every image of a size."""
    drawn = np.random.default_rng(0).normal(0.0, 1.0, image.shape) * deviation
    return np.clip(np.rint(image + drawn), 0, 255).astype(np.uint8)


def jpeg(image: np.ndarray, quality: float) -> np.ndarray:
    """JPEG compression at `quality`, 1 to 100."""
    _, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, int(quality)])
    return cv2.imdecode(data, cv2.IMREAD_GRAYSCALE)


LEVELS: Dict[str, Tuple[Callable, Tuple[float, ...]]] = {
    "illumination (factor)": (brightness, (1.0, 0.5, 0.25, 0.12, 2.0)),
    "blur (px)": (blur, (0.0, 1.0, 2.0, 4.0)),
    "noise (gray levels)": (noise, (0.0, 5.0, 10.0, 20.0)),
    "JPEG (quality)": (jpeg, (90, 40, 15, 5)),
}


class DegradedPairs(HeldOutPairs):
    """One pair per photograph, its second view disturbed; a source for `evaluation.pairs`."""

    def __init__(self, images, entries, params, disturb: Callable, level: float):
        clear = type(params.photometric)(**dict.fromkeys(params.photometric.model_dump(), 0.0))
        super().__init__(
            images, entries, params.model_copy(update={"photometric": clear, "pairs_per_image": 1})
        )
        self.disturb, self.level = disturb, level

    def load(self, index: int) -> Scene:
        """As `HeldOutPairs.load`, with the disturbance on every second view."""
        scene = super().load(index)
        views = [
            self.disturb(image, self.level) if number % 2 else image
            for number, image in enumerate(scene.images)
        ]
        return Scene(scene.name, views, scene.pairs)


def sweep(
    source: HeldOutPairs,
    count: int,
    model: torch.nn.Module,
    device: str,
    settings: Settings,
    context: Context,
) -> List[Dict[str, object]]:
    """Lines of robustness.csv: every disturbance at every level, on the first `count` photographs of a source."""
    lines = []
    for name, (disturb, levels) in LEVELS.items():
        for level in levels:
            pairs = DegradedPairs(source.images, source.entries[:count], source.params, disturb, level)
            results = evaluate(pairs, model, device, settings, context, f"{name} {level:g}")
            if results.rows:
                lines.append(line_of(name, f"{level:g}", results.rows))
    return lines
