"""Decode images with NVIDIA DALI: on the GPU where there is one, else on the CPU.

DALI runs in the process that feeds the workers, which then get pixels instead of bytes: one
pipeline per rank, not one CUDA context per worker. OpenCV does warping and photometric distortion
(docs/data.md says why).
"""

from __future__ import annotations

import contextlib
import os
import sys
from itertools import islice
from typing import Any, Iterable, Iterator, List, Optional, Tuple, Union

import numpy as np

from pipeline.errors import RequestError
from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet
from superglue_sift.features.images import BadImage, is_plain_jpeg

BATCH = 32  # images per batch; DALI decodes one batch ahead

Work = Union[Entry, Tuple[Entry, np.ndarray]]  # an image, perhaps with its gray pixels


def require() -> None:
    """RequestError naming the pip package where DALI is missing."""
    from pipeline import compat

    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        raise RequestError(
            "keypoints.decoder = dali: NVIDIA DALI is not installed; `pip install"
            f" {compat.dali_package()}`, or set keypoints.decoder: pillow"
        ) from None


def decode_all(images: ImageSet, entries: Iterable[Entry], batch: int = BATCH) -> Iterator[Work]:
    """Each entry in order with its gray pixels, (H, W) uint8; without them if Pillow is to decide:
    other files than plain JPEG, and all of a batch that DALI refuses.

    Gray is the luma of the file (ITU-R BT.601): on a CPU the same pixels as Pillow's; nvJPEG may
    differ by a few levels.
    """
    pipeline: Any = None
    before: List[Tuple[Entry, Optional[bytes]]] = []
    left = iter(entries)
    while True:
        # read this batch while DALI decodes the one before
        batch_read = [(entry, read_jpeg(images, entry)) for entry in islice(left, batch)]
        try:
            done = _finish(pipeline, before)
        except RuntimeError as error:
            print(
                f"DALI gave up on a batch, Pillow decodes it: {_last_line(error)}", file=sys.stderr
            )
            pipeline = None  # cannot be used after an error
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


def read_jpeg(images: ImageSet, entry: Entry) -> Optional[bytes]:
    """The checked bytes of an 8-bit JPEG of one or three components; None for all other files."""
    with contextlib.suppress(BadImage):
        data = images.read(entry)
        if is_plain_jpeg(data, entry.name):
            return data
    return None


def gpu_index() -> Optional[int]:
    """Index of this rank's GPU, None without one."""
    import torch

    count = torch.cuda.device_count()
    return int(os.environ.get("LOCAL_RANK", "0")) % count if count else None


def _pipeline(batch: int) -> Any:
    """Bytes to gray pixels, as stored (EXIF orientation ignored, as everywhere in the project)."""
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
    """The scheduled batch with pixels in place of bytes. Raises RuntimeError where DALI refuses one
    of the files.
    """
    done: List[Work] = [entry for entry, _ in scheduled]
    places = [place for place, (_, data) in enumerate(scheduled) if data is not None]
    if places:
        (output,) = pipeline.share_outputs()
        pixels = output.as_cpu() if hasattr(output, "as_cpu") else output
        for index, place in enumerate(places):
            # copied, since DALI reuses the memory
            done[place] = scheduled[place][0], np.array(pixels.at(index))[:, :, 0]
        pipeline.release_outputs()  # the next batch is decoded into them
    return done


def _last_line(error: RuntimeError) -> str:
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if "Error in thread" in line or "Assert" in line
    ]
    return (lines or [str(error).splitlines()[0]])[-1]
