"""The work of the stage `keypoints`: worker processes, one per core, make the shards of a split.

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
from typing import Any, Dict, Generator, Iterable, List, Optional, Sequence, Union

import cv2

from pipeline.errors import RequestError, WorkError
from pipeline.fetch import decoders
from pipeline.fetch.dataset import Entry, ImageSet
from pipeline.files import write_atomic, write_json
from pipeline.keypoints import store, views
from pipeline.keypoints.store import ImageViews
from pipeline.prefetch import in_order
from pipeline.signals import end_with_parent
from superglue_sift.environment import usable_cores
from superglue_sift.features import extractors
from superglue_sift.features.images import STORED, BadImage, decode

SHARD_IMAGES = 64  # a kill loses at most the current shard of each process
_IN_FLIGHT = 4  # images per worker
# glibc's numbers of two settings of malloc
_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD = -1

Result = Union[ImageViews, BadImage]


@dataclass(frozen=True)
class Shard:
    """A unit of work. `fingerprint` is the SHA-256 of everything that determines its bytes."""

    file: str
    entries: Sequence[Entry]
    fingerprint: str


def plan(entries: Sequence[Entry], settings: Any) -> List[Shard]:
    """Cut the rows of a split (sorted, as in the manifest) into shards."""
    values = settings.model_dump()
    if not values["seed"]:
        del values["seed"]  # shards from before this key was added have the seed 0
    common = {
        "settings": values,
        "version": views.VERSION,
        "opencv": cv2.__version__,
        "extractor": extractors.load(settings.extractor).code,
    }
    shards = []
    for index, start in enumerate(range(0, len(entries), SHARD_IMAGES)):
        piece = entries[start : start + SHARD_IMAGES]
        rows = [[entry.name, entry.size, entry.crc32] for entry in piece]
        text = json.dumps({**common, "entries": rows}, sort_keys=True)
        fingerprint = hashlib.sha256(text.encode("utf-8")).hexdigest()
        shards.append(Shard(store.shard_name(index), piece, fingerprint))
    return shards


@dataclass(frozen=True)
class Folder:
    """The folder of one split while it is filled. `shards` is the plan."""

    path: Path
    shards: Sequence[Shard]

    def open(self, mine: Sequence[Shard]) -> List[Shard]:
        """Keep undamaged shards of the plan and delete the others. Return the missing ones of
        `mine`."""
        self.path.mkdir(parents=True, exist_ok=True)
        rows = self._known_rows()
        missing = []
        for shard in mine:
            row = rows.get(shard.file)
            if row is not None and self._fits(shard, row):
                self._note(shard, row)
            else:
                self._note_path(shard).unlink(missing_ok=True)
                (self.path / shard.file).unlink(missing_ok=True)
                missing.append(shard)
        return missing

    def discard_unknown(self) -> None:
        """Delete files that are not in the plan.

        Such files are shards of other parameters, or partial files after a kill.
        """
        known = {shard.file for shard in self.shards} | {
            self._note_path(shard).name for shard in self.shards
        }
        for path in self.path.iterdir():
            if path.name not in known and path.name != store.INDEX and not path.is_dir():
                path.unlink()

    def write(self, shard: Shard, results: Iterable[Any]) -> None:
        """Write one shard from its results: ImageViews or BadImage, in the order of its entries.

        Raises OSError, for example if the disk is full.
        """
        done = list(results)
        bad = [[result.name, result.reason] for result in done if isinstance(result, BadImage)]
        good = [result for result in done if isinstance(result, ImageViews)]
        row = store.write_shard(self.path / shard.file, good)
        self._note(shard, {**row, "bad": bad, "fingerprint": shard.fingerprint})

    def rows(self) -> List[Optional[Dict[str, Any]]]:
        """Return the row of every planned shard, None for one that is not made or checked yet."""
        notes = [self._read_note(shard) for shard in self.shards]
        return [
            row if row.get("fingerprint") == shard.fingerprint else None
            for shard, row in zip(self.shards, notes)
        ]

    def close(self, rows: Sequence[Dict[str, Any]], settings: Any) -> None:
        """Write store.json from the rows of all shards, and delete the notes."""
        extractor = extractors.load(settings.extractor)
        named = [
            {**row, "photographs": [e.photograph for e in shard.entries if e.name in row["images"]]}
            for shard, row in zip(self.shards, rows)
        ]
        content = store.index(named, settings.views_per_image, extractor)
        write_json(self.path / store.INDEX, content)
        for shard in self.shards:
            self._note_path(shard).unlink(missing_ok=True)

    def _known_rows(self) -> Dict[str, Dict[str, Any]]:
        """Return the readable rows by file name, from a finished store and from notes."""
        try:
            rows = {row["file"]: row for row in store.read_index(self.path)["shards"]}
        except RequestError:
            rows = {}
        noted = {shard.file: self._read_note(shard) for shard in self.shards}
        return {**rows, **{file: row for file, row in noted.items() if row}}

    def _read_note(self, shard: Shard) -> Dict[str, Any]:
        """Return the row in the shard's note. It is empty if there is no readable note."""
        try:
            return json.loads(self._note_path(shard).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def _fits(self, shard: Shard, row: Dict[str, Any]) -> bool:
        """Return whether the shard belongs to the plan and is undamaged.

        The shard is hashed if it is newer than store.json. A shard that lacks images does not fit:
        the cause that made them bad, such as a missing package, may be mended.
        """
        try:
            finished = (self.path / store.INDEX).stat().st_mtime_ns
            hashed = (self.path / shard.file).stat().st_mtime_ns > finished
        except OSError:
            hashed = True
        try:
            if row["bad"] or row["fingerprint"] != shard.fingerprint:
                return False
            store.check_shard(self.path, row, hashed)
        except (RequestError, KeyError, TypeError):
            return False
        return True

    def _note(self, shard: Shard, row: Dict[str, Any]) -> None:
        write_atomic(self._note_path(shard), json.dumps(row))

    def _note_path(self, shard: Shard) -> Path:
        return (self.path / shard.file).with_suffix(".json")


# --- worker processes


def extract(images: ImageSet, settings: Any, work: decoders.Work) -> Result:
    """Return the views of an image, or the BadImage that says why it cannot be used."""
    try:
        # the decoder has read it already: a JPEG, which has no transparent pixels
        if not isinstance(work, Entry):
            entry, gray = work
            return views.gray_views(gray, entry.name, settings)
        photo = decode(images.read(work), work.name, True, STORED)
        return views.gray_views(photo.pixels, work.name, settings, photo.mask)
    except BadImage as bad:
        return bad


def count_cores() -> int:
    """Return the number of cores for this process. The ranks of this machine share its cores."""
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return max(usable_cores() // ranks, 1)


def extract_all(
    images: ImageSet, settings: Any, entries: Iterable[Entry], workers: int
) -> Generator[Result, None, None]:
    """Yield one result for each entry, in order. Closing the generator ends the processes.

    With one worker, this process does the work. Raises WorkError if a worker process dies.
    """
    # Workers get the paths of the folders and zips, but not the list of all images
    make = functools.partial(extract, ImageSet((), images.containers), settings)
    work = decoders.decode_all(settings.decoder, images, entries)
    if workers == 1:
        tune_process()
        yield from map(make, work)
        return
    # Start the workers by spawn: a forked process would copy the locks of running threads
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(os.getpid(),),
    )
    submit = functools.partial(executor.submit, make)
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
