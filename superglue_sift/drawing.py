"""Pictures of matches: two images side by side, joined by thin lines.

The colour of a match is that of its place in the first image, yellow at the left to magenta at the
right, so that the eye can follow a line; confidences, most of them near 1, would all look the same.
`LINES` matches that are spread over the image are lines, the others dots, so that the images stay
visible. Known wrong matches are red and end in crosses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import List, Optional, Sequence, Tuple, Union

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from superglue_sift.files import write_atomic

RED = (40, 40, 240)  # BGR
DARK = (40, 40, 40)
# Degrees, at the left and right edge of the first image; red is for wrong matches
HUES = (50.0, 300.0)
LINES = 100  # matches of a pair that are lines
CELLS = (8, 6)  # across and down the first image, from which the lines are taken in turn
OPACITY = 0.75  # of lines; their ends are opaque
SIDE = 1280  # maximum longer side of each image in the picture, pixels
GAP = 8  # pixels between the two images
BAR = 28  # height of a heading and of the legend in pixels
FONT_SIZE = 15


@dataclass(frozen=True)
class Panel:
    """The matches of one matcher.

    points0, points1: (K, 2) pixels. scores: (K,) confidence, 0 to 1. wrong: (K,) bool, None if not
    known.
    wrong_means: legend for the wrong ones.
    """

    heading: str
    points0: np.ndarray
    points1: np.ndarray
    scores: np.ndarray
    wrong: Optional[np.ndarray] = None
    wrong_means: str = "wrong"


@dataclass(frozen=True)
class Picture:
    """A picture that a notebook shows. pixels: (H, W, 3) uint8 BGR."""

    pixels: np.ndarray

    def __repr__(self) -> str:
        return f"Picture({self.pixels.shape[1]}x{self.pixels.shape[0]} px; .save(path) writes it)"

    def _repr_jpeg_(self) -> bytes:
        return encode(".jpg", self.pixels)

    def save(self, path: Union[str, Path]) -> None:
        """Write the picture (`write`)."""
        write(Path(path), self.pixels)


def colours_of(points: np.ndarray, width: int) -> np.ndarray:
    """(K, 3) uint8 BGR of places (K, 2) in an image of this width: their hue is that of x."""
    across = np.clip(
        (np.asarray(points, float).reshape(-1, 2)[:, 0] + 0.5) / max(width, 1), 0.0, 1.0
    )
    hue = (HUES[0] + (HUES[1] - HUES[0]) * across) / 2  # OpenCV's unit is two degrees
    hsv = np.full((len(across), 1, 3), 255, np.uint8)
    hsv[:, 0, 0] = np.rint(hue)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[:, 0] if len(hsv) else np.zeros((0, 3), np.uint8)


def css_colours(points: np.ndarray, width: int) -> List[str]:
    """`colours_of` for CSS, #rrggbb."""
    return [f"#{red:02x}{green:02x}{blue:02x}" for blue, green, red in colours_of(points, width)]


def side_by_side(image0: np.ndarray, image1: np.ndarray) -> np.ndarray:
    """(H0, W0) and (H1, W1) uint8, gray or BGR -> (max H, W0 + gap + W1, 3) uint8."""
    left, right = (
        cv2.cvtColor(i, cv2.COLOR_GRAY2BGR) if i.ndim == 2 else i for i in (image0, image1)
    )
    canvas = np.full(
        (max(len(left), len(right)), left.shape[1] + GAP + right.shape[1], 3), 255, np.uint8
    )
    canvas[: len(left), : left.shape[1]] = left
    canvas[: len(right), left.shape[1] + GAP :] = right
    return canvas


def drawing_order(panel: Panel) -> np.ndarray:
    """(K,) int64: correct matches from weak to strong, then wrong ones, which stay visible on
    top.
    """
    wrong = (
        np.zeros(len(panel.scores), bool) if panel.wrong is None else np.asarray(panel.wrong, bool)
    )
    return np.lexsort((panel.scores, wrong))


def spread(points: np.ndarray, scores: np.ndarray, size: Tuple[int, int]) -> np.ndarray:
    """(K,) int64: matches in the order in which they become lines.

    First the strongest of each cell of an image of `size` (width, height), then the second of each,
    and so on.
    """
    scaled = np.asarray(points, float).reshape(-1, 2) / np.array(size) * CELLS
    across, down = np.clip(scaled.astype(int), 0, np.array(CELLS) - 1).T
    cells = down * CELLS[0] + across
    by_cell = np.lexsort((-np.asarray(scores), cells))
    firsts = np.searchsorted(cells[by_cell], cells[by_cell])  # where the cell of each begins
    turns = np.empty(len(cells), int)
    turns[by_cell] = np.arange(len(cells)) - firsts
    return np.lexsort((-np.asarray(scores), turns))


def draw_lines(canvas: np.ndarray, panel: Panel, size: Tuple[int, int]) -> None:
    """Draw the matches of a panel on two images side by side; size: (width, height) of the
    first.
    """
    order = drawing_order(panel)
    lines = np.zeros(len(order), bool)
    lines[spread(panel.points0, panel.scores, size)[:LINES]] = True
    wrong = np.zeros(len(lines), bool) if panel.wrong is None else np.asarray(panel.wrong, bool)
    thickness = 1 + canvas.shape[1] // 2000
    # fixed-point coordinates for cv2: four fractional bits
    ends = np.rint(
        16 * np.stack([panel.points0, panel.points1 + np.array([size[0] + GAP, 0])], axis=1)
    ).astype(int)
    colours = [
        RED if bad else colour.tolist()
        for bad, colour in zip(wrong, colours_of(panel.points0, size[0]))
    ]
    below = canvas.copy()
    for index in order[lines[order]]:
        start, end = (tuple(point.tolist()) for point in ends[index])
        cv2.line(canvas, start, end, colours[index], thickness, cv2.LINE_AA, 4)
    cv2.addWeighted(canvas, OPACITY, below, 1 - OPACITY, 0, dst=canvas)
    for index in order:
        for point in ends[index]:
            _draw_end(canvas, point, colours[index], bool(wrong[index]), thickness)


def _draw_end(
    canvas: np.ndarray, point: np.ndarray, colour: Sequence[int], wrong: bool, size: int
) -> None:
    """Draw a dot, or a cross for a wrong match, at `point` in sixteenths of a pixel."""
    if not wrong:
        cv2.circle(canvas, tuple(point.tolist()), 16 * (2 + size), colour, -1, cv2.LINE_AA, 4)
        return
    for dx, dy in ((1, 1), (1, -1)):
        arm = 16 * (3 + size) * np.array([dx, dy])
        ends = tuple((point - arm).tolist()), tuple((point + arm).tolist())
        cv2.line(canvas, *ends, colour, size + 1, cv2.LINE_AA, 4)


def text_bar(width: int, text: str) -> np.ndarray:
    """A dark bar (BAR, width, 3) with text, in a smaller font where it does not fit."""
    size = FONT_SIZE
    while size > 6 and ImageFont.load_default(size).getlength(text) > width - 16:
        size -= 1
    bar = Image.new("RGB", (width, BAR), DARK)
    place = (8, BAR // 2)
    ImageDraw.Draw(bar).text(
        place, text, fill="white", font=ImageFont.load_default(size), anchor="lm"
    )
    return np.array(bar)  # white and gray: the same in RGB and BGR


def legend(panels: Sequence[Panel]) -> str:
    """What lines, dots and crosses mean; names only what the panels use."""
    words = (
        ["colour: place in the first image"] if any(len(panel.scores) for panel in panels) else []
    )
    means = dict.fromkeys(
        panel.wrong_means for panel in panels if panel.wrong is not None and np.any(panel.wrong)
    )
    words += [f"red crosses: {each}" for each in means]
    if any(len(panel.scores) > LINES for panel in panels):
        words.append(f"lines: {LINES} matches spread over the image, dots: the others")
    return ";   ".join(words)


def draw(image0: np.ndarray, image1: np.ndarray, panels: Sequence[Panel]) -> np.ndarray:
    """Draw one picture, (H, W, 3) uint8 BGR: panels with headings below each other, then the
    legend.

    Images are reduced to a longer side of `SIDE`.
    """
    small0, scale0 = reduced(image0, SIDE)
    small1, scale1 = reduced(image1, SIDE)
    rows: List[np.ndarray] = []
    for panel in panels:
        canvas = side_by_side(small0, small1)
        points0 = (panel.points0 + 0.5) * scale0 - 0.5
        points1 = (panel.points1 + 0.5) * scale1 - 0.5
        draw_lines(canvas, replace(panel, points0=points0, points1=points1), small0.shape[1::-1])
        rows += [text_bar(canvas.shape[1], panel.heading), canvas]
    return np.concatenate([*rows, text_bar(rows[0].shape[1], legend(panels))], axis=0)


def overlay(
    warped: np.ndarray, image: np.ndarray, covered: np.ndarray, opacity: float
) -> np.ndarray:
    """Lay a warped image over another, (H, W, 3) uint8 each, where it covers it, (H, W) bool; the
    rest stays bright.
    """
    mixed = cv2.addWeighted(warped, opacity, image, 1 - opacity, 0)
    return np.where(covered[..., None], mixed, image)


def reduced(image: np.ndarray, longer_side: int) -> Tuple[np.ndarray, float]:
    """Reduce an image to at most this longer side in pixels; returns it and the scale."""
    scale = min(1.0, longer_side / max(image.shape[:2]))
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA), scale


def write(path: Path, picture: np.ndarray) -> None:
    """Write a BGR picture in the format of its extension. Raises OSError."""
    write_atomic(path, encode(path.suffix.lower(), picture))


def encode(ending: str, picture: np.ndarray) -> bytes:
    """Encode a BGR picture in the format of an extension such as ".jpg". Raises OSError if OpenCV
    cannot.
    """
    ok, encoded = cv2.imencode(ending, picture)
    if not ok:
        raise OSError(0, "the picture could not be encoded", ending)
    return encoded.tobytes()
