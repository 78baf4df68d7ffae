"""The image source that decodes with NVIDIA DALI: on the GPU where there is one, else on the CPU.

It runs in the process that feeds the workers, which then get pixels instead of bytes: one pipeline a rank, not one CUDA
context a worker. Warping and photometric distortion stay with OpenCV (docs/data.md says why).
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any, Iterable, Iterator, List, Tuple, Union

import numpy as np

from pipeline.image_sets.decode import Outcome, by_opencv, gpu, plain_jpeg
from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet
from superglue_sift.images import BadImage

BATCH = 32  # images handed to DALI at once; it decodes one such batch ahead of the one that is used

Read = Tuple[Entry, Union[bytes, np.ndarray, BadImage]]  # bytes: for DALI to decode


def require() -> None:
    """RequestError naming the pip package where DALI is missing."""
    from pipeline import compat

    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        raise compat.without_dali("keypoints.decoder = dali", "set keypoints.decoder: opencv") from None


def decoded(images: ImageSet, entries: Iterable[Entry], batch: int = BATCH) -> Iterator[Outcome]:
    """As `decode.decoded`. A batch that DALI refuses goes through OpenCV, which says which file is wrong, and why.

    Raises RequestError where DALI is not installed.
    """
    require()
    pipeline: Any = None
    before: List[Read] = []
    left = iter(entries)
    while True:
        some = [(entry, plain_jpeg(images, entry)) for entry in islice(left, batch)]  # while DALI decodes those before
        try:
            done = _finished(pipeline, before)
        except RuntimeError as error:
            print(f"DALI gave up on a batch, OpenCV decodes it: {_last_line(error)}", file=sys.stderr)
            pipeline = None  # a failed one does no more
            done = [(entry, by_opencv(it, entry.name) if isinstance(it, bytes) else it) for entry, it in before]
        jpegs = [np.frombuffer(it, np.uint8) for _, it in some if isinstance(it, bytes)]
        if jpegs:
            pipeline = pipeline or _pipeline(batch)
            pipeline.feed_input("encoded", jpegs)
            pipeline.schedule_run()
        yield from done
        if not some:
            return
        before = some


def _pipeline(batch: int) -> Any:
    """Bytes to gray pixels, as stored (EXIF orientation ignored, as everywhere in the project)."""
    from nvidia.dali import backend, fn, pipeline_def, types

    device = gpu()
    # DALI 1.34 never turns an image by its EXIF entry, and has no such argument
    turns = backend.GetSchema("decoders__Image").HasArgument("adjust_orientation")
    options = {"adjust_orientation": False} if turns else {}

    @pipeline_def(batch_size=batch, num_threads=2, device_id=device, prefetch_queue_depth=1)
    def decoding():
        encoded = fn.external_source(name="encoded", batch=True, dtype=types.UINT8, ndim=1)
        kind = "cpu" if device is None else "mixed"
        return fn.decoders.image(encoded, device=kind, output_type=types.GRAY, **options)

    built = decoding()
    built.build()
    return built


def _finished(pipeline: Any, some: List[Read]) -> List[Outcome]:
    """`some`, which the pipeline has under way, with pixels for bytes. RuntimeError where DALI refuses one of them."""
    places = [place for place, (_, it) in enumerate(some) if isinstance(it, bytes)]
    done: List[Any] = list(some)
    if places:
        (output,) = pipeline.share_outputs()
        pixels = output.as_cpu() if hasattr(output, "as_cpu") else output
        for index, place in enumerate(places):
            # copied: DALI uses the memory again
            done[place] = some[place][0], np.array(pixels.at(index))[:, :, 0]
        pipeline.release_outputs()  # the next batch is decoded into them
    return done


def _last_line(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "Error in thread" in line or "Assert" in line]
    return (lines or [str(error).splitlines()[0]])[-1]
