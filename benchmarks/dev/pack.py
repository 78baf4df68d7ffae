"""Pack photographs for a machine without network, as gray WebP files.

    python -m benchmarks.dev.pack packed/train data/coco/train data/coco/extra_gray
    python -m benchmarks.dev.pack packed/val data/coco/val

Names stay, so that photographs of COCO are known by their numbers. The folders go into `make repro
PRESET=pretrained IMAGES=packed/train VAL_IMAGES=packed/val` and `python -m
benchmarks.dev.first_gpu`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

import cv2

from pipeline import errors
from pipeline.errors import RequestError
from superglue_sift.features.images import UPRIGHT, read_gray, reduce_image
from superglue_sift.features.photo_folder import list_photos
from superglue_sift.files import format_bytes, write_atomically
from superglue_sift.progress import Progress

LONGEST = 640  # px of the longer side
QUALITY = 35  # of WebP: the 2,999 photographs of the shipped weights take 47 MiB


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Pack the photographs."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("folders", type=Path, nargs="+", help="folders of photographs")
    args = parser.parse_args(argv)
    photos = [path for folder in args.folders for path in list_photos(folder)]
    if len({path.stem for path in photos}) < len(photos) or not photos:
        raise RequestError(f"{args.folders[0]}: no photographs, or two of one name")
    total = 0
    for path in Progress(photos, desc="pack", unit="images"):
        gray = reduce_image(read_gray(path, UPRIGHT), LONGEST)
        data = cv2.imencode(".webp", gray, [cv2.IMWRITE_WEBP_QUALITY, QUALITY])[1].tobytes()
        write_atomically(args.out / f"{path.stem}.webp", data)
        total += len(data)
    print(f"{args.out}: {len(photos)} photographs, {format_bytes(total)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
