"""Decode 8-bit JPEG by torchvision or NVIDIA DALI, on the GPU if there is one, else on the CPU.

Both decode in the process that feeds the workers, which then get pixels instead of bytes. DALI thus
has one pipeline for each rank, and not one CUDA context for each worker. Pillow, the default,
decodes in the workers. OpenCV does warping and photometric distortion (docs/data.md says why).
"""

from __future__ import annotations

import contextlib
import os
import sys
from itertools import islice
from typing import Any, Iterable, Iterator, List, Optional, Tuple, Union

import numpy as np

from pipeline.errors import RequestError
from pipeline.fetch.dataset import Entry, ImageSet
from superglue_sift.features.images import BadImage, is_plain_jpeg

BATCH = 32  # images per batch; DALI decodes one batch ahead

Work = Union[Entry, Tuple[Entry, np.ndarray]]  # an image, perhaps with its gray pixels


def require(decoder: str) -> None:
    """Raise RequestError, which names the package to install, if a decoder is missing."""
    if decoder == "dali":
        _import_dali()
    elif decoder == "torchvision":
        _import_torchvision()


def decode_all(decoder: str, images: ImageSet, entries: Iterable[Entry]) -> Iterable[Work]:
    """Yield each entry in order, with its gray pixels (H, W) uint8 or alone.

    An entry is alone if Pillow is to decode it: files that are no plain JPEG, and files that the
    decoder refuses. `decoder` is "pillow", "torchvision" or "dali". Gray is the luma of the file
    (ITU-R BT.601). On a CPU the pixels are the same as Pillow's. nvJPEG may differ by a few levels.
    """
    if decoder == "pillow":
        return entries
    return (decode_by_dali if decoder == "dali" else decode_by_torchvision)(images, entries)


def read_jpeg(images: ImageSet, entry: Entry) -> Optional[bytes]:
    """Return the bytes of an 8-bit JPEG of one or three components, and None for other files."""
    with contextlib.suppress(BadImage):
        data = images.read(entry)
        if is_plain_jpeg(data, entry.name):
            return data
    return None


def gpu_index() -> Optional[int]:
    """Return the index of this rank's GPU, or None if there is no GPU."""
    import torch

    count = torch.cuda.device_count()
    return int(os.environ.get("LOCAL_RANK", "0")) % count if count else None


# --- torchvision


def _import_torchvision() -> Any:
    """Import torchvision.io. Raises RequestError if it is missing or cannot decode.

    A CUDA build does not load with a CPU build of torch. This shows only when a decoder is used:
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


def decode_by_torchvision(images: ImageSet, entries: Iterable[Entry]) -> Iterator[Work]:
    """Decode as `decode_all` does, by libjpeg or nvJPEG, one image after another."""
    import torch

    io = _import_torchvision()
    index = gpu_index()
    device = "cpu" if index is None else f"cuda:{index}"
    for entry in entries:
        data = read_jpeg(images, entry)
        if data is None:
            yield entry
            continue
        # It is copied, because torch warns about read-only memory
        encoded = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        try:
            pixels = io.decode_jpeg(encoded, io.ImageReadMode.GRAY, device=device)[0]
        except RuntimeError:
            yield entry
            continue
        yield entry, pixels.cpu().numpy()


# --- DALI


def _import_dali() -> None:
    """Raise RequestError, which names the pip package, if DALI is missing."""
    from pipeline import compat

    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        raise RequestError(
            "keypoints.decoder = dali: NVIDIA DALI is not installed; `pip install"
            f" {compat.dali_package()}`, or set keypoints.decoder: pillow"
        ) from None


def decode_by_dali(
    images: ImageSet, entries: Iterable[Entry], batch: int = BATCH
) -> Iterator[Work]:
    """Decode as `decode_all` does, in batches. If DALI refuses a batch, Pillow decodes all of
    it."""
    pipeline: Any = None
    before: List[Tuple[Entry, Optional[bytes]]] = []
    left = iter(entries)
    while True:
        # read this batch while DALI decodes the previous one
        batch_read = [(entry, read_jpeg(images, entry)) for entry in islice(left, batch)]
        try:
            done = _finish(pipeline, before)
        except RuntimeError as error:
            print(
                f"DALI gave up on a batch, Pillow decodes it: {_last_line(error)}", file=sys.stderr
            )
            pipeline = None  # it cannot be used after an error
            done = [entry for entry, _ in before]
        jpegs = [np.frombuffer(data, np.uint8) for _, data in batch_read if data is not None]
        if jpegs:
            pipeline = pipeline or _pipeline(batch)
            pipeline.feed_input("encoded", jpegs)
            pipeline.schedule_run()
        yield from done
        if not batch_read:
            return
        before = batch_read


def _pipeline(batch: int) -> Any:
    """Build a pipeline from bytes to gray pixels as stored, without rotation by EXIF."""
    from nvidia.dali import backend, fn, pipeline_def, types

    device = gpu_index()
    # DALI 1.34 ignores the EXIF orientation and lacks this argument
    rotates = backend.GetSchema("decoders__Image").HasArgument("adjust_orientation")
    options = {"adjust_orientation": False} if rotates else {}

    @pipeline_def(batch_size=batch, num_threads=2, device_id=device, prefetch_queue_depth=1)
    def decoding():
        encoded = fn.external_source(name="encoded", batch=True, dtype=types.UINT8, ndim=1)
        kind = "cpu" if device is None else "mixed"
        return fn.decoders.image(encoded, device=kind, output_type=types.GRAY, **options)

    built = decoding()
    built.build()
    return built


def _finish(pipeline: Any, scheduled: List[Tuple[Entry, Optional[bytes]]]) -> List[Work]:
    """Return the scheduled batch with pixels in place of bytes.

    Raises RuntimeError if DALI refuses one of the files.
    """
    done: List[Work] = [entry for entry, _ in scheduled]
    places = [place for place, (_, data) in enumerate(scheduled) if data is not None]
    if places:
        (output,) = pipeline.share_outputs()
        pixels = output.as_cpu() if hasattr(output, "as_cpu") else output
        for index, place in enumerate(places):
            # (H, W, 1) becomes (H, W), copied because DALI reuses the memory
            done[place] = scheduled[place][0], np.array(pixels.at(index))[:, :, 0]
        pipeline.release_outputs()  # the next batch is decoded into the same memory
    return done


def _last_line(error: RuntimeError) -> str:
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if "Error in thread" in line or "Assert" in line
    ]
    return (lines or [str(error).splitlines()[0]])[-1]
