"""Make the shards of a split by worker processes, one per core.

A shard holds a fixed range of rows of the manifest, so its bytes depend only on these rows and on
the parameters. During the work each finished shard has a note next to it. In the end the notes
become store.json. A shard with another fingerprint (parameters, rows, VERSION, OpenCV, the
extractor's code) is deleted. An undamaged shard is not computed again. Only a fixed number of
images is in memory at a time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Generator, Iterable, List, Sequence, Union

import cv2

from pipeline.errors import RequestError
from pipeline.fetch import decoders
from pipeline.fetch.dataset import Entry, ImageSet
from pipeline.keypoints import store, views
from pipeline.keypoints.store import ImageViews, Row
from pipeline.params import KeypointsParams
from pipeline.workers import end_with_parent, yield_in_order
from superglue_sift.features import extractors
from superglue_sift.features.images import STORED, BadImage, decode_photo
from superglue_sift.files import write_json

SHARD_IMAGES = 64  # A kill loses at most the current shard of each process
_IN_FLIGHT = 4  # Images of each worker that wait or are computed

Result = Union[ImageViews, BadImage]  # The views of an image, or why it cannot be used


@dataclass(frozen=True)
class Shard:
    """A shard of a store, which is to be made or is made already.

    Attributes:
        path: the file of the shard.
        entries: the images of the shard.
        fingerprint: SHA-256 of everything that determines the bytes of the shard.
    """

    path: Path
    entries: Sequence[Entry]
    fingerprint: str

    @property
    def note_path(self) -> Path:
        return self.path.with_suffix(".json")

    def read_note(self) -> Row:
        """Read the row of store.json from the note. Return {} if this shard is not made yet."""
        with contextlib.suppress(OSError, ValueError):
            row = json.loads(self.note_path.read_text(encoding="utf-8"))
            if row.get("fingerprint") == self.fingerprint:
                return row
        return {}


def plan_shards(folder: Path, entries: Sequence[Entry], settings: KeypointsParams) -> List[Shard]:
    """Divide the images of a split into the shards of a folder.

    Args:
        folder: the folder of the store.
        entries: the images of the split, in the order of the manifest.
        settings: the section `keypoints`.
    """
    # Collect everything but the images that determines the bytes of a shard.
    common = {
        "settings": settings.model_dump(),
        "version": views.VERSION,
        "opencv": cv2.__version__,
        "extractor": extractors.load_extractor(settings.extractor).code,
    }
    shards = []
    for index, start in enumerate(range(0, len(entries), SHARD_IMAGES)):
        shard_entries = entries[start : start + SHARD_IMAGES]
        rows = [[entry.name, entry.size, entry.crc32] for entry in shard_entries]
        text = json.dumps({**common, "entries": rows}, sort_keys=True)
        fingerprint = hashlib.sha256(text.encode("utf-8")).hexdigest()
        shards.append(Shard(folder / store.name_shard(index), shard_entries, fingerprint))
    return shards


def find_missing(shards: Sequence[Shard]) -> List[Shard]:
    """Return the shards that have to be made, and delete what is left of them.

    An undamaged shard gets a note. A shard with bad images is made again, because the reason, such
    as a missing package, may be gone.
    """
    # A killed run has left notes, and a finished run has left store.json.
    finished: Dict[Path, Row] = {}
    for folder in {shard.path.parent for shard in shards}:
        with contextlib.suppress(RequestError):
            rows = store.read_index(folder)["shards"]
            finished.update((folder / row["file"], row) for row in rows)
    missing = []
    for shard in shards:
        row = shard.read_note() or finished.get(shard.path, {})
        with contextlib.suppress(RequestError):
            if row.get("fingerprint") == shard.fingerprint and not row["bad"]:
                store.check_shard(shard.path, row)
                write_json(shard.note_path, row)
                continue
        shard.note_path.unlink(missing_ok=True)
        shard.path.unlink(missing_ok=True)
        missing.append(shard)
    return missing


def write_shard_and_note(shard: Shard, results: Iterable[Result]) -> None:
    """Write one shard from the results of its entries, and its note.

    Args:
        shard: the shard to write.
        results: one for each entry of the shard, in order.

    Raises:
        OSError: For example if the disk is full.
    """
    # The views of SHARD_IMAGES images are in memory at most.
    views_of_images: List[ImageViews] = []
    bad_images = []
    for result in results:
        if isinstance(result, BadImage):
            bad_images.append([result.name, result.reason])
        else:
            views_of_images.append(result)
    row = store.write_shard(shard.path, views_of_images)
    write_json(shard.note_path, {**row, "bad": bad_images, "fingerprint": shard.fingerprint})


def write_index_and_delete_others(
    folder: Path, shards: Sequence[Shard], images: ImageSet, settings: KeypointsParams
) -> None:
    """Write store.json from the notes of all shards, and delete what is no part of the store.

    All ranks must be done, because an unknown file may be one that another rank writes.

    Args:
        folder: the folder of the store.
        shards: all shards of the store.
        images: the images that `fetch` listed. They identify the photographs.
        settings: the section `keypoints`.
    """
    # A row of store.json is the row of a note, with the photograph of each image.
    rows = []
    for shard in shards:
        row = shard.read_note()
        used_entries = [entry for entry in shard.entries if entry.name in row["images"]]
        rows.append(
            {**row, "photographs": [images.identify_photograph(entry) for entry in used_entries]}
        )
    extractor = extractors.load_extractor(settings.extractor)
    write_json(folder / store.INDEX, store.make_index(rows, settings.views_per_image, extractor))
    # Notes, shards of other parameters, and partial files after a kill
    shard_names = {shard.path.name for shard in shards}
    for path in (*folder.glob("shard-*"), *folder.glob(".*.tmp")):
        if path.name not in shard_names:
            path.unlink()


# --- worker processes


def read_and_extract(
    images: ImageSet, settings: KeypointsParams, image: decoders.MaybeDecoded
) -> Result:
    """Return the views of an image, or the BadImage that says why it cannot be used.

    Args:
        images: the images that `fetch` listed.
        settings: the section `keypoints`.
        image: the entry of the image, perhaps with its gray pixels.
    """
    try:
        if isinstance(image, Entry):
            photo = decode_photo(images.read(image), image.name, True, STORED)
            return views.make_image_views(photo.pixels, image.name, settings, photo.mask)
        # A decoder has read it already: a JPEG, which has no transparent pixels.
        return views.make_image_views(image[1], image[0].name, settings)
    except BadImage as error:
        return error


def extract_in_processes(
    images: ImageSet, settings: KeypointsParams, entries: Iterable[Entry], workers: int
) -> Generator[Result, None, None]:
    """Yield one result for each entry, in order. Closing the generator ends the processes.

    Args:
        images: the images that `fetch` listed.
        settings: the section `keypoints`.
        entries: the images to process.
        workers: number of processes. If it is 1, this process does the work.

    Raises:
        BrokenProcessPool: If a worker process dies, such as for lack of memory.
    """
    # Workers get the paths of the folders and zips, but not the list of all images.
    make = functools.partial(read_and_extract, ImageSet((), images.containers), settings)
    queue = decoders.read_and_decode(settings.decoder, images, entries)
    if workers == 1:
        cv2.setNumThreads(1)  # As in a worker
        yield from map(make, queue)
        return
    # Start the workers by spawn: a forked process would copy the locks of running threads.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _initialize_worker, (os.getpid(),))
    submit = functools.partial(executor.submit, make)
    try:
        yield from yield_in_order(submit, queue, _IN_FLIGHT * workers - 1)
    finally:
        executor.shutdown(cancel_futures=True)


def _initialize_worker(parent_id: int) -> None:
    """Let a worker process ignore Ctrl-C and end with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent_id=parent_id)
    cv2.setNumThreads(1)  # Several processes use the cores better than several threads.
