"""Images unlike photographs, to fine-tune on: pages of text as a scanner shows them, or maps of streets.

    python -m benchmarks.dev.pages FOLDER --kind text --train 200 --held-out 120

Writes `FOLDER/train` and `FOLDER/held-out`, gray JPEG files of 1200x900 pixels. The words of each page, also the street
names of a map, come from one file of Python's standard library, and no two pages share a file. The fonts are those of
matplotlib. Text is set as source code, or in one or two columns with headings and tables. A map has streets, rows of
equal houses, parks and labels. The same arguments and versions of Python and its packages write the same pages.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import cv2
import numpy as np

from pipeline import errors
from pipeline.errors import RequestError
from superglue_sift.progress import Progress

WIDTH, HEIGHT, MARGIN = 1200, 900, 40  # px
FONTS = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral", "DejaVuSans-Oblique", "STIXGeneralItalic")
MIN_BYTES = 6000  # of a text: enough for a page
# folders without plain words, or whose files repeat each other
OTHER = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}

Place = Tuple[int, int, int, int]  # left, top, width and height of a line, px


def texts() -> List[Path]:
    """Files of the standard library that are long enough for a page, in order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = (path for path in root.rglob("*.py") if OTHER.isdisjoint(path.relative_to(root).parts))
    return sorted(path for path in found if path.stat().st_size >= MIN_BYTES)


def text_page(text: str, rng: np.random.Generator) -> np.ndarray:
    """A page of text, (HEIGHT, WIDTH) uint8."""
    size, ink = int(rng.integers(15, 27)), int(rng.integers(0, 70))
    regular, heading = _font(rng.choice(FONTS), size), _font("DejaVuSans-Bold", size * 3 // 2)
    image, draw = _canvas(int(rng.integers(225, 256)))
    lines = [line for line in text.splitlines() if line.strip()]
    lines = lines[int(rng.integers(0, max(1, len(lines) // 2))) :]
    columns = int(rng.integers(0, 3))
    if columns == 0:  # source code
        draw.multiline_text((MARGIN, MARGIN), "\n".join(lines[:60]), ink, regular, spacing=size // 3)
        return np.array(image)
    words = iter(_words("\n".join(lines)))
    for column in range(columns):
        place = MARGIN + column * WIDTH // columns, MARGIN, WIDTH // columns - 2 * MARGIN, size * 4 // 3
        _column(draw, words, (regular, heading), place, ink, rng)
    return np.array(image)


def _column(draw: Any, words: Iterator[str], fonts: Tuple[Any, Any], place: Place, ink: int, rng: Any) -> None:
    """Fill a column with paragraphs, headings and tables."""
    left, y, width, step = place
    while y < HEIGHT - MARGIN:
        kind = rng.choice(("paragraph", "heading", "table"), p=(0.65, 0.2, 0.15))
        if kind == "heading":
            draw.text((left, y), _line(words, fonts[1], width * 0.7), ink, fonts[1])
            y += 2 * step
        elif kind == "table":
            y = _table(draw, words, fonts[0], (left, y, width, step), ink, rng)
        else:
            for _ in range(int(rng.integers(3, 9))):
                draw.text((left, y), _line(words, fonts[0], width), ink, fonts[0])
                y += step
        y += step // 2


def _table(draw: Any, words: Iterator[str], font: Any, place: Place, ink: int, rng: Any) -> int:
    """Draw a ruled table. Returns the y below it."""
    left, top, width, step = place
    rows, columns = (int(value) for value in rng.integers(3, 6, 2))
    for row in range(rows + 1):
        y = top + row * step
        draw.line((left, y, left + width, y), ink)
        for column in range(columns if row < rows else 0):
            cell = str(rng.integers(0, 1000)) if row and column else _line(words, font, width / columns - 16)
            draw.text((left + column * width // columns + 6, y), cell, ink, font)
    for column in range(columns + 1):
        x = left + column * width // columns
        draw.line((x, top, x, top + rows * step), ink)
    return top + (rows + 1) * step


def map_page(text: str, rng: np.random.Generator) -> np.ndarray:
    """A map of streets, (HEIGHT, WIDTH) uint8: drawn on a larger sheet, then rotated."""
    sheet = 1600
    shades = ((215, 246), (150, 200), (195, 215), (20, 90))
    ground, house, green, ink = (int(rng.integers(*limits)) for limits in shades)
    font, words = _font("DejaVuSans", int(rng.integers(15, 22))), iter(_words(text))
    image, draw = _canvas(ground, (sheet, sheet))
    xs, ys = (np.cumsum(rng.integers(110, 300, 14)) - 150 for _ in range(2))
    for left, right in zip(xs, xs[1:]):
        for top, bottom in zip(ys, ys[1:]):
            block = left + 16, top + 16, right - 16, bottom - 16
            if rng.random() < 0.12:
                draw.rectangle(block, green)
                draw.text(((left + right) // 2, (top + bottom) // 2), next(words), ink, font, anchor="mm")
            else:
                _houses(draw, block, (house, ink), rng)
    for at in (*((x, -100, x, sheet) for x in xs), *((-100, y, sheet, y) for y in ys)):
        draw.line([int(value) for value in at], 255, int(rng.integers(12, 22)))
    for _ in range(2):
        ends = rng.integers(0, sheet, 2)
        draw.line((0, int(ends[0]), sheet, int(ends[1])), 255, 26)
    for y in ys:
        for x in range(int(rng.integers(0, 200)), sheet, 420):
            draw.text((x, int(y)), next(words).strip(",.;:") + " street", ink, font, anchor="lm")
    turn = cv2.getRotationMatrix2D((sheet / 2, sheet / 2), float(rng.uniform(-25, 25)), 1.0)
    turn[:, 2] += (WIDTH - sheet) / 2, (HEIGHT - sheet) / 2
    return cv2.warpAffine(np.array(image), turn, (WIDTH, HEIGHT), flags=cv2.INTER_LINEAR, borderValue=[ground])


def _houses(draw: Any, block: Sequence[int], shades: Tuple[int, int], rng: np.random.Generator) -> None:
    """Two rows of equal houses along the upper and the lower street of a block."""
    left, top, right, bottom = (int(value) for value in block)
    wide, deep, gap = (int(rng.integers(*limits)) for limits in ((18, 40), (16, 32), (4, 14)))
    porch = int(rng.integers(4, 12))
    for x in range(left + gap, right - wide, wide + gap):
        for y in (top + 4, bottom - 4 - deep):
            if y < top or rng.random() < 0.1:
                continue
            draw.rectangle((x, y, x + wide, y + deep), shades[0], shades[1])
            inner = y + deep if y == top + 4 else y - porch
            draw.rectangle((x + 4, inner, x + 4 + porch, inner + porch), shades[0], shades[1])


def scan(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The image (H, W) uint8 as a scanner shows it: a shade across it, uneven paper, blur and noise."""
    height, width = image.shape
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    shade = 1 - 0.12 * rng.random() * (1 + np.cos(np.pi * (x * rng.uniform(-1, 1) + y * rng.uniform(-1, 1))))
    paper = cv2.resize(rng.normal(0, 3, (height // 20, width // 20)), (width, height), interpolation=cv2.INTER_CUBIC)
    soft = cv2.GaussianBlur(image.astype(np.float64), (0, 0), rng.uniform(0.4, 0.9))
    return np.clip(soft * shade + paper + rng.normal(0, 2, image.shape), 0, 255).astype(np.uint8)


def _canvas(shade: int, size: Tuple[int, int] = (WIDTH, HEIGHT)) -> Tuple[Any, Any]:
    from PIL import Image, ImageDraw

    image = Image.new("L", size, shade)
    return image, ImageDraw.Draw(image)


def _font(name: str, size: int) -> Any:
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")), size)


def _words(text: str) -> List[str]:
    return re.findall(r"[A-Za-z]{2,14}[,.;:]?", text) * 8


def _line(words: Iterator[str], font: Any, width: float) -> str:
    """The next words that fit into `width` px; at least one."""
    line = next(words)
    while font.getlength(f"{line} WWWWWW") < width:
        line += " " + next(words)
    return line


KINDS: Dict[str, Callable[[str, np.random.Generator], np.ndarray]] = {"text": text_page, "map": map_page}


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.pages", description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder to write, new or empty")
    parser.add_argument("--kind", choices=sorted(KINDS), default="text")
    parser.add_argument("--train", type=int, default=200, help="pages to train on")
    parser.add_argument("--held-out", type=int, default=120, help="pages to validate and test on")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    found, count = texts(), args.train + args.held_out
    if count > len(found):
        raise RequestError(f"--train, --held-out: {count} pages, but Python has {len(found)} files of text")
    if args.folder.exists() and any(args.folder.iterdir()):
        raise RequestError(f"{args.folder}: not empty, and pages of two runs share texts; name another folder")
    order = np.random.default_rng(args.seed).permutation(len(found))[:count]
    for n, index in enumerate(Progress(order.tolist(), desc="pages", unit="page", total=count)):
        rng = np.random.default_rng((args.seed, n))
        text = found[index].read_text(encoding="utf-8", errors="replace")
        page = scan(KINDS[args.kind](text, rng), rng)
        path = args.folder / ("train" if n < args.train else "held-out") / f"{args.kind}-{args.seed}-{n:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), page, [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(60, 91))])
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
