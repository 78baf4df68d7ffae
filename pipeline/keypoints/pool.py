"""Worker processes, one per core with one OpenCV thread each; results keep the order of the images.

The number of images in flight is bounded, so memory does not grow with their number.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Callable, Iterable, Iterator, Optional, Union

import cv2

from pipeline import compat
from pipeline.errors import WorkError
from pipeline.features.store import ImageViews
from pipeline.image_sets import dali_decoder, decode
from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet
from pipeline.keypoints.image import gray_views
from pipeline.processes.prefetch import in_order
from pipeline.processes.signals import end_with_parent
from superglue_sift.images import BadImage

Result = Union[ImageViews, BadImage]
# an entry that a worker reads and decodes, or one already decoded
Work = Union[Entry, decode.Outcome]
Decoder = Callable[[ImageSet, Iterable[Entry]], Iterator[decode.Outcome]]

_IN_FLIGHT = 4  # images per worker
# glibc's numbers of these settings of malloc
_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD = -1


def decoder(name: str) -> Decoder:
    """The decoder of `keypoints.decoder`: pillow, torchvision or dali; all have the signature of
    `decode.decode_all`.

    Raises RequestError if its package is missing or cannot decode here.
    """
    if name == "torchvision":
        compat.torchvision_io()
        return decode.decode_by_torchvision
    if name == "dali":
        dali_decoder.require()
        return dali_decoder.decode_all
    return decode.decode_all


class ImageExtractor:
    """The function of a worker: from an image to its views."""

    def __init__(self, images: ImageSet, settings: Any) -> None:
        self.images = ImageSet((), images.containers)
        self.settings = settings
        self.decode = decoder(settings.decoder)

    def __call__(self, work: Work) -> Result:
        """The views of an image, or the reason why it cannot be used; does not raise for bad
        images.
        """
        entry, gray = next(self.decode(self.images, [work])) if isinstance(work, Entry) else work
        try:
            return (
                gray if isinstance(gray, BadImage) else gray_views(gray, entry.name, self.settings)
            )
        except BadImage as bad:
            return bad

    def source(self, entries: Iterable[Entry]) -> Iterable[Work]:
        """Input of the workers: entries, or decoded images if a GPU or DALI's threads decode for
        all workers.
        """
        if self.settings.decoder == "dali" or (
            self.settings.decoder == "torchvision" and decode.gpu() is not None
        ):
            return self.decode(self.images, entries)
        return entries


def cores() -> int:
    """Cores for this process; the ranks of this machine share its cores."""
    return max(
        len(os.sched_getaffinity(0)) // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1), 1
    )


class Pool:
    """A context with `map(entries)`; with one worker it works in this process."""

    def __init__(self, images: ImageSet, settings: Any, workers: int) -> None:
        self._extract = ImageExtractor(images, settings)
        self._workers = workers
        self._executor: Optional[ProcessPoolExecutor] = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Pool:
        if self._workers == 1:
            tune_process()
            return self
        # Fork would copy locks of running threads
        self._executor = ProcessPoolExecutor(
            self._workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(os.getpid(),),
        )
        self._stack.callback(self._executor.shutdown, cancel_futures=True)
        return self

    def __exit__(self, *_error: Any) -> None:
        self._stack.close()

    def map(self, entries: Iterable[Entry]) -> Iterator[Result]:
        """One result per entry, in order. Raises WorkError if a worker process dies."""
        if self._executor is None:
            yield from map(self._extract, self._extract.source(entries))
            return
        submit = functools.partial(self._executor.submit, self._extract)
        try:
            yield from in_order(
                submit, self._extract.source(entries), _IN_FLIGHT * self._workers - 1
            )
        except BrokenProcessPool:
            raise WorkError(
                "a worker process died (out of memory, or killed); finished shards are kept: "
                "run again, with fewer --workers if memory is short"
            ) from None


def _start(parent: int) -> None:
    """Initialize a worker: ignore Ctrl-C, end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent=parent)
    tune_process()


def tune_process() -> None:
    """Use one OpenCV thread, since several processes use the cores better, and keep freed memory.

    SIFT takes and frees some 70 MB a call. glibc would give them back to the system, and 10,000
    page faults a call would bring them again: 1.4 times the processor time at 512x384 and 640x480.
    """
    cv2.setNumThreads(1)
    with contextlib.suppress(OSError, AttributeError):  # another libc
        for setting, value in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, (1 << 31) - 1)):
            ctypes.CDLL(None).mallopt(setting, value)
