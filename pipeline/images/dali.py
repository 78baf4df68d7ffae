"""The image source that decodes with NVIDIA DALI: on the GPU where there is one, else on the CPU.

It runs in the process that feeds the workers, which then get pixels instead of bytes: one pipeline a rank, not one CUDA
context a worker. Warping and photometric distortion stay with OpenCV (docs/data.md says why).
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any, Iterable, Iterator, List

import numpy as np

from pipeline.images.decode import Outcome, by_opencv, gpu, plain_jpeg
from pipeline.images.manifest import Entry
from pipeline.images.sources import ImageSet

BATCH = 32  # images handed to DALI at once


def require() -> None:
    """RequestError naming the pip package where DALI is missing."""
    from pipeline import stack

    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        raise stack.without_dali("keypoints.decoder = dali", "opencv") from None


def decoded(images: ImageSet, entries: Iterable[Entry], batch: int = BATCH) -> Iterator[Outcome]:
    """As `decode.decoded`. A batch that DALI refuses goes through OpenCV, which says which file is wrong, and why.

    Raises RequestError where DALI is not installed.
    """
    require()
    pipeline, left = None, iter(entries)
    while True:
        some = list(islice(left, batch))
        if not some:
            return
        found = [plain_jpeg(images, entry) for entry in some]
        jpegs = {place: each for place, each in enumerate(found) if isinstance(each, bytes)}
        if jpegs:
            pipeline = pipeline or _pipeline(batch)
            try:
                pixels: List[Any] = _run(pipeline, list(jpegs.values()))
            except RuntimeError as error:
                print(f"DALI gave up on a batch, OpenCV decodes it: {_last_line(error)}", file=sys.stderr)
                pipeline = None  # a failed one does no more
                pixels = [by_opencv(data, some[place].name) for place, data in jpegs.items()]
            for place, gray in zip(jpegs, pixels):
                found[place] = gray
        yield from zip(some, found)  # type: ignore[misc]


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


def _run(pipeline: Any, jpegs: List[bytes]) -> List[np.ndarray]:
    """(H, W) uint8 of each. RuntimeError where DALI refuses one of them."""
    pipeline.feed_input("encoded", [np.frombuffer(data, np.uint8) for data in jpegs])
    (output,) = pipeline.run()
    if hasattr(output, "as_cpu"):
        output = output.as_cpu()
    # copied: DALI uses the memory again
    return [np.array(output.at(index))[:, :, 0] for index in range(len(jpegs))]


def _last_line(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "Error in thread" in line or "Assert" in line]
    return (lines or [str(error).splitlines()[0]])[-1]
