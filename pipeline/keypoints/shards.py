"""Make the shards of a split by worker processes, one per core.

A shard is a fixed run of manifest rows, so its bytes depend only on these and on the parameters.
During the work each finished shard has a note next to it. In the end the notes become store.json. A
shard with another fingerprint (parameters, rows, VERSION, OpenCV) is deleted. An undamaged shard is
not computed again. The number of images in flight is bounded, so memory does not grow with the
number of images.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Generator, Iterable, List, Sequence, Union

import cv2

from pipeline.errors import RequestError, WorkError
from pipeline.fetch import decoders
from pipeline.fetch.dataset import Entry, ImageSet
from pipeline.keypoints import store, views
from pipeline.keypoints.store import ImageViews, Row
from pipeline.params import KeypointsParams
from pipeline.workers import end_with_parent, yield_in_order
from superglue_sift.features import extractors
from superglue_sift.features.images import STORED, BadImage, decode_photo
from superglue_sift.files import write_atomic, write_json

SHARD_IMAGES = 64  # a kill loses at most the current shard of each process
_IN_FLIGHT = 4  # images of each worker that wait or are computed
# glibc's numbers of two settings of malloc
_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD = -1

Result = Union[ImageViews, BadImage]  # the views of an image, or why it cannot be used


@dataclass(frozen=True)
class Shard:
    """A unit of work. `fingerprint` is the SHA-256 of everything that determines its bytes."""

    path: Path
    entries: Sequence[Entry]
    fingerprint: str

    @property
    def note_path(self) -> Path:
        return self.path.with_suffix(".json")

    def read_row(self) -> Row:
        """Return what the note says: the row of store.json. It is {} if there is no such shard."""
        with contextlib.suppress(OSError, ValueError):
            row = json.loads(self.note_path.read_text(encoding="utf-8"))
            if row.get("fingerprint") == self.fingerprint:
                return row
        return {}


def plan_shards(folder: Path, entries: Sequence[Entry], settings: KeypointsParams) -> List[Shard]:
    """Cut the rows of a split (sorted, as in the manifest) into the shards of a folder."""
    values = settings.model_dump()
    if not values["seed"]:
        del values["seed"]  # shards from before this key was added have the seed 0
    # Collect everything but the images that determines the bytes of a shard.
    common = {
        "settings": values,
        "version": views.VERSION,
        "opencv": cv2.__version__,
        "extractor": extractors.load_extractor(settings.extractor).code,
    }
    shards = []
    for index, start in enumerate(range(0, len(entries), SHARD_IMAGES)):
        piece = entries[start : start + SHARD_IMAGES]
        rows = [[entry.name, entry.size, entry.crc32] for entry in piece]
        text = json.dumps({**common, "entries": rows}, sort_keys=True)
        fingerprint = hashlib.sha256(text.encode("utf-8")).hexdigest()
        shards.append(Shard(folder / store.name_shard(index), piece, fingerprint))
    return shards


def find_missing(shards: Sequence[Shard]) -> List[Shard]:
    """Return the shards that are not there. Undamaged ones get a note, others are deleted.

    A shard that lacks images is missing: the cause that made them bad, such as a missing package,
    may be mended.
    """
    # A killed run has left notes, a finished one store.json.
    finished: Dict[Path, Row] = {}
    for folder in {shard.path.parent for shard in shards}:
        with contextlib.suppress(RequestError):
            rows = store.read_index(folder)["shards"]
            finished.update((folder / row["file"], row) for row in rows)
    missing = []
    for shard in shards:
        row = shard.read_row() or finished.get(shard.path, {})
        with contextlib.suppress(RequestError):
            if row.get("fingerprint") == shard.fingerprint and not row["bad"]:
                store.check_shard(shard.path, row)
                write_atomic(shard.note_path, json.dumps(row))
                continue
        shard.note_path.unlink(missing_ok=True)
        shard.path.unlink(missing_ok=True)
        missing.append(shard)
    return missing


def write_shard_and_note(shard: Shard, results: Iterable[Result]) -> None:
    """Write one shard from the results of its entries, and its note.

    Raises:
        OSError: For example if the disk is full.
    """
    # The views of SHARD_IMAGES images are in memory at most.
    done = list(results)
    bad = [[result.name, result.reason] for result in done if isinstance(result, BadImage)]
    row = store.write_shard(shard.path, [each for each in done if isinstance(each, ImageViews)])
    row = {**row, "bad": bad, "fingerprint": shard.fingerprint}
    write_atomic(shard.note_path, json.dumps(row))


def write_index_and_delete_others(
    folder: Path, shards: Sequence[Shard], images: ImageSet, settings: KeypointsParams
) -> None:
    """Write store.json from the notes of all shards, and delete all other files.

    All ranks must be done, because an unknown file may be one that another rank writes.
    """
    # A row of store.json is a note, with the photographs that its images are.
    rows = []
    for shard in shards:
        row = shard.read_row()
        used = [entry for entry in shard.entries if entry.name in row["images"]]
        rows.append({**row, "photographs": [images.identify_photograph(entry) for entry in used]})
    extractor = extractors.load_extractor(settings.extractor)
    write_json(folder / store.INDEX, store.make_index(rows, settings.views_per_image, extractor))
    # What is left are notes, shards of other parameters, and partial files after a kill.
    known = {store.INDEX, *(shard.path.name for shard in shards)}
    for path in folder.iterdir():
        if path.name not in known and not path.is_dir():
            path.unlink()


# --- worker processes


def read_and_extract(images: ImageSet, settings: KeypointsParams, work: decoders.Work) -> Result:
    """Return the views of an image, or the BadImage that says why it cannot be used."""
    try:
        if isinstance(work, Entry):
            photo = decode_photo(images.read(work), work.name, True, STORED)
            return views.make_image_views(photo.pixels, work.name, settings, photo.mask)
        # A decoder has read it already: a JPEG, which has no transparent pixels.
        return views.make_image_views(work[1], work[0].name, settings)
    except BadImage as bad:
        return bad


def extract_in_processes(
    images: ImageSet, settings: KeypointsParams, entries: Iterable[Entry], workers: int
) -> Generator[Result, None, None]:
    """Yield one result for each entry, in order. Closing the generator ends the processes.

    With one worker, this process does the work. Raises WorkError if a worker process dies.
    """
    # Workers get the paths of the folders and zips, but not the list of all images.
    make = functools.partial(read_and_extract, ImageSet((), images.containers), settings)
    work = decoders.read_and_decode(settings.decoder, images, entries)
    if workers == 1:
        tune_process()
        yield from map(make, work)
        return
    # Start the workers by spawn: a forked process would copy the locks of running threads.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _initialize_worker, (os.getpid(),))
    submit = functools.partial(executor.submit, make)
    try:
        yield from yield_in_order(submit, work, _IN_FLIGHT * workers - 1)
    except BrokenProcessPool:
        raise WorkError(
            "a worker process died (out of memory, or killed); finished shards are kept: "
            "run again, with fewer --workers if memory is short"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def _initialize_worker(parent: int) -> None:
    """Initialize a worker: ignore Ctrl-C, and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent=parent)
    tune_process()


def tune_process() -> None:
    """Use one OpenCV thread, since several processes use the cores better. Keep freed memory.

    SIFT takes and frees some 70 MB a call. glibc would give them back to the system, and the next
    call would get them again by 10,000 page faults. This would cost 1.4 times the processor time at
    512x384 and 640x480.
    """
    cv2.setNumThreads(1)
    with contextlib.suppress(OSError, AttributeError):  # another libc
        for setting, value in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, (1 << 31) - 1)):
            ctypes.CDLL(None).mallopt(setting, value)
