"""Date bars, logos and watermarks, drawn on gray photographs as cameras and agencies do."""

from __future__ import annotations

from typing import Callable, Dict

import cv2
import numpy as np


def write(
    image: np.ndarray, words: str, x: float, y: float, size: float = 0.7, gray: int = 255
) -> None:
    """Write words from the pixel (x, y); lengths are those of a photograph 640 px wide."""
    thick = max(1, round(2.8 * size))
    cv2.putText(
        image, words, (int(x), int(y)), cv2.FONT_HERSHEY_SIMPLEX, size, gray, thick, cv2.LINE_AA
    )


def bar(image: np.ndarray, number: int) -> np.ndarray:
    """A black bar at the top with the date and time of photograph `number`."""
    image = image.copy()
    unit = max(image.shape) / 640
    image[: int(32 * unit)] = 0
    write(
        image,
        f"2024-03-{11 + number:02d} 14:{22 + number}:07 CAM 03",
        8 * unit,
        24 * unit,
        0.7 * unit,
    )
    return image


def corner(image: np.ndarray, number: int) -> np.ndarray:
    """The name of an agency at the lower right."""
    image = image.copy()
    unit = max(image.shape) / 640
    at = np.array(image.shape[::-1]) - [270 * unit, 12 * unit]
    write(image, "(c) PhotoStock Agency", *at, 0.7 * unit)
    return image


STAMPS: Dict[str, Callable[[np.ndarray, int], np.ndarray]] = {"bar": bar, "corner": corner}
