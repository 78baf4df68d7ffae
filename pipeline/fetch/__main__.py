"""Stage 1: list the photographs (`python -m pipeline.fetch`).

Writes `manifest.csv` and `source.json` into --out. Your own folder stays where it is; a downloaded
archive is read in place; only the small bundled sample is copied.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from pipeline import errors
from pipeline.errors import RequestError
from pipeline.fetch import coco, download, splits
from pipeline.fetch.containers import Container, digest
from pipeline.fetch.download import MIRROR
from pipeline.files import file_sha256, json_digest, write_atomic
from pipeline.image_sets import manifest, sources
from pipeline.image_sets.manifest import Entry
from pipeline.parameters import params
from pipeline.parameters.schema import FetchParams
from pipeline.views.homography import smallest_images

SAMPLE = "sample"  # container and folder of the bundled photographs
VERSION = 1  # of the manifest; raise it when this code lists or splits the same images otherwise


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.fetch", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("--params", default="params.yaml", help="file with the section `fetch`")
    parser.add_argument(
        "--out", type=Path, default=Path("data/images"), help="folder of the manifest"
    )
    parser.add_argument(
        "--archives", type=Path, default=Path("data/archives"), help="folder of downloads"
    )
    parser.add_argument(
        "--reports", type=Path, default=Path("reports/fetch"), help="folder of metrics.json"
    )
    parser.add_argument("--limit", type=int, help="images of each set, instead of fetch.limit")
    options = parser.parse_args(argv)
    settings = params.load("fetch", options.params)
    if options.limit is not None:
        if options.limit < 0:
            raise RequestError(f"--limit {options.limit}: must be 0 (all) or more")
        settings = settings.model_copy(update={"limit": options.limit})
    folders = (settings.path, settings.val_path) if settings.source == "folder" else ()
    made_from = json_digest([settings.model_dump(), digest(*folders), VERSION])
    # Sample: always copied
    entries = None if settings.source == "sample" else _up_to_date(options, made_from)
    if entries is None:
        entries = _fetch(options, settings, made_from)
    counts = {
        f"{split}_images": sum(entry.split == split for entry in entries)
        for split in manifest.SPLITS
    }
    counts["bytes"] = sum(entry.size for entry in entries)
    write_atomic(options.reports / "metrics.json", json.dumps(counts, indent=1) + "\n")
    print(
        f"fetch: {counts['train_images']} training, {counts['val_images']} validation and"
        f" {counts['test_images']} test images ({counts['bytes'] / 1e6:.1f} MB) in"
        f" {options.out}/manifest.csv"
    )
    return 0


def _fetch(options: argparse.Namespace, settings: FetchParams, made_from: str) -> List[Entry]:
    """Find or download the images and write the manifest. The user's own images are checked
    first.
    """
    own = None
    if settings.source == "folder":
        own = splits.own(settings)
        splits.require_usable(*own, smallest_images(params.load_all(options.params)))
        copies = len(own[1]["train"].names) - len(own[0]["train"])
        if settings.val_path and copies and not settings.limit:
            print(f"fetch: {copies} training images left out: copies of held-out ones")
    manifest.writable(options.out, options.archives, options.reports)
    if settings.source == "sample":
        entries = sources.copy_sample(options.out / SAMPLE)
        containers = {SAMPLE: {"kind": "folder", "path": SAMPLE}}
    else:
        shutil.rmtree(options.out / SAMPLE, ignore_errors=True)
        found = own or _coco(settings, options.archives)
        entries, containers = _entries(*found, options.out)
    manifest.write(options.out / "manifest.csv", entries)
    content = {
        "source": settings.source,
        "containers": containers,
        "images": {
            split: sum(entry.split == split for entry in entries) for split in manifest.SPLITS
        },
        "made_from": made_from,
        "manifest": file_sha256(options.out / "manifest.csv"),
    }
    write_atomic(options.out / "source.json", _text({**content, "digest": json_digest(content)}))
    return entries


def _up_to_date(options: argparse.Namespace, made_from: str) -> Optional[List[Entry]]:
    """The entries of the existing manifest if its digest is `made_from` and its archives are
    undamaged; else None.
    """
    try:
        text = (options.out / "source.json").read_text(encoding="utf-8")
        source = json.loads(text)
        if text != _text(source) or source.pop("digest") != json_digest(source):
            return None
        if source["made_from"] != made_from or source["manifest"] != file_sha256(
            options.out / "manifest.csv"
        ):
            return None
        entries = manifest.read(options.out / "manifest.csv")
        roots = {key: options.out / value["path"] for key, value in source["containers"].items()}
        sums = {roots[key]: value.get("sha256") for key, value in source["containers"].items()}
    except (OSError, ValueError, KeyError, TypeError, RequestError):
        return None
    ends: Dict[Path, int] = {}  # smallest length of each archive
    for entry in entries:
        root = roots[entry.container]
        if entry.offset:
            ends[root] = max(ends.get(root, 0), entry.offset + entry.packed)
    whole = all(
        path.is_file()
        and path.stat().st_size >= end
        and _same_archive(path, sums[path], options.archives)
        for path, end in ends.items()
    )
    return entries if whole else None


def _text(source: Dict[str, Any]) -> str:
    return json.dumps(source, indent=1, sort_keys=True) + "\n"


def _same_archive(path: Path, sha256: Optional[str], notes: Path) -> bool:
    """Whether the archive is unchanged since its SHA-256 was checked. True for the user's own
    zip.
    """
    return sha256 is None or download.read_note(path, notes).get("sha256") == sha256


def _entries(
    split_names: splits.Splits, held: Dict[str, Container], out: Path
) -> Tuple[List[Entry], Dict[str, Dict[str, Any]]]:
    """Manifest entries of the splits, and the containers they name."""
    entries: List[Entry] = []
    for split, names in split_names.items():
        key = splits.container_of(split, held)
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


def _coco(settings: FetchParams, archives: Path) -> Tuple[splits.Splits, Dict[str, Container]]:
    """COCO's archives, downloaded if missing; with a small `fetch.limit` only a part of them."""
    source = coco.SOURCES[settings.source]
    wanted = {"train": source.train, **({"val": source.held_out} if source.held_out else {})}
    holdings = {
        key: coco.Holding(
            archive, archives, settings.path, os.environ.get(MIRROR, ""), settings.limit > 0
        )
        for key, archive in wanted.items()
    }
    for holding in holdings.values():
        holding.whole()
    if "val" in holdings:
        names = holdings["val"].names
        fraction = min(1.0, coco.HELD_OUT / len(names))
        chosen = splits.split(
            holdings["train"].names, sources.hold_out(names, fraction, splits.SEED)[1], settings
        )
    else:
        chosen = splits.hold_out(holdings["train"].names, settings)
    held_out = chosen["val"] + chosen["test"]
    needed = {"train": chosen["train"] + ([] if "val" in holdings else held_out), "val": held_out}
    return chosen, {key: holding.ensure(needed[key]) for key, holding in holdings.items()}


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
