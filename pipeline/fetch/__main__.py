"""Stage 1: list the photographs (`python -m pipeline.fetch`).

Writes `manifest.csv` and `source.json` into --out. The user's own folder stays where it is. A
downloaded archive is read in place. Only the small bundled sample is copied.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from pipeline import errors, params
from pipeline.fetch import coco, dataset
from pipeline.fetch.dataset import Container, Entry, Splits
from pipeline.files import write_json
from pipeline.params import FetchParams, Params
from superglue_sift.files import check_writable

SAMPLE = "sample"  # container and folder of the bundled photographs


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.fetch", description=str(__doc__).split("\n")[0]
    )
    add = parser.add_argument
    add("--params", type=Path, default=Path("params.yaml"), help="file with the section `fetch`")
    add("--out", type=Path, default=Path("data/images"), help="folder of the manifest")
    add("--archives", type=Path, default=Path("data/archives"), help="folder of downloads")
    add("--reports", type=Path, default=Path("reports/fetch"), help="folder of metrics.json")
    options = parser.parse_args(argv)
    # find or download the images, then write the manifest
    entries, containers = _fetch(options, params.load(options.params))
    dataset.write_manifest(options.out / "manifest.csv", entries)
    write_json(options.out / "source.json", containers)
    # metrics for DVC
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


def _fetch(options: argparse.Namespace, sections: Params) -> Tuple[List[Entry], Dict[str, Any]]:
    """Find or download the images. Return their entries, and the content of source.json.

    The user's own images are checked before anything is written. Raises RequestError for a wrong
    request.
    """
    own = None
    settings = sections.fetch
    # the user's own images are checked before anything is written
    if settings.source == "folder":
        own = dataset.own_splits(settings)
        dataset.require_usable(*own, dataset.smallest_images(sections))
        copies = len(own[1]["train"].names) - len(own[0]["train"])
        if settings.val_path and copies and not settings.limit:
            print(f"fetch: {copies} training images left out: copies of held-out ones")
    # the sample is copied, all other images stay where they are
    for folder in (options.out, options.archives, options.reports):
        check_writable(folder / "manifest.csv", folder)
    if settings.source == "sample":
        entries = dataset.copy_sample(options.out / SAMPLE)
        containers = {SAMPLE: {"kind": "folder", "path": SAMPLE}}
    else:
        shutil.rmtree(options.out / SAMPLE, ignore_errors=True)
        entries, containers = _entries(*(own or _coco(settings, options.archives)), options.out)
    return entries, {"source": settings.source, "containers": containers}


def _entries(
    split_names: Splits, held: Dict[str, Container], out: Path
) -> Tuple[List[Entry], Dict[str, Dict[str, Any]]]:
    """Return the manifest entries of the splits, and the containers that they name."""
    entries: List[Entry] = []
    for split, names in split_names.items():
        key = dataset.container_of(split, held)
        entries += held[key].entries(names, split, key)
    containers = {}
    for key, container in held.items():  # a relative path is written relative to --out
        relative = Path(os.path.relpath(container.path.resolve(), out.resolve())).as_posix()
        path = str(container.path) if container.path.is_absolute() else relative
        containers[key] = {
            **container.facts,
            "kind": "zip" if container.members else "folder",
            "path": path,
        }
    return entries, containers


def _coco(settings: FetchParams, archives: Path) -> Tuple[Splits, Dict[str, Container]]:
    """Open COCO's archives, and download them if missing. A small `fetch.limit` loads only a
    part."""
    wanted = dict(zip(("train", "val"), coco.SOURCES[settings.source]))
    stems = " and ".join(Path(archive.file).stem for archive in wanted.values())
    both = errors.RequestError(
        f"fetch.path = {settings.path}: must hold {stems}, as .zip or as folders"
    )
    if "val" in wanted and Path(settings.path).is_file():
        raise both
    holdings = {
        key: coco.Holding(
            archive, archives, settings.path, os.environ.get(coco.MIRROR, ""), settings.limit > 0
        )
        for key, archive in wanted.items()
    }
    # whole archives first, because their names decide the split
    for holding in holdings.values():
        holding.whole()
    if "val" in holdings:
        names = holdings["val"].names
        if not set(names).isdisjoint(holdings["train"].names):
            raise both
        fraction = min(1.0, coco.HELD_OUT / len(names))
        chosen = dataset.split_names(
            holdings["train"].names, dataset.divide(names, fraction, dataset.SEED)[1], settings
        )
    else:
        chosen = dataset.hold_out(holdings["train"].names, settings)
    held_out = chosen["val"] + chosen["test"]
    # one archive may hold both the training and the held-out images
    needed = {"train": chosen["train"] + ([] if "val" in holdings else held_out), "val": held_out}
    return chosen, {key: holding.ensure(needed[key]) for key, holding in holdings.items()}


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
