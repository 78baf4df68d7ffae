"""The pixels of many image files: by OpenCV, or by torchvision (nvJPEG where there is a GPU, libjpeg on a CPU).

All decoders, DALI's in `dali` too, have the same signature, order and verdicts. torchvision and DALI decode 8-bit JPEG
of one or three components; every other file, and one they refuse, goes through OpenCV. Gray is the luma that the file
holds (ITU-R BT.601): on a CPU all ask libjpeg for it and get the same pixels; nvJPEG may differ by a few levels.
"""

from __future__ import annotations

import os
from typing import Any, Iterable, Iterator, Optional, Tuple, Union

import numpy as np

from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet
from superglue_sift.images import BadImage, check, decode_gray, is_plain_jpeg

Outcome = Tuple[Entry, Union[np.ndarray, BadImage]]


def gpu() -> Optional[int]:
    """This rank's GPU, None without one."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return int(os.environ.get("LOCAL_RANK", "0")) % count if count else None


def decoded(images: ImageSet, entries: Iterable[Entry]) -> Iterator[Outcome]:
    """Each entry with its gray pixels (H, W) uint8, or with why it cannot serve; in their order, each once."""
    for entry in entries:
        try:
            yield entry, decode_gray(images.read(entry), entry.name)
        except BadImage as bad:
            yield entry, bad


def torchvision_io() -> Any:
    """torchvision's decoders; RequestError with what to do where it cannot decode."""
    from pipeline import compat

    return compat.torchvision_io("keypoints.decoder = torchvision", "opencv")


def torchvision_decoded(images: ImageSet, entries: Iterable[Entry]) -> Iterator[Outcome]:
    """As `decoded`. RequestError where torchvision cannot decode."""
    import torch

    io, index = torchvision_io(), gpu()
    device = "cpu" if index is None else f"cuda:{index}"
    for entry in entries:
        found = plain_jpeg(images, entry)
        if isinstance(found, bytes):
            # copied: torch takes no memory that it may not write to
            encoded = torch.from_numpy(np.frombuffer(found, np.uint8).copy())
            try:
                found = io.decode_jpeg(encoded, io.ImageReadMode.GRAY, device=device)[0].cpu().numpy()
            except RuntimeError:
                found = by_opencv(found, entry.name)
        yield entry, found


def plain_jpeg(images: ImageSet, entry: Entry) -> Union[bytes, np.ndarray, BadImage]:
    """The checked bytes of an 8-bit JPEG of one or three components; of any other file what OpenCV makes of it."""
    try:
        data = images.read(entry)
        return data if is_plain_jpeg(check(data, entry.name)) else decode_gray(data, entry.name)
    except BadImage as bad:
        return bad


def by_opencv(data: bytes, name: str) -> Union[np.ndarray, BadImage]:
    """(H, W) uint8, or why the file cannot serve."""
    try:
        return decode_gray(data, name)
    except BadImage as bad:
        return bad
