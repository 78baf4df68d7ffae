"""Draw pictures of matches: two images side by side, joined by thin lines.

The color of a match shows its position in the first image, from yellow at the left to magenta at
the right, so that the eye can follow a line. Colors of confidences would all look the same, since
most confidences are near 1. `LINES` matches that are spread over the image are drawn as lines, and
the others as dots, so that the images stay visible. Matches that are known to be wrong are red and
end in crosses.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import List, Sequence

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from superglue_sift.errors import RequestError
from superglue_sift.features.images import reduce_image
from superglue_sift.files import FileName, write_atomically
from superglue_sift.geometry.two_view import Size, map_to_resized, transform

RED = (40, 40, 240)  # BGR
DARK = (40, 40, 40)
# Hues in degrees at the left and right edge of the first image. Red is left for wrong matches.
HUES = (50.0, 300.0)
LINES = 100  # Maximum number of matches of a pair that are lines
CELLS = (8, 6)  # Cells across and down the first image, from which lines are taken in turn
OPACITY = 0.75  # Opacity of lines, whose ends are opaque
SIDE = 1280  # Maximum longer side of each image in the picture in px
GAP = 8  # Width of the gap between the two images in px
LETTERS = 50  # Width of the picture in heights of a letter, to be read on a phone
SMALLEST = 12  # Minimum height of a letter in px


@dataclass(frozen=True)
class Panel:
    """A panel of a picture shows the matches of one matcher.

    Attributes:
        heading: text above the picture.
        points0, points1: (K, 2) px of both images.
        scores: (K,) confidences from 0 to 1.
        wrong: (K,) bool, whether a match is wrong. False if it is not known.
        wrong_means: what the legend says about wrong matches.
    """

    heading: str
    points0: np.ndarray
    points1: np.ndarray
    scores: np.ndarray
    wrong: np.ndarray
    wrong_means: str = "wrong"


@dataclass(frozen=True)
class Picture:
    """A picture that a notebook shows.

    Attributes:
        pixels: (H, W, 3) uint8 BGR.
        legend: a text that says what the colors mean.
    """

    pixels: np.ndarray
    legend: str = ""

    def __repr__(self) -> str:
        return f"Picture({self.pixels.shape[1]}x{self.pixels.shape[0]} px; .save(path) writes it)"

    def encode(self, ending: str = ".jpg") -> bytes:
        """Encode the picture as the bytes of a file.

        Args:
            ending: extension of the file, which names its format.

        Raises:
            RequestError: If OpenCV does not write this format.
        """
        try:
            return cv2.imencode(ending, self.pixels)[1].tobytes()
        except cv2.error:
            raise RequestError(f"a picture ending in {ending!r}: name it .png or .jpg") from None

    _repr_jpeg_ = encode  # A notebook shows these bytes

    def save(self, path: FileName) -> None:
        """Write the picture in the format of its extension.

        Raises:
            RequestError: If OpenCV does not write this format.
            OSError: If the file cannot be written.
        """
        write_atomically(path, self.encode(Path(path).suffix.lower()))


def compute_colors(points: np.ndarray, width: int) -> np.ndarray:
    """Compute the colors of points by their x.

    Args:
        points: (K, 2) px.
        width: width of the image in px.

    Returns:
        (K, 3) uint8 BGR.
    """
    # OpenCV's unit of hue is two degrees.
    hue = np.interp((points[:, 0] + 0.5) / width, (0.0, 1.0), HUES) / 2
    hsv = np.full((len(points), 1, 3), 255, np.uint8)
    hsv[:, 0, 0] = np.rint(hue)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[:, 0] if len(points) else hsv[:, 0]


def join_images(image0: np.ndarray, image1: np.ndarray) -> np.ndarray:
    """Join two images, gray (H, W) or BGR (H, W, 3) uint8, side by side.

    Returns:
        (max(H0, H1), W0 + GAP + W1, 3) uint8 BGR.
    """
    height = max(len(image0), len(image1))
    right = image0.shape[1] + GAP
    canvas = np.full((height, right + image1.shape[1], 3), 255, np.uint8)
    for image, x in ((image0, 0), (image1, right)):
        # (H, W) gray -> (H, W, 1), which fits three channels
        color = image if image.ndim == 3 else image[..., None]
        canvas[: len(image), x : x + image.shape[1]] = color
    return canvas


def spread_over_image(points: np.ndarray, scores: np.ndarray, size: Size) -> np.ndarray:
    """Order matches so that the first ones are spread over the image.

    First comes the most confident match of each cell of the image, then the second of each cell,
    and so on.

    Args:
        points: (K, 2) px in the image.
        scores: (K,) confidences.
        size: (width, height) of the image in px.

    Returns:
        (K,) int64, indices of the matches.
    """
    # (K, 2) px -> (K,) number of the cell
    scaled = points / size * CELLS
    across, down = np.clip(scaled.astype(int), 0, np.array(CELLS) - 1).T
    cells = down * CELLS[0] + across
    by_cell = np.lexsort((-scores, cells))
    firsts = np.searchsorted(cells[by_cell], cells[by_cell])  # Where the cell of each match begins
    turns = np.empty(len(cells), int)
    turns[by_cell] = np.arange(len(cells)) - firsts
    return np.lexsort((-scores, turns))


def draw_lines(canvas: np.ndarray, panel: Panel, size: Size) -> None:
    """Draw the matches of a panel on two images side by side.

    Args:
        canvas: (H, W, 3) uint8 BGR, the images from `join_images`. It is changed.
        panel: the matches, in px of the images on the canvas.
        size: (width, height) of the left image in px.
    """
    # Draw correct matches by rising confidence, then wrong ones, so that these stay visible.
    order = np.lexsort((panel.scores, panel.wrong))
    lines = spread_over_image(panel.points0, panel.scores, size)[:LINES]
    thickness = 1 + canvas.shape[1] // 2000
    # OpenCV takes fixed-point coordinates, here with four fractional bits.
    points1 = panel.points1 + np.array([size[0] + GAP, 0])
    ends = np.rint(16 * np.stack([panel.points0, points1], axis=1)).astype(int).tolist()
    colors = compute_colors(panel.points0, size[0])
    colors[panel.wrong] = RED
    colors = colors.tolist()
    # Draw the lines, and blend them with the images.
    below = canvas.copy()
    for index in order[np.isin(order, lines)]:
        start, end = ends[index]
        cv2.line(canvas, start, end, colors[index], thickness, cv2.LINE_AA, 4)
    cv2.addWeighted(canvas, OPACITY, below, 1 - OPACITY, 0, dst=canvas)
    # Draw the ends of all matches: dots, or crosses for wrong ones.
    for index in order:
        for x, y in ends[index]:
            color = colors[index]
            if not panel.wrong[index]:
                cv2.circle(canvas, (x, y), 16 * (2 + thickness), color, -1, cv2.LINE_AA, 4)
                continue
            arm = 16 * (3 + thickness)
            for up in (arm, -arm):
                ends_of_arm = ((x - arm, y - up), (x + arm, y + up))
                cv2.line(canvas, *ends_of_arm, color, thickness + 1, cv2.LINE_AA, 4)


def draw_text_bar(width: int, text: str) -> np.ndarray:
    """Draw text on a dark bar, in as many lines as it needs.

    The letters grow with the picture, because a page or a phone shows it smaller than it is.

    Args:
        width: width of the picture in px.
        text: the text.

    Returns:
        (H, width, 3) uint8.
    """
    size = max(SMALLEST, width // LETTERS)
    font = ImageFont.load_default(size)
    letter = font.getlength(text) / max(len(text), 1)
    # Break the text by the mean width of its letters.
    lines = textwrap.wrap(text, int(0.95 * (width - size) / letter)) if text.strip() else [""]
    bar = Image.new("RGB", (width, int(1.4 * size * len(lines) + 0.6 * size)), DARK)
    for row, line in enumerate(lines):
        left_middle = (size // 2, int(1.4 * size * row + size))
        ImageDraw.Draw(bar).text(left_middle, line, fill="white", font=font, anchor="lm")
    return np.array(bar)  # White and gray are the same in RGB and BGR


def write_legend(panels: Sequence[Panel]) -> str:
    """Explain the colors, lines, dots and crosses that the panels use."""
    counts = [len(panel.scores) for panel in panels]
    sentences = ["The color of a match is its place in the first image."] * any(counts)
    meanings = dict.fromkeys(panel.wrong_means for panel in panels if panel.wrong.any())
    sentences += [f"Red crosses: {meaning}." for meaning in meanings]
    if max(counts) > LINES:
        sentences.append(f"{LINES} matches, spread over the image, are lines, the others dots.")
    return " ".join(sentences)


def draw_panels(
    image0: np.ndarray, image1: np.ndarray, panels: Sequence[Panel], captions: bool = True
) -> np.ndarray:
    """Draw panels below each other, with headings and a legend.

    Args:
        image0, image1: (H, W) gray or (H, W, 3) BGR, uint8. They are reduced to a longer side of
            SIDE.
        panels: the matches of each matcher, in px of these images.
        captions: whether to draw headings and legend. A page may have them as text.

    Returns:
        (H, W, 3) uint8 BGR.
    """
    small0, small1 = (reduce_image(image, SIDE) for image in (image0, image1))
    to_small0, to_small1 = (
        map_to_resized(image.shape[1::-1], small.shape[1::-1])
        for image, small in ((image0, small0), (image1, small1))
    )
    rows: List[np.ndarray] = []
    for panel in panels:
        canvas = join_images(small0, small1)
        points0 = transform(panel.points0, to_small0)
        points1 = transform(panel.points1, to_small1)
        draw_lines(canvas, replace(panel, points0=points0, points1=points1), small0.shape[1::-1])
        rows += [draw_text_bar(canvas.shape[1], panel.heading), canvas]
    rows.append(draw_text_bar(rows[0].shape[1], write_legend(panels)))
    return np.concatenate(rows if captions else rows[1:-1:2], axis=0)
