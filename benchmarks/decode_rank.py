"""A decoder over a folder of photographs, for `mode_rows`: answers each line on standard input with a line `ready`."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any, Iterator, List, Optional, Sequence

import cv2

from benchmarks import dali_views
from pipeline.image_sets.decode import gpu
from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet, folder_entries, list_images
from pipeline.keypoints.pool import decoder
from superglue_sift.images import BadImage

VIEW = (320, 240)
REPEATED = 10_000  # passes over the photographs; more than any run reads


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True, help="a decoder, or opencv-views or dali-views")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args(argv)
    cv2.setNumThreads(1)
    names = [path.name for path in list_images(args.folder)]
    entries = folder_entries(args.folder, names, "train", "folder")
    images = ImageSet(entries, {"folder": str(args.folder)})
    done = _endless(args.way, images, entries)
    print("ready", flush=True)
    while sys.stdin.readline():
        left = len(entries)
        while left > 0:
            left -= next(done)
        print("ready", flush=True)
    return 0


def _endless(way: str, images: ImageSet, entries: List[Entry]) -> Iterator[int]:
    """Yield the number of decoded photographs, endlessly: the pipeline is built once, before it is timed."""
    if way.endswith("-views"):
        files = [images.read(entry) for entry in entries] * REPEATED
        if way == "opencv-views":
            return (len(H) for _, _, H in dali_views.opencv_views(files, VIEW))
        return (len(H) for _, _, H in dali_views.dali_views(files, VIEW, device=gpu()))
    return (_whole(*each) for each in decoder(way)(images, itertools.cycle(entries)))


def _whole(entry: Entry, gray: Any) -> int:
    if isinstance(gray, BadImage):
        raise gray
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
