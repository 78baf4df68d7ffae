"""Match the frames of a video or a camera, each with the one before it.

    python examples/video.py walk.mp4 found --every 10
    python examples/video.py 0 found --frames 100          # camera 0, until Ctrl-C

Prints for each pair the number of matches and how far the picture moved, and writes a picture of
the matches to FOLDER/frameN.jpg. Needs `pip install .` in a clone, which brings OpenCV.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Iterator, Optional, Tuple

from superglue_sift import Matcher  # before OpenCV is used: the same keypoints everywhere
from superglue_sift.errors import RequestError

# isort: split
import cv2
import numpy as np


def read_frames(source: str, every: int, most: Optional[int]) -> Iterator[Tuple[int, np.ndarray]]:
    """Number and pixels (H, W, 3) uint8 BGR of each `every`-th frame of a file or a camera."""
    capture = cv2.VideoCapture(int(source) if source.isdecimal() else source)
    if not capture.isOpened():
        raise SystemExit(f"error: {source}: OpenCV cannot open it as a video or a camera")
    numbers = itertools.count() if most is None else range(most * every)
    for number in numbers:
        if not capture.grab():
            return
        if number % every == 0:
            ok, frame = capture.retrieve()
            if ok:
                yield number, frame


def main() -> None:
    """Entry point of the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a video file, or the number of a camera")
    parser.add_argument("folder", type=Path, help="for the pictures")
    parser.add_argument("--every", type=int, default=1, help="use every N-th frame")
    parser.add_argument("--frames", type=int, help="use at most N frames")
    parser.add_argument("--model", help="model file (default: the shipped weights)")
    args = parser.parse_args()
    matcher = Matcher.load(args.model)
    before = None
    for number, frame in read_frames(args.source, args.every, args.frames):
        features = matcher.extract(frame)
        if before is not None:
            result = matcher.match(before, features)
            moved = (
                np.median(result.points1 - result.points0, axis=0) if len(result.matches) else None
            )
            print(f"frame {number}: {len(result.matches)} matches, moved by {moved} px")
            result.show().save(args.folder / f"frame{number:06d}.jpg")
        before = features


if __name__ == "__main__":
    try:
        main()
    except RequestError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        sys.exit(0)  # this is how a camera ends
