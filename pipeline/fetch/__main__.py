"""Stage 1: list the photographs (`python -m pipeline.fetch`).

Writes `manifest.csv` and `source.json` into --out. The user's own folder stays where it is. A
downloaded archive is read in place. Only the small bundled sample is copied.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from pipeline import errors, params, workers
from pipeline.fetch import coco, dataset
from pipeline.fetch.dataset import Container
from superglue_sift.files import check_writable, name_below, write_json

BUNDLED = "sample"  # key and folder of the container of the bundled photographs


def main(argv: Optional[Sequence[str]] = None) -> int:
    workers.end_with_dvc()
    parser = errors.make_parser("pipeline.fetch", __doc__)
    add = parser.add_argument
    add("--params", type=Path, default=Path("params.yaml"), help="file with the section `fetch`")
    add("--out", type=Path, default=Path("data/images"), help="folder of the manifest")
    add("--archives", type=Path, default=Path("data/archives"), help="folder of downloads")
    add("--reports", type=Path, default=Path("reports/fetch"), help="folder of metrics.json")
    options = parser.parse_args(argv)
    settings = params.load(options.params).fetch
    # the user's own images are checked before anything is written
    own = None
    if settings.source == "folder":
        own = dataset.own_splits(settings)
        splits, held = own
        copies = len(held["train"].names) - len(splits["train"])
        if settings.val_path and copies and not settings.limit:
            print(f"fetch: {copies} training images left out: copies of held-out ones")
    for folder in (options.out, options.archives, options.reports):
        check_writable(folder / "manifest.csv", folder)
    # copy the sample; all other images stay where they are, or are downloaded
    shutil.rmtree(options.out / BUNDLED, ignore_errors=True)
    if settings.source == "sample":
        entries = dataset.copy_sample(options.out / BUNDLED)
        containers = {BUNDLED: {"kind": "folder", "path": BUNDLED}}
    else:
        splits, held = own or coco.open_archives(settings, options.archives)
        entries = []
        for split, names in splits.items():
            # val and test have one container, which may be that of train
            key = "val" if split != "train" and "val" in held else "train"
            entries += held[key].entries(names, split, key)
        containers = {key: _describe(container, options.out) for key, container in held.items()}
    dataset.write_manifest(options.out / "manifest.csv", entries)
    write_json(options.out / "source.json", {"source": settings.source, "containers": containers})
    # write the metrics for DVC
    counts = {
        f"{split}_images": sum(entry.split == split for entry in entries)
        for split in dataset.SPLITS
    }
    counts["bytes"] = sum(entry.size for entry in entries)
    write_json(options.reports / "metrics.json", counts)
    print(
        f"fetch: {counts['train_images']} training, {counts['val_images']} validation and"
        f" {counts['test_images']} test images ({counts['bytes'] / 1e6:.1f} MB) in"
        f" {options.out}/manifest.csv"
    )
    return 0


def _describe(container: Container, out: Path) -> Dict[str, Any]:
    """Return what source.json, in the folder `out`, says about a container."""
    path = str(container.path)
    if not container.path.is_absolute():  # a clone can be moved
        path = name_below(container.path.resolve(), out.resolve())
    kind = "zip" if container.members else "folder"
    return {**container.facts, "kind": kind, "path": path}


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
