"""The image source that decodes with torchvision: nvJPEG where there is a GPU, libjpeg on a CPU.

`decoded` is `pipeline.images.decode.decoded` under another name: the same signature, order and verdicts. torchvision
decodes 8-bit JPEG of one or three components; every other file, and one it refuses, goes through OpenCV. Gray is the
luma that the file holds (ITU-R BT.601, JPEG's own), not a mixture of decoded red, green and blue: on a CPU both ask
libjpeg for it and get the same pixels; nvJPEG may differ by a few levels.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator

import numpy as np
import torch

from pipeline import stack
from pipeline.images.decode import Outcome, gpu
from pipeline.images.manifest import Entry
from pipeline.images.sources import ImageSet
from superglue_sift.images import BadImage, check, decode_gray, is_plain_jpeg

ASKED = "keypoints.decoder = torchvision"


def require() -> None:
    """RequestError with what to do where torchvision cannot decode."""
    stack.torchvision_io(ASKED, "opencv")


def decoded(images: ImageSet, entries: Iterable[Entry]) -> Iterator[Outcome]:
    """Each entry with its gray pixels (H, W) uint8, or with why it cannot serve; in their order, each once.

    Raises:
        RequestError: torchvision cannot decode here.
    """
    io = stack.torchvision_io(ASKED, "opencv")
    index = gpu()
    device = torch.device("cpu" if index is None else f"cuda:{index}")
    for entry in entries:
        try:
            data = images.read(entry)
            if is_plain_jpeg(check(data, entry.name)):
                yield entry, _gray(io, data, entry.name, device)
            else:
                yield entry, decode_gray(data, entry.name)
        except BadImage as bad:
            yield entry, bad


def _gray(io: Any, data: bytes, name: str, device: torch.device) -> np.ndarray:
    """A JPEG's pixels; OpenCV's, or its reason, where torchvision refuses it."""
    # copied: torch takes no memory that it may not write to
    encoded = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    try:
        return io.decode_jpeg(encoded, io.ImageReadMode.GRAY, device=str(device))[0].cpu().numpy()
    except RuntimeError:
        return decode_gray(data, name)
