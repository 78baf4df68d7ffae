"""Stage 2: render views of every image, and find their keypoints (`python -m pipeline.keypoints`).

Fills --out/train and --out/val with keypoint stores (`pipeline.keypoints.store`). The stage
`evaluate` uses the test images. This stage may be killed at any time: finished shards stay. Under
torchrun the ranks share the shards.
"""

from __future__ import annotations

import contextlib
import time
from itertools import islice
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from pipeline import errors, params
from pipeline.errors import RequestError, WorkError, read_environment_number
from pipeline.fetch import decoders
from pipeline.fetch.dataset import ImageSet, open_manifest
from pipeline.keypoints import shards
from pipeline.keypoints.shards import Shard
from pipeline.keypoints.store import KeypointStore, Row
from pipeline.params import KeypointsParams
from pipeline.workers import end_with_dvc
from superglue_sift.environment import count_usable_cores
from superglue_sift.files import check_writable, write_csv, write_json
from superglue_sift.progress import Progress

SPLITS = ("train", "val")  # the splits that training reads
# Seconds without a new shard after which a rank counts as dead. A slow extractor takes minutes.
SILENCE_SECONDS = 3600.0
# If a larger fraction of the images is bad, the folder is wrong or the download is broken.
MAX_BAD_FRACTION = 0.1


def main(argv: Optional[Sequence[str]] = None) -> int:
    end_with_dvc()
    parser = errors.make_parser("pipeline.keypoints", __doc__)
    add = parser.add_argument
    add("--params", type=Path, default=Path("params.yaml"), help="parameters")
    add("--images", type=Path, default=Path("data/images"), help="folder `fetch` wrote")
    add("--out", type=Path, default=Path("data/keypoints"), help="folder of the stores")
    add("--reports", type=Path, default=Path("reports/keypoints"), help="folder of the lists")
    add("--workers", type=int, default=0, help="processes; 0 means one per core")
    options = parser.parse_args(argv)
    settings = params.load(options.params).keypoints
    decoders.make_decoder(settings.decoder)  # a missing package is reported first
    # Plan the shards of each split, and check that all folders can be written.
    images = open_manifest(options.images)
    plans = {}
    for split in SPLITS:
        plans[split] = shards.plan_shards(
            options.out / split, images.select_entries(split), settings
        )
        if not plans[split]:
            raise RequestError(
                f"{options.images}/manifest.csv: no {split} images; give more images, "
                "or change fetch.val_fraction and fetch.test_fraction"
            )
    for folder in (options.out, options.reports):
        check_writable(folder / "metrics.json", folder)
    # Every rank makes its own shards, and rank 0 waits for all of them.
    rank = read_environment_number("RANK", 0)
    ranks = read_environment_number("WORLD_SIZE", 1)
    started = time.monotonic()
    planned = [shard for split in SPLITS for shard in plans[split]]
    count = _extract_missing_shards(
        options.workers, planned[rank::ranks], images, settings, rank > 0
    )
    if rank:
        return 0
    rows = {split: _wait_for_all_shards(plans[split]) for split in SPLITS}
    seconds = time.monotonic() - started
    # Report the images that could not be used, then write the stores' index and metrics.
    bad = [item for split in SPLITS for row in rows[split] for item in row["bad"]]
    total = sum(len(shard.entries) for shard in planned)
    write_csv(options.reports / "bad_images.csv", [("file", "reason"), *bad])
    _check_bad_images(bad, total, rows, options.reports)
    for split in SPLITS:
        shards.write_index_and_delete_others(options.out / split, plans[split], images, settings)
    metrics = _compute_metrics(options.out, bad)
    write_json(options.reports / "metrics.json", metrics)
    rate = f"{count / seconds:.3g} images/s" if count else "nothing was missing"
    train, val = (metrics[split] for split in SPLITS)
    print(
        f"keypoints: {train['images']} training and {val['images']} validation images,"
        f" {train['views'] + val['views']} views, {train['keypoints_mean']:.0f} keypoints each on"
        f" average, {len(bad)} bad images left out; {rate}; in {options.out}"
    )
    return 0


def _extract_missing_shards(
    workers: int, mine: Sequence[Shard], images: ImageSet, settings: KeypointsParams, quiet: bool
) -> int:
    """Write the missing shards of `mine`. Return the number of images processed.

    `workers` is the number of processes, or 0 for one per core.

    Raises:
        OSError: If the disk is full. Finished shards are kept.
    """
    todo = shards.find_missing(mine)
    entries = [entry for shard in todo for entry in shard.entries]
    total = sum(len(shard.entries) for shard in mine)
    # The ranks of this machine share its cores.
    cores = max(count_usable_cores() // read_environment_number("LOCAL_WORLD_SIZE", 1), 1)
    workers = max(min(workers or cores, len(entries)), 1)
    shown = {"total": total, "initial": total - len(entries), "desc": "keypoints", "unit": "image"}
    # All shards share one stream of results, so no worker waits at the end of a shard.
    with contextlib.closing(
        shards.extract_in_processes(images, settings, entries, workers)
    ) as found:
        results = iter(Progress(found, disable=quiet, **shown))
        for shard in todo:
            shards.write_shard_and_note(shard, islice(results, len(shard.entries)))
    return len(entries)


def _wait_for_all_shards(planned: Sequence[Shard]) -> List[Row]:
    """Return the rows of all shards. Wait for the other ranks, and say so.

    Raises:
        WorkError: If no rank has written a shard for SILENCE_SECONDS.
    """
    missing = 0
    since = time.monotonic()
    while True:
        # The notes of the shards say which are done, also those of other ranks.
        rows = [shard.read_row() for shard in planned]
        left = [shard.path for shard, row in zip(planned, rows) if not row]
        if not left:
            return rows
        if not missing:
            print(f"{left[0].parent}: other ranks still work on {len(left)} shards", flush=True)
        # Each new shard starts the clock again.
        if len(left) != missing:
            missing = len(left)
            since = time.monotonic()
        if time.monotonic() - since > SILENCE_SECONDS:
            raise WorkError(
                f"{left[0]}: no rank has written it, nor any other shard for"
                f" {SILENCE_SECONDS:.0f} s; a rank died, or writes into another folder. Finished"
                " shards are kept: run again"
            )
        time.sleep(0.5)


def _check_bad_images(
    bad: Sequence[Any], total: int, rows: Dict[str, List[Row]], reports: Path
) -> None:
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


def _compute_metrics(out: Path, bad: Sequence[Any]) -> Dict[str, Any]:
    """Return the metrics of the stores, which are the same in every run.

    Print a line if there are images of which no view has a keypoint.
    """
    metrics: Dict[str, Any] = {}
    empty: List[str] = []
    for split in SPLITS:
        store = KeypointStore(out / split, verify="none")
        metrics[split] = {
            "images": len(store),
            "views": int(store.counts.size),
            "keypoints_mean": round(float(store.counts.mean()), 2),
            "keypoints_median": float(np.median(store.counts)),
            "views_without_keypoints": int((store.counts == 0).sum()),
        }
        # Counts are (images, views).
        empty += [store.images[image] for image in np.flatnonzero(~store.counts.any(axis=1))]
    metrics["bad_images"] = len(bad)
    if empty:
        print(
            f"keypoints: {len(empty)} images have no keypoint, such as {empty[0]}: they are flat,"
            " transparent, or have few gray levels"
        )
    return metrics


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
