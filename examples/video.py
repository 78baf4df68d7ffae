"""Match each frame of a video or a camera with the frame before it.

    python examples/video.py walk.mp4 pictures --every 10
    python examples/video.py 0 pictures --frames 100       # 100 frames of camera 0; Ctrl-C ends it

For each pair of frames, the script prints the number of matches and the median shift between both
frames. It writes a picture of the matches to FOLDER/frameN.jpg. It needs `pip install .` in a
clone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Iterator, Optional, Tuple

from superglue_sift import Matcher  # import it before cv2: it sets options of OpenCV
from superglue_sift.errors import RequestError

# isort: split
import cv2
import numpy as np


def read_frames(
    source: str, every: int, max_frames: Optional[int]
) -> Iterator[Tuple[int, np.ndarray]]:
    """Read every N-th frame of a video file or a camera.

    Args:
        source: path of the file, or number of the camera.
        every: N.
        max_frames: maximum number of frames. None reads to the end.

    Yields:
        The number of the frame in the video, and its pixels (H, W, 3) uint8 BGR.

    Raises:
        SystemExit: If the video cannot be opened, or ends before the length that it states.
    """
    capture = cv2.VideoCapture(int(source) if source.isdecimal() else source)
    if not capture.isOpened():
        raise SystemExit(f"error: {source}: OpenCV cannot open it as a video or a camera")
    frame_count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))  # 0 or less of a camera
    numbers = itertools.count() if max_frames is None else range(max_frames * every)
    for number in numbers:
        if not capture.grab():
            if number < frame_count:
                ending = f"ends at frame {number} of {frame_count}; the file may be damaged"
                raise SystemExit(f"error: {source}: {ending}")
            return
        if number % every == 0:
            is_decoded, frame = capture.retrieve()
            if not is_decoded:
                raise SystemExit(f"error: {source}: frame {number} is damaged")
            yield number, frame


def main() -> None:
    """Read the command line, and match the frames."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("source", help="video file, or number of a camera")
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    parser.add_argument("--every", type=int, default=1, help="use every N-th frame")
    parser.add_argument("--frames", type=int, help="use at most N frames")
    parser.add_argument("--model", help="model file (default: the shipped weights)")
    args = parser.parse_args()
    if args.every < 1:
        parser.error("--every: must be 1 or more")
    matcher = Matcher.load(args.model)
    previous = None
    for number, frame in read_frames(args.source, args.every, args.frames):
        features = matcher.extract(frame)
        if previous is not None:
            result = matcher.match(previous, features)
            shift = None
            if len(result.matches):
                shift = np.median(result.points1 - result.points0, axis=0)
            print(f"frame {number}: {len(result.matches)} matches, moved by {shift} px")
            result.show().save(args.folder / f"frame{number:06d}.jpg")
        previous = features


if __name__ == "__main__":
    try:
        main()
    except RequestError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        sys.exit(0)  # The usual end of a camera
