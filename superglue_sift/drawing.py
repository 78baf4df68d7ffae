"""Pictures of matches: two images side by side, right matches green and wrong ones red."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

import cv2
import numpy as np

from superglue_sift.files import write_atomic

GREEN, RED, BLUE, WHITE = (80, 200, 60), (50, 50, 235), (235, 160, 40), (255, 255, 255)  # BGR
GAP = 8  # pixels between the two images
BAR = 26  # height of the heading in pixels


@dataclass(frozen=True)
class Panel:
    """The matches of one matcher. points0, points1: (K, 2) pixels; correct: (K,) bool, None where it is not known."""

    heading: str
    points0: np.ndarray
    points1: np.ndarray
    correct: Optional[np.ndarray] = None


def side_by_side(image0: np.ndarray, image1: np.ndarray) -> np.ndarray:
    """(H0, W0) and (H1, W1) uint8, gray or BGR -> (max H, W0 + gap + W1, 3) uint8."""
    left, right = (cv2.cvtColor(one, cv2.COLOR_GRAY2BGR) if one.ndim == 2 else one for one in (image0, image1))
    canvas = np.full((max(len(left), len(right)), left.shape[1] + GAP + right.shape[1], 3), 255, np.uint8)
    canvas[: len(left), : left.shape[1]] = left
    canvas[: len(right), left.shape[1] + GAP :] = right
    return canvas


def draw_lines(canvas: np.ndarray, panel: Panel, shift: int) -> None:
    """Draw the matches of a panel; wrong ones last, so that none hides behind the right ones."""
    correct = panel.correct
    colours = [BLUE] * len(panel.points0) if correct is None else [GREEN if good else RED for good in correct]
    order = range(len(colours)) if correct is None else np.argsort(~np.asarray(correct, bool), kind="stable")
    for index in order:
        # cv2 takes fixed-point coordinates: four bits after the point
        ends = panel.points0[index], panel.points1[index] + (shift, 0)
        start, end = (tuple(round(16 * float(value)) for value in point) for point in ends)
        cv2.line(canvas, start, end, colours[index], 1, cv2.LINE_AA, 4)
        for point in (start, end):
            cv2.circle(canvas, point, 32, colours[index], 1, cv2.LINE_AA, 4)


def heading_bar(width: int, text: str) -> np.ndarray:
    """A dark bar (BAR, width, 3) with text, made smaller where it would not fit."""
    bar = np.full((BAR, width, 3), 40, np.uint8)
    (text_width, _), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.5, 1)
    scale = min(0.5, 0.5 * (width - 12) / max(text_width, 1))
    cv2.putText(bar, text, (6, BAR - 9), cv2.FONT_HERSHEY_SIMPLEX, scale, WHITE, 1, cv2.LINE_AA)
    return bar


def draw(image0: np.ndarray, image1: np.ndarray, panels: Sequence[Panel]) -> np.ndarray:
    """One picture, (H, W, 3) uint8 BGR: the panels below each other, each under its heading."""
    rows: List[np.ndarray] = []
    for panel in panels:
        canvas = side_by_side(image0, image1)
        draw_lines(canvas, panel, image0.shape[1] + GAP)
        rows += [heading_bar(canvas.shape[1], panel.heading), canvas]
    return np.concatenate(rows, axis=0)


def reduced(image: np.ndarray, longer_side: int) -> Tuple[np.ndarray, float]:
    """An image of at most this longer side in pixels, no side below one, and its size over that before."""
    scale = min(1.0, longer_side / max(image.shape[:2]))
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA), scale


def write(path: Path, picture: np.ndarray) -> None:
    """Write a BGR picture in the format its name ends in. Raises OSError when it cannot be written."""
    write_atomic(path, encode(path.suffix.lower(), picture))


def encode(ending: str, picture: np.ndarray) -> bytes:
    """The file of a BGR picture in the format of this ending, such as ".jpg". Raises OSError when OpenCV cannot."""
    ok, encoded = cv2.imencode(ending, picture)
    if not ok:
        raise OSError(0, "the picture could not be encoded", ending)
    return encoded.tobytes()
