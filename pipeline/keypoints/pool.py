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
from typing import Any, Generator, Iterable

import cv2

from pipeline.errors import WorkError
from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet
from pipeline.keypoints import image
from pipeline.keypoints.image import Result
from pipeline.prefetch import in_order
from pipeline.signals import end_with_parent
from superglue_sift.environment import usable_cores

_IN_FLIGHT = 4  # images per worker
# glibc's numbers of these settings of malloc
_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD = -1


def count_cores() -> int:
    """Cores for this process; the ranks of this machine share its cores."""
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return max(usable_cores() // ranks, 1)


def extract_all(
    images: ImageSet, settings: Any, entries: Iterable[Entry], workers: int
) -> Generator[Result, None, None]:
    """One result per entry, in order; one worker is this process. Closing it ends the processes.

    Raises WorkError if a worker process dies.
    """
    # a worker does not get the list of images
    extract = functools.partial(image.extract, ImageSet((), images.containers), settings)
    decoder = image.DECODERS.get(settings.decoder)
    work = decoder.decode_all(images, entries) if decoder else entries
    if workers == 1:
        tune_process()
        yield from map(extract, work)
        return
    # Fork would copy locks of running threads
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(os.getpid(),),
    )
    submit = functools.partial(executor.submit, extract)
    try:
        yield from in_order(submit, work, _IN_FLIGHT * workers - 1)
    except BrokenProcessPool:
        raise WorkError(
            "a worker process died (out of memory, or killed); finished shards are kept: "
            "run again, with fewer --workers if memory is short"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


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
