"""Decode images with torchvision: by nvJPEG where there is a GPU, else by libjpeg.

As `dali_decoder`, in the process that feeds the workers, one image after another.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator

import numpy as np

from pipeline.errors import RequestError
from pipeline.image_sets.dali_decoder import Work, gpu_index, read_jpeg
from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet


def require() -> Any:
    """torchvision.io. Raises RequestError where it is missing or cannot decode.

    A CUDA build does not load with a CPU build of torch, which shows only when a decoder is used:
    torch 1.10 raises RuntimeError, torch 2 AttributeError.
    """
    import torch

    try:
        from torchvision import io

        assert torch.ops.image.decode_jpeg
    except (ImportError, RuntimeError, AttributeError):
        raise RequestError(
            "keypoints.decoder = torchvision: torchvision is not installed, or is one for another"
            f" torch than {torch.__version__}, and cannot decode; install the one for this torch,"
            " or set keypoints.decoder: pillow"
        ) from None
    return io


def decode_all(images: ImageSet, entries: Iterable[Entry]) -> Iterator[Work]:
    """Each entry in order with its gray pixels, or without them, as `dali_decoder.decode_all`."""
    import torch

    io = require()
    index = gpu_index()
    device = "cpu" if index is None else f"cuda:{index}"
    for entry in entries:
        data = read_jpeg(images, entry)
        if data is None:
            yield entry
            continue
        # copied, since torch warns about read-only memory
        encoded = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        try:
            pixels = io.decode_jpeg(encoded, io.ImageReadMode.GRAY, device=device)[0]
        except RuntimeError:
            yield entry
            continue
        yield entry, pixels.cpu().numpy()
