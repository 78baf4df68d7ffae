"""Pack photographs for a machine without network: gray WebP files, below 64 MiB in all.

    python -m benchmarks.pack packed data/coco/train data/coco/extra_gray

Names stay, so that photographs of COCO are known by their numbers. `make repro PRESET=pretrained
IMAGES=packed` and `python -m benchmarks.first_gpu --images packed` take the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional, Sequence

import cv2
import numpy as np

from benchmarks.command import make_parser
from pipeline import errors
from pipeline.errors import RequestError
from pipeline.files import format_bytes, write_atomic
from superglue_sift.features.images import UPRIGHT, list_photos, read_gray, reduce
from superglue_sift.progress import Progress

QUALITIES = (80, 60, 45, 30, 20)  # of WebP, tried from the best on
SAMPLE = 50  # photographs from which the size of all is estimated


def encode(path: Path, longest: int, quality: int) -> bytes:
    """The photograph as a gray WebP file, its longer side at most `longest` px."""
    gray: np.ndarray = reduce(read_gray(path, UPRIGHT), longest)
    ok, data = cv2.imencode(".webp", gray, [cv2.IMWRITE_WEBP_QUALITY, quality])
    if not ok:
        raise RequestError(f"{path}: cannot be encoded")
    return data.tobytes()


def choose_quality(photos: List[Path], longest: int, most: float) -> int:
    """The best quality with which all photographs take at most `most` bytes, by a sample."""
    some = photos[:: max(len(photos) // SAMPLE, 1)]
    for quality in QUALITIES:
        mean = np.mean([len(encode(path, longest, quality)) for path in some])
        if 1.05 * mean * len(photos) <= most:  # the sample may be smaller than the rest
            return quality
    raise RequestError(
        f"{len(photos)} photographs do not fit {format_bytes(most)}: lower --longest"
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Pack them."""
    parser = make_parser("pack", __doc__)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("folders", type=Path, nargs="+", help="folders of photographs")
    parser.add_argument("--longest", type=int, default=640, help="px of the longer side (640)")
    parser.add_argument("--mib", type=float, default=63.0, help="size of all (63)")
    args = parser.parse_args(argv)
    photos = [path for folder in args.folders for path in list_photos(folder)]
    if len({path.stem for path in photos}) < len(photos) or not photos:
        raise RequestError(f"{args.folders[0]}: no photographs, or two of one name")
    quality = choose_quality(photos, args.longest, args.mib * 2**20)
    total = 0
    for path in Progress(photos, desc="pack", unit="images"):
        data = encode(path, args.longest, quality)
        write_atomic(args.out / f"{path.stem}.webp", data)
        total += len(data)
    print(f"{args.out}: {len(photos)} photographs, quality {quality}, {format_bytes(total)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
