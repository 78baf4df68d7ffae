"""Pictures of matches: two images side by side, joined by half transparent lines, coloured by confidence.

Colours are viridis, which is perceptually uniform, also in gray: dark violet 0, yellow 1. The strongest `LINES` matches
are lines, the others points, so that the images stay visible. Known wrong matches are red and end in crosses.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Sequence, Tuple, Union

import cv2
import numpy as np

from superglue_sift.files import write_atomic

RED, WHITE, DARK = (40, 40, 240), (255, 255, 255), (40, 40, 40)  # BGR
LINES = 150  # strongest matches of a pair, drawn as lines
OPACITY = 0.55  # of lines; their ends are opaque
SIDE = 1280  # maximum longer side of each image in the picture, pixels
GAP = 8  # pixels between the two images
BAR = 26  # height of a heading and of the legend in pixels
FONT, FONT_SIZE = cv2.FONT_HERSHEY_SIMPLEX, 0.5


@dataclass(frozen=True)
class Panel:
    """The matches of one matcher.

    points0, points1: (K, 2) pixels. scores: (K,) confidence, 0 to 1. wrong: (K,) bool, None if not known.
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


@functools.lru_cache(maxsize=1)
def colour_table() -> Tuple[Tuple[int, int, int], ...]:
    """The 256 colours of confidences from 0 to 1, BGR."""
    rows = cv2.applyColorMap(np.arange(256, dtype=np.uint8).reshape(-1, 1), cv2.COLORMAP_VIRIDIS)[:, 0]
    return tuple((int(b), int(g), int(r)) for b, g, r in rows)


def css_colours() -> List[str]:
    """`colour_table` for CSS: 256 times #rrggbb."""
    return [f"#{r:02x}{g:02x}{b:02x}" for b, g, r in colour_table()]


def colour_of(score: float) -> Tuple[int, int, int]:
    """BGR of a confidence from 0 to 1."""
    return colour_table()[round(255 * min(max(float(score), 0.0), 1.0))]


def side_by_side(image0: np.ndarray, image1: np.ndarray) -> np.ndarray:
    """(H0, W0) and (H1, W1) uint8, gray or BGR -> (max H, W0 + gap + W1, 3) uint8."""
    left, right = (cv2.cvtColor(i, cv2.COLOR_GRAY2BGR) if i.ndim == 2 else i for i in (image0, image1))
    canvas = np.full((max(len(left), len(right)), left.shape[1] + GAP + right.shape[1], 3), 255, np.uint8)
    canvas[: len(left), : left.shape[1]] = left
    canvas[: len(right), left.shape[1] + GAP :] = right
    return canvas


def drawing_order(panel: Panel) -> np.ndarray:
    """(K,) int64: correct matches from weak to strong, then wrong ones, which stay visible on top."""
    wrong = np.zeros(len(panel.scores), bool) if panel.wrong is None else np.asarray(panel.wrong, bool)
    return np.lexsort((panel.scores, wrong))


def strongest(scores: np.ndarray) -> np.ndarray:
    """(K,) bool: matches that are drawn as lines."""
    chosen = np.zeros(len(scores), bool)
    chosen[np.argsort(-np.asarray(scores), kind="stable")[:LINES]] = True
    return chosen


def draw_lines(canvas: np.ndarray, panel: Panel, shift: int) -> None:
    """Draw the matches of a panel, with points1 shifted `shift` pixels to the right."""
    order, lines = drawing_order(panel), strongest(panel.scores)
    wrong = np.zeros(len(lines), bool) if panel.wrong is None else np.asarray(panel.wrong, bool)
    thickness = 1 + canvas.shape[1] // 1600
    # fixed-point coordinates for cv2: four fractional bits
    ends = np.rint(16 * np.stack([panel.points0, panel.points1 + np.array([shift, 0])], axis=1)).astype(int)
    colours = [RED if bad else colour_of(score) for bad, score in zip(wrong, panel.scores)]
    below = canvas.copy()
    for index in order[lines[order]]:
        start, end = (tuple(point.tolist()) for point in ends[index])
        cv2.line(canvas, start, end, colours[index], thickness, cv2.LINE_AA, 4)
    cv2.addWeighted(canvas, OPACITY, below, 1 - OPACITY, 0, dst=canvas)
    for index in order:
        for point in ends[index]:
            _draw_end(canvas, point, colours[index], bool(wrong[index]), thickness)


def _draw_end(canvas: np.ndarray, point: np.ndarray, colour: Tuple[int, int, int], wrong: bool, size: int) -> None:
    """Draw a dot, or a cross for a wrong match, at `point` in sixteenths of a pixel."""
    if not wrong:
        cv2.circle(canvas, tuple(point.tolist()), 16 * (2 + size), colour, -1, cv2.LINE_AA, 4)
        return
    for dx, dy in ((1, 1), (1, -1)):
        arm = 16 * (3 + size) * np.array([dx, dy])
        cv2.line(canvas, tuple((point - arm).tolist()), tuple((point + arm).tolist()), colour, size, cv2.LINE_AA, 4)


def heading_bar(width: int, text: str) -> np.ndarray:
    """A dark bar (BAR, width, 3) with text, shrunk to fit."""
    bar = np.full((BAR, width, 3), DARK, np.uint8)
    (text_width, _), _ = cv2.getTextSize(text, FONT, FONT_SIZE, 1)
    scale = min(FONT_SIZE, FONT_SIZE * (width - 12) / max(text_width, 1))
    cv2.putText(bar, text, (6, BAR - 9), FONT, scale, WHITE, 1, cv2.LINE_AA)
    return bar


def legend_bar(width: int, panels: Sequence[Panel]) -> np.ndarray:
    """A dark bar (BAR, width, 3) that explains the colours, shrunk to fit."""
    items: List[np.ndarray] = [_word("confidence 0"), _swatches(colour_table()[::2]), _word("1")]
    for means in dict.fromkeys(panel.wrong_means for panel in panels if panel.wrong is not None):
        items += [_swatches([RED] * 24), _word(means)]
    if any(len(panel.scores) > LINES for panel in panels):
        items.append(_word(f"lines: the {LINES} strongest; dots: the others"))
    row = np.concatenate(items, axis=1)
    if row.shape[1] > width:
        row = cv2.resize(row, (width, max(1, BAR * width // row.shape[1])), interpolation=cv2.INTER_AREA)
    bar = np.full((BAR, width, 3), DARK, np.uint8)
    top = (BAR - len(row)) // 2
    bar[top : top + len(row), : row.shape[1]] = row
    return bar


def _word(text: str) -> np.ndarray:
    (text_width, _), _ = cv2.getTextSize(text, FONT, FONT_SIZE, 1)
    return heading_bar(text_width + 14, text)


def _swatches(colours: Sequence[Tuple[int, int, int]]) -> np.ndarray:
    """A strip of colours, one pixel wide each."""
    strip = np.full((BAR, len(colours), 3), DARK, np.uint8)
    strip[7:-7] = np.array(colours, np.uint8)
    return strip


def draw(image0: np.ndarray, image1: np.ndarray, panels: Sequence[Panel]) -> np.ndarray:
    """Draw one picture, (H, W, 3) uint8 BGR: panels with headings below each other, then the legend.

    Images are reduced to a longer side of `SIDE`.
    """
    (small0, scale0), (small1, scale1) = (reduced(image, SIDE) for image in (image0, image1))
    rows: List[np.ndarray] = []
    for panel in panels:
        canvas = side_by_side(small0, small1)
        points0, points1 = (panel.points0 + 0.5) * scale0 - 0.5, (panel.points1 + 0.5) * scale1 - 0.5
        shown = Panel(panel.heading, points0, points1, panel.scores, panel.wrong, panel.wrong_means)
        draw_lines(canvas, shown, small0.shape[1] + GAP)
        rows += [heading_bar(canvas.shape[1], panel.heading), canvas]
    return np.concatenate([*rows, legend_bar(rows[0].shape[1], panels)], axis=0)


def reduced(image: np.ndarray, longer_side: int) -> Tuple[np.ndarray, float]:
    """Reduce an image to at most this longer side in pixels; returns it and the scale."""
    scale = min(1.0, longer_side / max(image.shape[:2]))
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA), scale


def write(path: Path, picture: np.ndarray) -> None:
    """Write a BGR picture in the format of its extension. Raises OSError."""
    write_atomic(path, encode(path.suffix.lower(), picture))


def encode(ending: str, picture: np.ndarray) -> bytes:
    """Encode a BGR picture in the format of an extension such as ".jpg". Raises OSError if OpenCV cannot."""
    ok, encoded = cv2.imencode(ending, picture)
    if not ok:
        raise OSError(0, "the picture could not be encoded", ending)
    return encoded.tobytes()
