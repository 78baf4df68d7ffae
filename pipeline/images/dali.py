"""The image source that decodes with NVIDIA DALI: on the GPU where there is one, else on the CPU.

`decoded` is `pipeline.images.decode.decoded` under another name: the same signature, order, verdicts and, on
the CPU, the same pixels. What differs:

- It runs in the process that feeds the workers, which then get pixels instead of bytes: one pipeline a rank,
  not one CUDA context a worker. Entries are decoded in their order, so each rank keeps its own shards.
- DALI decodes 8-bit JPEG of one or three components; every other file goes through OpenCV, and so does a
  batch that DALI refuses.
- On the GPU (nvJPEG) gray values may differ from libjpeg's by a few levels.
- Warping stays with OpenCV. DALI 1.34 has no warp by a homography on the CPU; 2.4 has one with the right
  pixel centres (`pixel_origin="center"`), but takes the matrix as float32: 6 % of the pixels differ by up to 4
  gray levels, for a step that is a twentieth of the work. Photometric distortion likewise.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Iterable, Iterator, List, Optional

import numpy as np

from pipeline.images.decode import Outcome, gpu
from pipeline.images.manifest import Entry
from pipeline.images.sources import ImageSet
from superglue_sift import images as image_files
from superglue_sift.images import BadImage, decode_gray

BATCH = 32  # images handed to DALI at once; two such batches are under way


def require() -> None:
    """RequestError naming the pip package where DALI is missing."""
    from pipeline import stack

    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        raise stack.without_dali("keypoints.decoder = dali", "opencv") from None


def decoded(images: ImageSet, entries: Iterable[Entry], batch: int = BATCH) -> Iterator[Outcome]:
    """Each entry with its gray pixels (H, W) uint8, or with why it cannot serve; in their order, each once.

    Raises:
        RequestError: DALI is not installed.
    """
    require()
    feed = _Feed(images, entries, batch)
    while not feed.ended:
        pipeline = _pipeline(feed, batch)
        while True:
            pixels = _next(pipeline, feed)
            if pixels is None:  # the end, or a batch that DALI refused: a new pipeline takes up the rest
                break
            yield from feed.batches.popleft().joined(pixels)
        while feed.batches:
            yield from feed.batches.popleft().by_opencv()


class _Batch:
    """Some entries in order. encoded: those that DALI decodes, by their place; the others have an outcome."""

    def __init__(self) -> None:
        self.entries: List[Entry] = []
        self.places: List[int] = []
        self.encoded: List[np.ndarray] = []
        self.known: dict = {}

    def add(self, entry: Entry, images: ImageSet) -> None:
        place = len(self.entries)
        self.entries.append(entry)
        try:
            data = images.read(entry)
            if image_files.is_plain_jpeg(image_files.check(data, entry.name)):
                self.places.append(place)
                self.encoded.append(np.frombuffer(data, np.uint8))
            else:
                self.known[place] = decode_gray(data, entry.name)
        except BadImage as bad:
            self.known[place] = bad

    def joined(self, pixels: List[np.ndarray]) -> Iterator[Outcome]:
        """The outcomes in order, with what DALI gave."""
        outcomes = {**self.known, **dict(zip(self.places, pixels))}
        for place, entry in enumerate(self.entries):
            yield entry, outcomes[place]

    def by_opencv(self) -> Iterator[Outcome]:
        """The same, when DALI did not like one of them: OpenCV then says which, and why."""
        for place, data in zip(self.places, self.encoded):
            try:
                self.known[place] = decode_gray(data.tobytes(), self.entries[place].name)
            except BadImage as bad:
                self.known[place] = bad
        return self.joined([])


class _Feed:
    """What DALI's external source calls: the next batch of bytes, of any size up to `batch`; none is empty."""

    def __init__(self, images: ImageSet, entries: Iterable[Entry], batch: int) -> None:
        self.images, self.entries, self.batch = images, iter(entries), batch
        self.batches: deque = deque()  # handed out and not given back, oldest first
        self.ended = False

    def __call__(self) -> List[np.ndarray]:
        new = _Batch()
        for entry in self.entries:
            new.add(entry, self.images)
            if len(new.encoded) == self.batch or (len(new.entries) >= 4 * self.batch and new.encoded):
                break
        else:
            self.ended = True
        if new.entries:
            self.batches.append(new)
        if not new.encoded:
            raise StopIteration
        return new.encoded


def _pipeline(feed: _Feed, batch: int) -> Any:
    """Bytes to gray pixels, as stored (EXIF orientation ignored, as everywhere in the project)."""
    from nvidia.dali import backend, fn, pipeline_def, types

    device = gpu()
    # DALI 1.34 never turns an image by its EXIF entry, and has no such argument
    turns = backend.GetSchema("decoders__Image").HasArgument("adjust_orientation")
    options = {"adjust_orientation": False} if turns else {}

    @pipeline_def(batch_size=batch, num_threads=2, device_id=device)
    def decoding():
        encoded = fn.external_source(feed, batch=True, dtype=types.UINT8, ndim=1)
        kind = "cpu" if device is None else "mixed"
        return fn.decoders.image(encoded, device=kind, output_type=types.GRAY, **options)

    built = decoding()
    built.build()
    return built


def _next(pipeline: Any, feed: _Feed) -> Optional[List[np.ndarray]]:
    """The pixels of the oldest batch; None at the end, or when DALI refused one."""
    try:
        (output,) = pipeline.run()
    except StopIteration:
        return None
    except RuntimeError as error:
        print(f"DALI gave up on a batch, OpenCV decodes it: {_last_line(error)}", file=sys.stderr)
        return None
    if hasattr(output, "as_cpu"):
        output = output.as_cpu()
    # copied: DALI uses the memory again
    return [np.array(output.at(index))[:, :, 0] for index in range(len(output))]


def _last_line(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "Error in thread" in line or "Assert" in line]
    return (lines or [str(error).splitlines()[0]])[-1]
