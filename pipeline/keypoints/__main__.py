"""Stage 2: render views of every image, and find their keypoints (`python -m pipeline.keypoints`).

The stage fills --out/train and --out/val with keypoint stores (`pipeline.keypoints.store`). It may
be killed at any time, and finished shards stay. Under torchrun the ranks share the shards. The test
images are for the stage `evaluate`.
"""

from __future__ import annotations

import contextlib
import time
from itertools import islice
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from pipeline import errors, params
from pipeline.errors import WorkError, read_environment_number
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

SPLITS = ("train", "val")  # The splits that training reads
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
    decoders.make_decoder(settings.decoder)  # A missing package is reported first
    # Plan the shards of each split, and check that all folders can be written.
    images = open_manifest(options.images)
    plans = {}
    for split in SPLITS:
        plans[split] = shards.plan_shards(
            options.out / split, images.select_entries(split), settings
        )
    for folder in (options.out, options.reports):
        check_writable(folder / "metrics.json", folder)
    # Every rank makes its own shards, and rank 0 waits for all of them.
    rank = read_environment_number("RANK", 0)
    ranks = read_environment_number("WORLD_SIZE", 1)
    started = time.monotonic()
    planned = [shard for split in SPLITS for shard in plans[split]]
    image_count = _extract_missing_shards(
        options.workers, planned[rank::ranks], images, settings, rank > 0
    )
    if rank:
        return 0
    rows = {split: _wait_for_all_shards(plans[split]) for split in SPLITS}
    seconds = time.monotonic() - started
    # Report the images that could not be used, then write the stores' index and metrics.
    bad_images = [
        name_and_reason for split in SPLITS for row in rows[split] for name_and_reason in row["bad"]
    ]
    total = sum(len(shard.entries) for shard in planned)
    write_csv(options.reports / "bad_images.csv", [("file", "reason"), *bad_images])
    _check_bad_images(bad_images, total, rows, options.reports)
    for split in SPLITS:
        shards.write_index_and_delete_others(options.out / split, plans[split], images, settings)
    metrics = _compute_metrics(options.out, bad_images)
    write_json(options.reports / "metrics.json", metrics)
    rate = f"{image_count / seconds:.3g} images/s" if image_count else "nothing was missing"
    train, val = (metrics[split] for split in SPLITS)
    print(
        f"keypoints: {train['images']} training and {val['images']} validation images,"
        f" {train['views'] + val['views']} views, {train['keypoints_mean']:.0f} keypoints each on"
        f" average, {len(bad_images)} bad images left out; {rate}; in {options.out}"
    )
    return 0


def _extract_missing_shards(
    workers: int,
    rank_shards: Sequence[Shard],
    images: ImageSet,
    settings: KeypointsParams,
    quiet: bool,
) -> int:
    """Write the shards that are missing. Return the number of images that were processed.

    Args:
        workers: number of processes, or 0 for one per core.
        rank_shards: the shards that this rank is to make.
        images: the images that `fetch` listed.
        settings: the section `keypoints`.
        quiet: whether to show no line of progress.

    Raises:
        OSError: If the disk is full. Finished shards are kept.
    """
    missing_shards = shards.find_missing(rank_shards)
    entries = [entry for shard in missing_shards for entry in shard.entries]
    total = sum(len(shard.entries) for shard in rank_shards)
    # The ranks of this machine share its cores.
    cores = max(count_usable_cores() // read_environment_number("LOCAL_WORLD_SIZE", 1), 1)
    workers = max(min(workers or cores, len(entries)), 1)
    progress_options = {
        "total": total,
        "initial": total - len(entries),
        "desc": "keypoints",
        "unit": "image",
    }
    # All shards share one stream of results, so no worker waits at the end of a shard.
    with contextlib.closing(
        shards.extract_in_processes(images, settings, entries, workers)
    ) as extracted:
        results = iter(Progress(extracted, disable=quiet, **progress_options))
        for shard in missing_shards:
            shards.write_shard_and_note(shard, islice(results, len(shard.entries)))
    return len(entries)


def _wait_for_all_shards(planned: Sequence[Shard]) -> List[Row]:
    """Wait until all ranks have written their shards, and return the rows of store.json.

    Raises:
        WorkError: If no rank has written a shard for SILENCE_SECONDS.
    """
    missing = list(planned)
    deadline = time.monotonic() + SILENCE_SECONDS
    while True:
        # A shard is done when its note is there.
        still_missing = [shard for shard in missing if not shard.read_note()]
        if not still_missing:
            return [shard.read_note() for shard in planned]
        if len(still_missing) < len(missing):
            deadline = time.monotonic() + SILENCE_SECONDS
        missing = still_missing
        if time.monotonic() > deadline:
            raise WorkError(
                f"{missing[0].path}: no rank has written it, nor any other shard for"
                f" {SILENCE_SECONDS:.0f} s; finished shards are kept: run again"
            )
        time.sleep(0.5)


def _check_bad_images(
    bad_images: Sequence[Any], total: int, rows: Dict[str, List[Row]], reports: Path
) -> None:
    """Raise WorkError if too many images are bad, or if a split has no image left."""
    where_listed = f"see {reports / 'bad_images.csv'}"
    if len(bad_images) > MAX_BAD_FRACTION * total:
        raise WorkError(
            f"{len(bad_images)} of {total} images are bad, more than a fraction of"
            f" {MAX_BAD_FRACTION}, such as {': '.join(bad_images[0])}; fix or remove them,"
            f" {where_listed}"
        )
    for split in SPLITS:
        if not any(row["images"] for row in rows[split]):
            raise WorkError(
                f"no {split} image is left after leaving out the bad ones; {where_listed}"
            )


def _compute_metrics(out: Path, bad_images: Sequence[Any]) -> Dict[str, Any]:
    """Return the metrics of the stores in `out`, which are the same in every run."""
    metrics: Dict[str, Any] = {}
    for split in SPLITS:
        store = KeypointStore(out / split, verify="none")
        metrics[split] = {
            "images": len(store),
            "views": int(store.counts.size),
            "keypoints_mean": round(float(store.counts.mean()), 2),
            "keypoints_median": float(np.median(store.counts)),
            "views_without_keypoints": int((store.counts == 0).sum()),
        }
    metrics["bad_images"] = len(bad_images)
    return metrics


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
