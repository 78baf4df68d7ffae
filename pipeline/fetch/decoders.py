"""Decode 8-bit JPEG by torchvision or NVIDIA DALI, on the GPU if there is one, else on the CPU.

Both decode in the process that feeds the workers, which then get pixels instead of bytes. DALI thus
has one pipeline for each rank, and not one CUDA context for each worker. Pillow, the default,
decodes in the workers. OpenCV does warping and photometric distortion (docs/data.md says why).
"""

from __future__ import annotations

import contextlib
import sys
from itertools import islice
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

from pipeline.errors import RequestError, read_environment_number
from pipeline.fetch.dataset import Entry, ImageSet
from superglue_sift.features.images import BadImage, is_plain_jpeg

BATCH = 32  # Images that are decoded at once

MaybeDecoded = Union[Entry, Tuple[Entry, np.ndarray]]  # An image, perhaps with its gray pixels
Decode = Callable[[List[bytes]], List[np.ndarray]]  # From up to BATCH files to (H, W) uint8 each


def read_and_decode(
    decoder: str, images: ImageSet, entries: Iterable[Entry]
) -> Iterator[MaybeDecoded]:
    """Yield each entry in order: with its gray pixels (H, W) uint8, or without pixels.

    Pillow has to decode an entry without pixels later. With the decoder "pillow" this is every
    entry. With another decoder it is a file that is no plain JPEG, or a file of a batch that the
    decoder refused. Gray is the luma of the file (ITU-R BT.601). On a CPU the pixels are the same
    as those of Pillow. Those of nvJPEG may differ by a few levels.

    Args:
        decoder: "pillow", "torchvision" or "dali".
        images: the images that `fetch` listed.
        entries: the images to decode.
    """
    remaining = iter(entries)
    if decoder == "pillow":
        yield from remaining
        return
    decode: Optional[Decode] = None
    for batch in iter(lambda: list(islice(remaining, BATCH)), []):
        jpegs = _read_plain_jpegs(images, batch)
        pixels: Dict[Entry, np.ndarray] = {}
        if jpegs:
            decode = decode or make_decoder(decoder)
            try:
                pixels = dict(zip(jpegs, decode(list(jpegs.values()))))
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[-1]
                print(f"{decoder} gave up on a batch, Pillow decodes it: {reason}", file=sys.stderr)
                decode = None  # DALI cannot be used after an error
        yield from ((entry, pixels[entry]) if entry in pixels else entry for entry in batch)


def _read_plain_jpegs(images: ImageSet, batch: Sequence[Entry]) -> Dict[Entry, bytes]:
    """Read the files of the batch that are 8-bit JPEG of one or three components."""
    jpegs = {}
    for entry in batch:
        with contextlib.suppress(BadImage):
            data = images.read(entry)
            if is_plain_jpeg(data, entry.name):
                jpegs[entry] = data
    return jpegs


def make_decoder(decoder: str) -> Optional[Decode]:
    """Return the function that decodes batches, or None for Pillow.

    Raises:
        RequestError: If the decoder is missing. The error names the package to install.
    """
    from superglue_sift import torch_compat

    if decoder == "pillow":
        return None
    try:
        return _make_torchvision_decoder() if decoder == "torchvision" else _make_dali_decoder()
    # If torchvision is for another torch, 1.10 raises RuntimeError, and 2 raises AttributeError.
    except (ImportError, RuntimeError, AttributeError) as error:
        package = (
            torch_compat.name_dali_package()
            if decoder == "dali"
            else "torchvision (for this torch)"
        )
        raise RequestError(
            f"keypoints.decoder = {decoder}: cannot be used ({str(error).splitlines()[0]}); install"
            f" {package}, or set keypoints.decoder: pillow"
        ) from None


def _choose_gpu_index() -> Optional[int]:
    """Return the index of this rank's GPU, or None if there is no GPU."""
    import torch

    count = torch.cuda.device_count()
    return read_environment_number("LOCAL_RANK", 0) % count if count else None


def _make_torchvision_decoder() -> Decode:
    """Return a decoder by libjpeg or nvJPEG."""
    import torch
    from torchvision import io

    assert torch.ops.image.decode_jpeg  # Fails if torchvision is for another torch
    index = _choose_gpu_index()
    device = "cpu" if index is None else f"cuda:{index}"

    def decode(jpegs: List[bytes]) -> List[np.ndarray]:
        # A bytearray, because torch warns about read-only memory.
        encoded = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in jpegs]
        gray = io.ImageReadMode.GRAY
        # (1, H, W) becomes (H, W)
        return [io.decode_jpeg(data, gray, device=device)[0].cpu().numpy() for data in encoded]

    return decode


def _make_dali_decoder() -> Decode:
    """Return a decoder by a pipeline of DALI, without rotation by EXIF."""
    from nvidia.dali import backend, fn, pipeline_def, types

    device = _choose_gpu_index()
    # DALI 1.34 ignores the EXIF orientation and lacks this argument.
    rotates = backend.GetSchema("decoders__Image").HasArgument("adjust_orientation")
    options = {"adjust_orientation": False} if rotates else {}

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=device, prefetch_queue_depth=1)
    def decoding():
        encoded = fn.external_source(name="encoded", batch=True, dtype=types.UINT8, ndim=1)
        decoder_device = "cpu" if device is None else "mixed"
        return fn.decoders.image(encoded, device=decoder_device, output_type=types.GRAY, **options)

    pipeline = decoding()
    pipeline.build()

    def decode(jpegs: List[bytes]) -> List[np.ndarray]:
        pipeline.feed_input("encoded", [np.frombuffer(data, np.uint8) for data in jpegs])
        (output,) = pipeline.run()
        pixels: Any = output.as_cpu() if hasattr(output, "as_cpu") else output
        # (H, W, 1) becomes (H, W), copied because DALI reuses the memory
        return [np.array(pixels.at(index))[:, :, 0] for index in range(len(jpegs))]

    return decode
