"""How the matches of two photographs depend on the size of a file.

    python -m benchmarks.dev.resolutions a.jpg b.jpg [c.jpg d.jpg ...]

Both photographs of each pair are reduced to 1,024 px. The second is then resized to each width, and
matched with the first.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence, Tuple

import cv2
import numpy as np

from superglue_sift import Matcher
from superglue_sift.features import reduce
from superglue_sift.images import UPRIGHT, read_gray

REFERENCE = 1024  # px, longer side
SIDES = (384, 512, 640, 768, REFERENCE, 1536, 2048, 4096, 8192, 16384)


def resize(gray: np.ndarray, side: int) -> np.ndarray:
    """Resize (H, W) to a longer side of `side` px."""
    unit = max(gray.shape) / side
    size = (round(gray.shape[1] / unit), round(gray.shape[0] / unit))
    return cv2.resize(gray, size, interpolation=cv2.INTER_AREA if unit > 1 else cv2.INTER_CUBIC)


def count(matcher: Matcher, first: np.ndarray, second: np.ndarray) -> Tuple[int, int]:
    """Numbers of matches and of aligned matches."""
    found = matcher.match(first, second)
    return len(found.matches), int(np.isfinite(found.deviations).sum())


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dev.resolutions", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("images", type=Path, nargs="+", help="two of one place, and two, ...")
    args = parser.parse_args(argv)
    if len(args.images) % 2:
        parser.error("an even number of images: two of each place")
    matcher = Matcher.load(device="cpu")
    photos = [reduce(read_gray(path, UPRIGHT), REFERENCE) for path in args.images]
    pairs = list(zip(photos[::2], photos[1::2]))
    whole = sum(np.array(count(matcher, *pair)) for pair in pairs)
    print(f"{len(pairs)} pairs, at {REFERENCE} px {whole[0]} matches, {whole[1]} aligned")
    print("| file, px | matches, % | aligned, % |\n|---|---|---|")
    for side in SIDES:
        found = sum(np.array(count(matcher, one, resize(other, side))) for one, other in pairs)
        print(f"| {side:,} | {100 * found[0] / whole[0]:.0f} | {100 * found[1] / whole[1]:.0f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
