"""Stage 2: views of every image and their SIFT keypoints (`python -m pipeline.keypoints`).

Fills --out/train and --out/val with keypoint stores (`pipeline.keypoints.store`). The stage
`evaluate` uses the test images. This stage may be killed at any time: finished shards stay. Under
torchrun the ranks share the shards, and on each rank a worker process per core makes them.

A shard is a fixed run of manifest rows, so its bytes depend only on these and on the parameters.
During the work each finished shard has a note next to it. In the end the notes become store.json. A
shard with another fingerprint (parameters, rows, VERSION, OpenCV) is deleted. An undamaged shard is
not computed again. The number of images in flight is bounded, so memory does not grow with the
number of images.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Dict, Generator, Iterable, List, Optional, Sequence, Union

import cv2
import numpy as np

from pipeline import errors, params
from pipeline.errors import RequestError, WorkError
from pipeline.fetch import decoders
from pipeline.fetch.dataset import Entry, ImageSet, open_manifest
from pipeline.keypoints import store, views
from pipeline.keypoints.store import ImageViews, Store
from pipeline.workers import end_with_parent, in_order
from superglue_sift.environment import usable_cores
from superglue_sift.features import extractors
from superglue_sift.features.images import STORED, BadImage, decode
from superglue_sift.files import check_writable, write_atomic, write_csv, write_json
from superglue_sift.progress import Progress

SPLITS = ("train", "val")  # the splits that training reads
# Seconds without a new shard after which a rank counts as dead. A slow extractor takes minutes.
SILENCE = 3600.0
# If a larger fraction of the images is bad, the folder is wrong or the download is broken.
MAX_BAD_FRACTION = 0.1

SHARD_IMAGES = 64  # a kill loses at most the current shard of each process
_IN_FLIGHT = 4  # images per worker
# glibc's numbers of two settings of malloc
_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD = -1

Result = Union[ImageViews, BadImage]  # the views of an image, or why it cannot be used


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.keypoints", description=str(__doc__).split("\n")[0]
    )
    add = parser.add_argument
    add("--params", type=Path, default=Path("params.yaml"), help="parameters")
    add("--images", type=Path, default=Path("data/images"), help="folder `fetch` wrote")
    add("--out", type=Path, default=Path("data/keypoints"), help="folder of the stores")
    add("--reports", type=Path, default=Path("reports/keypoints"), help="folder of the lists")
    add("--workers", type=int, default=0, help="processes; 0 means one per core")
    options = parser.parse_args(argv)
    settings = params.load(options.params).keypoints
    decoders.make_decoder(settings.decoder)  # a missing package is reported first
    # the plan: which shards each split has, and whether all folders can be written
    images = open_manifest(options.images)
    plans = {
        split: plan_shards(options.out / split, images.entries(split), settings) for split in SPLITS
    }
    for split in SPLITS:
        if not plans[split]:
            raise RequestError(
                f"{options.images}/manifest.csv: no {split} images; give more images, "
                "or change fetch.val_fraction and fetch.test_fraction"
            )
    for folder in (options.out, options.reports):
        check_writable(folder / "metrics.json", folder)
    # the work: every rank makes its own shards, and rank 0 waits for all of them
    rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    started = time.monotonic()
    mine = {split: plans[split][rank::ranks] for split in SPLITS}
    count = _extract(options, mine, images, settings, rank > 0)
    if rank:
        return 0
    rows = {split: _wait_for_all(plans[split]) for split in SPLITS}
    seconds = time.monotonic() - started
    # the reports: images that could not be used, then the stores' index and metrics
    bad = [tuple(item) for split in SPLITS for row in rows[split] for item in row["bad"]]
    total = sum(len(shard.entries) for split in SPLITS for shard in plans[split])
    write_csv(options.reports / "bad_images.csv", [("file", "reason"), *bad])
    _check(bad, total, rows, options.reports)
    for split in SPLITS:
        finish_split(options.out / split, plans[split], settings)
    metrics = _metrics(options.out, bad)
    write_json(options.reports / "metrics.json", metrics)
    rate = f"{count / seconds:.3g} images/s" if count else "nothing was missing"
    train, val = (metrics[split] for split in SPLITS)
    print(
        f"keypoints: {train['images']} training and {val['images']} validation images,"
        f" {train['views'] + val['views']} views, {train['keypoints_mean']:.0f} keypoints each on"
        f" average, {len(bad)} bad images left out; {rate}; in {options.out}"
    )
    return 0


def _extract(
    options: argparse.Namespace,
    mine: Dict[str, List[Shard]],
    images: ImageSet,
    settings: Any,
    quiet: bool,
) -> int:
    """Write those of `mine` that are missing. Return the number of images processed.

    Raises OSError if the disk is full. Finished shards are kept.
    """
    todo = [shard for split in SPLITS for shard in find_missing(options.out / split, mine[split])]
    entries = [entry for shard in todo for entry in shard.entries]
    total = sum(len(shard.entries) for split in SPLITS for shard in mine[split])
    # the ranks of this machine share its cores
    cores = max(usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    workers = max(min(options.workers or cores, len(entries)), 1)
    shown = {"total": total, "initial": total - len(entries), "desc": "keypoints", "unit": "image"}
    # one stream of results through all shards, so that no worker waits at the end of a shard
    found = extract_all(images, settings, entries, workers)
    with contextlib.closing(found):
        results = iter(Progress(found, disable=quiet, **shown))
        for shard in todo:
            write_shard(shard, islice(results, len(shard.entries)))
    return len(entries)


def _wait_for_all(planned: Sequence[Shard]) -> List[Dict[str, Any]]:
    """Return the rows of all shards. Wait for the other ranks, and say so.

    Raises WorkError if no rank has written a shard for `SILENCE` seconds.
    """
    missing = 0
    since = time.monotonic()
    while True:
        # the notes of the shards say which are done, also those of other ranks
        rows = [shard.row() for shard in planned]
        left = [shard.path for shard, row in zip(planned, rows) if not row]
        if not left:
            return rows
        if not missing:
            print(f"{left[0].parent}: other ranks still work on {len(left)} shards", flush=True)
        # each new shard starts the clock again
        if len(left) != missing:
            missing = len(left)
            since = time.monotonic()
        if time.monotonic() - since > SILENCE:
            raise WorkError(
                f"{left[0]}: no rank has written it, nor any other shard for {SILENCE:.0f} s; a"
                " rank died, or writes into another folder. Finished shards are kept: run again"
            )
        time.sleep(0.5)


def _check(bad: Sequence[Any], total: int, rows: Dict[str, Any], reports: Path) -> None:
    """Raise WorkError if too many images are bad, or if a split has no image left."""
    listed = f"see {reports / 'bad_images.csv'}"
    if len(bad) > MAX_BAD_FRACTION * total:
        raise WorkError(
            f"{len(bad)} of {total} images are bad, more than a fraction of {MAX_BAD_FRACTION},"
            f" such as {': '.join(bad[0])}; fix or remove them, {listed}"
        )
    for split in SPLITS:
        if not any(row["images"] for row in rows[split]):
            raise WorkError(f"no {split} image is left after leaving out the bad ones; {listed}")


def _metrics(out: Path, bad: Sequence[Any]) -> Dict[str, Any]:
    """Return the metrics of the stores, which are the same in every run.

    Print a line if there are images of which no view has a keypoint.
    """
    metrics: Dict[str, Any] = {}
    empty: List[str] = []
    for split in SPLITS:
        store = Store(out / split, verify="none")
        metrics[split] = {
            "images": len(store),
            "views": int(store.counts.size),
            "keypoints_mean": round(float(store.counts.mean()), 2),
            "keypoints_median": float(np.median(store.counts)),
            "views_without_keypoints": int((store.counts == 0).sum()),
        }
        # counts are (images, views)
        empty += [store.images[image] for image in np.flatnonzero(~store.counts.any(axis=1))]
    metrics["bad_images"] = len(bad)
    if empty:
        print(
            f"keypoints: {len(empty)} images have no keypoint, such as {empty[0]}: they are flat,"
            " transparent, or have few gray levels"
        )
    return metrics


# --- shards


@dataclass(frozen=True)
class Shard:
    """A unit of work. `fingerprint` is the SHA-256 of everything that determines its bytes."""

    path: Path
    entries: Sequence[Entry]
    fingerprint: str

    @property
    def note(self) -> Path:
        return self.path.with_suffix(".json")

    def row(self) -> Dict[str, Any]:
        """Return what the note says: the row of store.json. It is {} if there is no such shard."""
        with contextlib.suppress(OSError, ValueError):
            row = json.loads(self.note.read_text(encoding="utf-8"))
            if row.get("fingerprint") == self.fingerprint:
                return row
        return {}


def plan_shards(folder: Path, entries: Sequence[Entry], settings: Any) -> List[Shard]:
    """Cut the rows of a split (sorted, as in the manifest) into the shards of a folder."""
    values = settings.model_dump()
    if not values["seed"]:
        del values["seed"]  # shards from before this key was added have the seed 0
    # everything but the images that determines the bytes of a shard
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
        shards.append(Shard(folder / store.shard_name(index), piece, fingerprint))
    return shards


def find_missing(folder: Path, shards: Sequence[Shard]) -> List[Shard]:
    """Return the shards that are not in the folder. Undamaged ones get a note, others are deleted.

    A shard that lacks images is missing: the cause that made them bad, such as a missing package,
    may be mended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished = {}
    with contextlib.suppress(RequestError):
        finished = {row["file"]: row for row in store.read_index(folder)["shards"]}
    # a killed run has left notes, a finished one store.json
    missing = []
    for shard in shards:
        row = shard.row() or finished.get(shard.path.name, {})
        try:
            fits = row.get("fingerprint") == shard.fingerprint and not row["bad"]
            if fits:
                store.check_shard(folder, row)
        except RequestError:
            fits = False
        if fits:
            write_atomic(shard.note, json.dumps(row))
        else:
            shard.note.unlink(missing_ok=True)
            shard.path.unlink(missing_ok=True)
            missing.append(shard)
    return missing


def write_shard(shard: Shard, results: Iterable[Result]) -> None:
    """Write one shard from the results of its entries, and its note.

    Raises OSError, for example if the disk is full.
    """
    # the views of 64 images are in memory at most
    done = list(results)
    bad = [[result.name, result.reason] for result in done if isinstance(result, BadImage)]
    row = store.write_shard(shard.path, [each for each in done if isinstance(each, ImageViews)])
    row = {**row, "bad": bad, "fingerprint": shard.fingerprint}
    write_atomic(shard.note, json.dumps(row))


def finish_split(folder: Path, shards: Sequence[Shard], settings: Any) -> None:
    """Write store.json from the notes of all shards, and delete all other files.

    All ranks must be done, because an unknown file may be one that another rank writes.
    """
    # the rows of store.json: the notes, and which photographs the images are
    rows = []
    for shard in shards:
        row = shard.row()
        used = [entry.photograph for entry in shard.entries if entry.name in row["images"]]
        rows.append({**row, "photographs": used})
    extractor = extractors.load(settings.extractor)
    write_json(folder / store.INDEX, store.index(rows, settings.views_per_image, extractor))
    # what is left are notes, shards of other parameters, and partial files after a kill
    known = {store.INDEX, *(shard.path.name for shard in shards)}
    for path in folder.iterdir():
        if path.name not in known and not path.is_dir():
            path.unlink()


# --- worker processes


def extract(images: ImageSet, settings: Any, work: decoders.Work) -> Result:
    """Return the views of an image, or the BadImage that says why it cannot be used."""
    try:
        if isinstance(work, Entry):
            photo = decode(images.read(work), work.name, True, STORED)
            return views.gray_views(photo.pixels, work.name, settings, photo.mask)
        # a decoder has read it already: a JPEG, which has no transparent pixels
        return views.gray_views(work[1], work[0].name, settings)
    except BadImage as bad:
        return bad


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
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _start, (os.getpid(),))
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


if __name__ == "__main__":
    # The module is loaded by its name, because workers have to import the functions that they run.
    # Python does not load the `__main__` of a package in them.
    stage = importlib.import_module("pipeline.keypoints.__main__")
    raise SystemExit(errors.run(stage.main))
