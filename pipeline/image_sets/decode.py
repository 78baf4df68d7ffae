"""Decode image files with Pillow, or with torchvision (nvJPEG where there is a GPU, libjpeg on a
CPU).

All decoders, including `dali_decoder`, have the same signature and order, and reject the same
files. torchvision and DALI decode 8-bit JPEG of one or three components; Pillow decodes all other
files, and those they refuse. Gray is the luma of the file (ITU-R BT.601): on a CPU all get the same
pixels from libjpeg; nvJPEG may differ by a few levels.
"""

from __future__ import annotations

import os
from typing import Iterable, Iterator, Optional, Tuple, Union

import numpy as np

from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet
from superglue_sift.images import BadImage, decode_gray, is_plain_jpeg

Outcome = Tuple[Entry, Union[np.ndarray, BadImage]]


def gpu() -> Optional[int]:
    """Index of this rank's GPU, None without one."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return int(os.environ.get("LOCAL_RANK", "0")) % count if count else None


def decode_all(images: ImageSet, entries: Iterable[Entry]) -> Iterator[Outcome]:
    """Yield each entry in order with its gray pixels (H, W) uint8, or the reason why it cannot be
    used.
    """
    for entry in entries:
        try:
            yield entry, decode_gray(images.read(entry), entry.name)
        except BadImage as bad:
            yield entry, bad


def decode_by_torchvision(images: ImageSet, entries: Iterable[Entry]) -> Iterator[Outcome]:
    """Like `decode_all`. Raises RequestError where torchvision cannot decode."""
    import torch

    from pipeline import compat

    io = compat.torchvision_io()
    index = gpu()
    device = "cpu" if index is None else f"cuda:{index}"
    for entry in entries:
        image = read_jpeg(images, entry)
        if isinstance(image, bytes):
            # copied, since torch warns about read-only memory
            encoded = torch.from_numpy(np.frombuffer(image, np.uint8).copy())
            try:
                image = (
                    io.decode_jpeg(encoded, io.ImageReadMode.GRAY, device=device)[0].cpu().numpy()
                )
            except RuntimeError:
                image = decode_by_pillow(image, entry.name)
        yield entry, image


def read_jpeg(images: ImageSet, entry: Entry) -> Union[bytes, np.ndarray, BadImage]:
    """The checked bytes of an 8-bit JPEG of one or three components; of other files Pillow's pixels
    or the reason.
    """
    try:
        data = images.read(entry)
        return data if is_plain_jpeg(data, entry.name) else decode_gray(data, entry.name)
    except BadImage as bad:
        return bad


def decode_by_pillow(data: bytes, name: str) -> Union[np.ndarray, BadImage]:
    """(H, W) uint8, or the reason why the file cannot be used."""
    try:
        return decode_gray(data, name)
    except BadImage as bad:
        return bad
