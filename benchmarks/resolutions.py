"""How the matches of two photographs depend on the size of a file.

    python -m benchmarks.resolutions a.jpg b.jpg [c.jpg d.jpg ...]

Both photographs of each pair are reduced to 1,024 px. The second is then resized to each width, and
matched with the first.
"""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional, Sequence, Tuple

import cv2
import numpy as np

from benchmarks.command import make_parser, print_head, print_row
from superglue_sift import Matcher
from superglue_sift.features.images import UPRIGHT, read_gray, reduce

REFERENCE = 1024  # px, longer side
SIDES = (384, 512, 640, 768, REFERENCE, 1536, 2048, 4096, 8192, 16384)


def resize(gray: np.ndarray, side: int) -> np.ndarray:
    """Resize (H, W) to a longer side of `side` px."""
    factor = side / max(gray.shape)
    method = cv2.INTER_AREA if factor < 1 else cv2.INTER_CUBIC
    return cv2.resize(gray, None, fx=factor, fy=factor, interpolation=method)


def count(matcher: Matcher, pairs: List[Tuple[np.ndarray, np.ndarray]]) -> Tuple[int, int]:
    """Numbers of matches and of aligned matches of all pairs."""
    found = [matcher.match(*pair) for pair in pairs]
    return (
        sum(len(each.matches) for each in found),
        sum(int(np.isfinite(each.deviations).sum()) for each in found),
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the table."""
    parser = make_parser("resolutions", __doc__)
    parser.add_argument("images", type=Path, nargs="+", help="two of one place, and two, ...")
    args = parser.parse_args(argv)
    if len(args.images) % 2:
        parser.error("an even number of images: two of each place")
    matcher = Matcher.load(device="cpu")
    photos = [reduce(read_gray(path, UPRIGHT), REFERENCE) for path in args.images]
    pairs = list(zip(photos[::2], photos[1::2]))
    matches, aligned = count(matcher, pairs)
    print(f"{len(pairs)} pairs, at {REFERENCE} px {matches} matches, {aligned} aligned")
    print_head(["file, px", "matches, %", "aligned, %"])
    for side in SIDES:
        found = count(matcher, [(one, resize(other, side)) for one, other in pairs])
        shares = [100 * found[0] / matches, 100 * found[1] / aligned]
        print_row([f"{side:,}", *(f"{share:.0f}" for share in shares)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
