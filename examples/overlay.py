"""Warp one photograph onto another by the homography of their matches.

    python examples/overlay.py a.jpg b.jpg overlay.jpg     # the mean of both photographs
    python examples/overlay.py a.jpg b.jpg blink.gif       # an animation that shows them in turn

The homography maps pixels of the first photograph to pixels of the second. It is exact for a flat
scene, and for a camera that only rotated. The script needs `pip install .` in a clone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from superglue_sift import Matcher  # import it before cv2: it sets options of OpenCV
from superglue_sift.errors import RequestError

# isort: split
import cv2
import numpy as np
from PIL import Image


def warp(image0: np.ndarray, image1: np.ndarray, H: np.ndarray) -> np.ndarray:
    """Warp image 0 by the homography H (3, 3), and paste it onto image 1.

    Args:
        image0, image1: (height, width, 3) uint8.
        H: maps pixels of image 0 to pixels of image 1.

    Returns:
        An image of the size of image 1, (height, width, 3) uint8.
    """
    size = image1.shape[1::-1]
    warped = cv2.warpPerspective(image0, H, size)
    is_covered = cv2.warpPerspective(np.full(image0.shape[:2], 255, np.uint8), H, size) == 255
    return np.where(is_covered[..., None], warped, image1)


def main() -> None:
    """Read the command line, match both photographs, and write the overlay."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("image0", help="photograph to warp")
    parser.add_argument("image1", help="photograph that is not warped")
    parser.add_argument("out", type=Path, help="picture to write; an animation if it ends in .gif")
    parser.add_argument("--model", help="model file (default: the shipped weights)")
    args = parser.parse_args()
    result = Matcher.load(args.model).match(args.image0, args.image1)
    fit = result.fit_homography()
    print(f"{int(fit.inliers.sum())} of {len(result.matches)} matches fit one homography")
    if fit.model is None:
        raise SystemExit("error: no homography fits the matches, so there is no overlay")
    # `load_photos` rotates them upright, as the coordinates of the matches are. Pillow needs RGB.
    photo0, photo1 = result.load_photos()
    image0 = cv2.cvtColor(photo0.pixels, cv2.COLOR_BGR2RGB)
    image1 = cv2.cvtColor(photo1.pixels, cv2.COLOR_BGR2RGB)
    overlay = warp(image0, image1, fit.model)
    if args.out.suffix.lower() == ".gif":
        frames = [Image.fromarray(overlay), Image.fromarray(image1)]
        frames[0].save(args.out, save_all=True, append_images=frames[1:], duration=600, loop=0)
    else:
        Image.fromarray(cv2.addWeighted(overlay, 0.5, image1, 0.5, 0)).save(args.out)
    print(f"written {args.out}")


if __name__ == "__main__":
    try:
        main()
    except RequestError as error:
        raise SystemExit(f"error: {error}") from None
