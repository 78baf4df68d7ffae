"""Decode images with NVIDIA DALI: on the GPU where there is one, else on the CPU.

DALI runs in the process that feeds the workers, which then get pixels instead of bytes: one
pipeline per rank, not one CUDA context per worker. OpenCV does warping and photometric distortion
(docs/data.md says why).
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any, Iterable, Iterator, List, Tuple, Union

import numpy as np

from pipeline.image_sets.decode import Outcome, decode_by_pillow, gpu, read_jpeg
from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet
from superglue_sift.images import BadImage

BATCH = 32  # images per batch; DALI decodes one batch ahead

Read = Tuple[Entry, Union[bytes, np.ndarray, BadImage]]  # bytes: for DALI to decode


def require() -> None:
    """RequestError naming the pip package where DALI is missing."""
    from pipeline import compat

    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        raise compat.without_dali(
            "keypoints.decoder = dali", "set keypoints.decoder: pillow"
        ) from None


def decode_all(images: ImageSet, entries: Iterable[Entry], batch: int = BATCH) -> Iterator[Outcome]:
    """Like `decode.decode_all`. Pillow decodes a batch that DALI refuses, and reports which file is
    bad and why.

    Raises RequestError where DALI is not installed.
    """
    require()
    pipeline: Any = None
    before: List[Read] = []
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
            done = [
                (entry, decode_by_pillow(it, entry.name) if isinstance(it, bytes) else it)
                for entry, it in before
            ]
        jpegs = [np.frombuffer(it, np.uint8) for _, it in batch_read if isinstance(it, bytes)]
        if jpegs:
            pipeline = pipeline or _pipeline(batch)
            pipeline.feed_input("encoded", jpegs)
            pipeline.schedule_run()
        yield from done
        if not batch_read:
            return
        before = batch_read


def _pipeline(batch: int) -> Any:
    """Bytes to gray pixels, as stored (EXIF orientation ignored, as everywhere in the project)."""
    from nvidia.dali import backend, fn, pipeline_def, types

    device = gpu()
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


def _finish(pipeline: Any, scheduled: List[Read]) -> List[Outcome]:
    """The scheduled batch with pixels in place of bytes. Raises RuntimeError where DALI refuses one
    of the files.
    """
    places = [place for place, (_, it) in enumerate(scheduled) if isinstance(it, bytes)]
    done: List[Any] = list(scheduled)
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
