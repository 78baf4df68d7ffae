"""Stage 2: views of every image and their SIFT keypoints (`python -m pipeline.keypoints`).

Fills --out/train and --out/val with keypoint stores (`pipeline.keypoints.store`). The stage
`evaluate` uses the test images. This stage may be killed at any time: finished shards stay. Under
torchrun the ranks share the shards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from itertools import islice
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from pipeline import errors, params
from pipeline.errors import RequestError, WorkError
from pipeline.fetch import decoders
from pipeline.fetch.dataset import ImageSet, open_manifest
from pipeline.files import write_csv, write_json
from pipeline.keypoints.shards import Folder, count_cores, extract_all, plan
from pipeline.keypoints.store import Store
from superglue_sift.files import check_writable
from superglue_sift.progress import Progress

SPLITS = ("train", "val")
# Seconds without a new shard after which a rank counts as dead. A slow extractor takes minutes.
SILENCE = 3600.0
# If a larger fraction of the images is bad, the folder is wrong or the download is broken.
MAX_BAD_FRACTION = 0.1


def main(argv: Optional[Sequence[str]] = None) -> int:
    options = _arguments(argv)
    settings = params.load(options.params).keypoints
    decoders.require(settings.decoder)
    # the plan: which shards each split has, and whether all folders can be written
    images = open_manifest(options.images)
    folders = {
        split: Folder(options.out / split, plan(images.entries(split), settings))
        for split in SPLITS
    }
    for split, folder in folders.items():
        if not folder.shards:
            raise RequestError(
                f"{options.images}/manifest.csv: no {split} images; give more images, "
                "or change fetch.val_fraction and fetch.test_fraction"
            )
    for folder in (options.out, options.reports):
        check_writable(folder / "metrics.json", folder)
    rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    # the work: every rank makes its own shards, and rank 0 waits for all of them
    started = time.monotonic()
    count = _extract(folders, images, settings, options.workers or count_cores(), rank, ranks)
    if rank:
        return 0
    rows = {split: _wait_for_all(folder) for split, folder in folders.items()}
    seconds = time.monotonic() - started
    # the reports: images that could not be used, then the stores' index and metrics
    bad = [tuple(item) for split in SPLITS for row in rows[split] for item in row["bad"]]
    total = sum(len(shard.entries) for folder in folders.values() for shard in folder.shards)
    write_csv(options.reports / "bad_images.csv", [("file", "reason"), *bad])
    _check(bad, total, rows, options.reports)
    for split, folder in folders.items():
        # This must wait until all ranks are done, because an unknown file may be one that another
        # rank writes
        folder.discard_unknown()
        folder.close(rows[split], settings)
    metrics = _metrics(options.out, bad)
    _print_empty(options.out)
    write_json(options.reports / "metrics.json", metrics)
    rate = f"{count / seconds:.3g} images/s" if count else "nothing was missing"
    train = metrics["train"]
    val = metrics["val"]
    print(
        f"keypoints: {train['images']} training and {val['images']} validation images,"
        f" {train['views'] + val['views']} views, {train['keypoints_mean']:.0f} keypoints each on"
        f" average, {len(bad)} bad images left out; {rate}; in {options.out}"
    )
    return 0


def _arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
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
    if options.workers < 0:
        raise RequestError(f"--workers {options.workers}: must be 0 (one per core) or more")
    return options


def _extract(
    folders: Dict[str, Folder], images: ImageSet, settings: Any, workers: int, rank: int, ranks: int
) -> int:
    """Write this rank's missing shards. Return the number of images processed."""
    total = 0
    todo = []
    for folder in folders.values():
        # the ranks take turns in the list of shards
        mine = folder.shards[rank::ranks]
        total += sum(len(shard.entries) for shard in mine)
        todo += [(folder, shard) for shard in folder.open(mine)]
    entries = [entry for _, shard in todo for entry in shard.entries]
    shown = {"total": total, "initial": total - len(entries), "desc": "keypoints", "unit": "image"}
    found = extract_all(images, settings, entries, max(min(workers, len(entries)), 1))
    with contextlib.closing(found):
        results = iter(Progress(found, disable=rank > 0, **shown))
        for folder, shard in todo:
            try:
                folder.write(shard, islice(results, len(shard.entries)))
            except OSError as error:
                raise WorkError(
                    f"{folder.path / shard.file}: cannot be written: {error.strerror}; finished"
                    " shards are kept; `python -m pipeline.doctor` forecasts the space"
                ) from None
    return len(entries)


def _wait_for_all(folder: Folder) -> List[Dict[str, Any]]:
    """Return the rows of all shards. Wait for the other ranks, and say so.

    Raises WorkError if no rank has written a shard for `SILENCE` seconds.
    """
    missing = 0
    since = time.monotonic()
    while True:
        rows = folder.rows()
        left = [shard.file for shard, row in zip(folder.shards, rows) if row is None]
        if not left:
            return rows  # type: ignore[return-value]
        if not missing:
            print(f"{folder.path}: other ranks still work on {len(left)} shards", flush=True)
        if len(left) != missing:
            missing = len(left)
            since = time.monotonic()
        if time.monotonic() - since > SILENCE:
            raise WorkError(
                f"{folder.path / left[0]}: no rank has written it, nor any other shard for"
                f" {SILENCE:.0f} s; a rank died, or writes into another folder. Finished shards are"
                " kept: run again"
            )
        time.sleep(0.5)


def _check(bad: Sequence[Any], total: int, rows: Dict[str, Any], reports: Path) -> None:
    """Raise WorkError if too many images are bad, or if a split has no image left."""
    listed = f"see {reports / 'bad_images.csv'}"
    if len(bad) > MAX_BAD_FRACTION * total:
        raise WorkError(
            f"{len(bad)} of {total} images are bad, more than a fraction of {MAX_BAD_FRACTION}; fix"
            f" or remove them, {listed}"
        )
    for split in SPLITS:
        if not any(row["images"] for row in rows[split]):
            raise WorkError(f"no {split} image is left after leaving out the bad ones; {listed}")


def _metrics(out: Path, bad: Sequence[Any]) -> Dict[str, Any]:
    """Return the metrics of the stores, which are the same in every run."""
    metrics: Dict[str, Any] = {}
    for split in SPLITS:
        store = Store(out / split, verify="none")
        metrics[split] = {
            "images": len(store),
            "views": int(store.counts.size),
            "keypoints_mean": round(float(store.counts.mean()), 2),
            "keypoints_median": float(np.median(store.counts)),
            "views_without_keypoints": int((store.counts == 0).sum()),
        }
    metrics["bad_images"] = len(bad)
    return metrics


def _print_empty(out: Path) -> None:
    """Print a line if there are images of which no view has a keypoint."""
    stores = [Store(out / split, verify="none") for split in SPLITS]
    empty = [store.images[i] for store in stores for i in np.flatnonzero(~store.counts.any(axis=1))]
    if empty:
        print(
            f"keypoints: {len(empty)} images have no keypoint, such as {empty[0]}: they are flat,"
            " transparent, or have few gray levels"
        )


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
