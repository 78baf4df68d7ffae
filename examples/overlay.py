"""Warp one photograph onto another by the homography of their matches.

    python examples/overlay.py a.jpg b.jpg overlay.jpg     # both, half transparent
    python examples/overlay.py a.jpg b.jpg blink.gif       # one after the other, for ever

The homography maps pixels of the first photograph to pixels of the second. It exists for a plane,
or for a camera that only turned. Needs `pip install .` in a clone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from superglue_sift import Matcher  # before OpenCV is used: the same keypoints everywhere
from superglue_sift.errors import RequestError

# isort: split
import cv2
import numpy as np
from PIL import Image


def warp(image0: np.ndarray, image1: np.ndarray, H: np.ndarray) -> np.ndarray:
    """Image 0 where it covers image 1, and image 1 elsewhere: (H, W, 3) uint8."""
    size = image1.shape[1::-1]
    warped = cv2.warpPerspective(image0, H, size)
    covered = cv2.warpPerspective(np.full(image0.shape[:2], 255, np.uint8), H, size) == 255
    return np.where(covered[..., None], warped, image1)


def main() -> None:
    """Entry point of the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image0", help="the photograph to warp")
    parser.add_argument("image1", help="the photograph that stays")
    parser.add_argument("out", type=Path, help="a picture, or an animation that ends in .gif")
    parser.add_argument("--model", help="model file (default: the shipped weights)")
    args = parser.parse_args()
    result = Matcher.load(args.model).match(args.image0, args.image1)
    fit = result.homography()
    print(f"{int(fit.inliers.sum())} of {len(result.matches)} matches fit one homography")
    if fit.model is None:
        raise SystemExit("error: no homography, so no overlay")
    # both upright and in colour, as the coordinates of the matches are
    image0, image1 = (photo.pixels[..., ::-1] for photo in result.photos())
    laid = warp(np.ascontiguousarray(image0), image1, fit.model)
    if args.out.suffix.lower() == ".gif":
        shown, under = (Image.fromarray(image) for image in (laid, np.ascontiguousarray(image1)))
        shown.save(args.out, save_all=True, append_images=[under], duration=600, loop=0)
    else:
        half = cv2.addWeighted(laid, 0.5, np.ascontiguousarray(image1), 0.5, 0)
        Image.fromarray(half).save(args.out)
    print(f"written {args.out}")


if __name__ == "__main__":
    try:
        main()
    except RequestError as error:
        raise SystemExit(f"error: {error}") from None
