"""Date bars, logos and watermarks, drawn on gray photographs as cameras and agencies do."""

import cv2
import numpy as np


def write(image, words, x, y, size=0.7, gray=255):
    """Write words from the pixel (x, y); lengths are those of a photograph 640 px wide."""
    thick = max(1, round(2.8 * size))
    cv2.putText(
        image, words, (int(x), int(y)), cv2.FONT_HERSHEY_SIMPLEX, size, gray, thick, cv2.LINE_AA
    )


def bar(image, number):
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


def corner(image, number):
    """The name of an agency at the lower right."""
    image = image.copy()
    unit = max(image.shape) / 640
    at = np.array(image.shape[::-1]) - [270 * unit, 12 * unit]
    write(image, "(c) PhotoStock Agency", *at, 0.7 * unit)
    return image


STAMPS = {"bar": bar, "corner": corner}
