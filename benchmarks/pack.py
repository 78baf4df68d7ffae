"""Pack photographs for a machine without network: gray WebP files, below 50 MiB in all.

    python -m benchmarks.pack packed/train data/coco/train data/coco/extra_gray
    python -m benchmarks.pack packed/val data/coco/val --mib 4

Names stay, so that photographs of COCO are known by their numbers. `make repro PRESET=pretrained
IMAGES=packed/train VAL_IMAGES=packed/val` and `python -m benchmarks.first_gpu` take the folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Sequence

import cv2
import numpy as np

from benchmarks.command import make_parser
from pipeline import errors
from pipeline.errors import RequestError
from superglue_sift.features.images import UPRIGHT, list_photos, read_gray, reduce
from superglue_sift.files import format_bytes, write_atomic
from superglue_sift.progress import Progress

LONGEST = 640  # px of the longer side
QUALITIES = range(80, 0, -5)  # of WebP, tried from the best on
SAMPLE = 50  # photographs from which the size of all is estimated


def encode(path: Path, quality: int) -> bytes:
    """Return the photograph as a gray WebP file."""
    gray: np.ndarray = reduce(read_gray(path, UPRIGHT), LONGEST)
    _, data = cv2.imencode(".webp", gray, [cv2.IMWRITE_WEBP_QUALITY, quality])
    return data.tobytes()


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Pack the photographs with the best quality that fits."""
    parser = make_parser("pack", __doc__)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("folders", type=Path, nargs="+", help="folders of photographs")
    parser.add_argument("--mib", type=float, default=50.0, help="size of all (default 50)")
    args = parser.parse_args(argv)
    photos = [path for folder in args.folders for path in list_photos(folder)]
    if len({path.stem for path in photos}) < len(photos) or not photos:
        raise RequestError(f"{args.folders[0]}: no photographs, or two of one name")
    # Take the first quality with which a sample fits. The rest may be a little larger.
    some = photos[:: max(len(photos) // SAMPLE, 1)]
    room = args.mib * 2**20 / len(photos) / 1.03
    sizes = ((each, np.mean([len(encode(path, each)) for path in some])) for each in QUALITIES)
    quality = next((each for each, size in sizes if size <= room), None)
    if quality is None:
        raise RequestError(f"{len(photos)} photographs do not fit {args.mib} MiB: name fewer")
    total = 0
    for path in Progress(photos, desc="pack", unit="images"):
        data = encode(path, quality)
        write_atomic(args.out / f"{path.stem}.webp", data)
        total += len(data)
    print(f"{args.out}: {len(photos)} photographs, quality {quality}, {format_bytes(total)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
