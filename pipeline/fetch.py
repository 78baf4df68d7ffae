"""Stage 1: say which photographs there are (`python -m pipeline.fetch`).

Writes `manifest.csv` and `source.json` into --out. A folder of your own stays where it is, a downloaded
archive stays one file and is read in place; only the small bundled sample is copied.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from pipeline import errors, params
from pipeline.errors import RequestError
from pipeline.files import write_atomic
from pipeline.images import coco, manifest, sources
from pipeline.images.containers import Choice, Container, open_container
from pipeline.images.holdings import Holding
from pipeline.images.manifest import Entry
from pipeline.runtime import workspace_lock
from pipeline.runtime.progress import progress

MIB = 1 << 20

Found = Tuple[List[Entry], Dict[str, Dict[str, Any]]]  # entries, and the containers they name


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.fetch", description=__doc__.split("\n")[0])
    parser.add_argument("--params", default="params.yaml", help="file with the section `fetch`")
    parser.add_argument("--out", type=Path, default=Path("data/images"), help="folder of the manifest")
    parser.add_argument("--archives", type=Path, default=Path("data/archives"), help="folder of downloads")
    parser.add_argument("--reports", type=Path, default=Path("reports/fetch"), help="folder of metrics.json")
    parser.add_argument("--limit", type=int, help="images of each set, instead of fetch.limit")
    options = parser.parse_args(argv)
    workspace_lock.take()
    settings = params.load("fetch", options.params)
    if options.limit is not None:
        if options.limit < 0:
            raise RequestError(f"--limit {options.limit}: must be 0 (all) or more")
        settings = settings.model_copy(update={"limit": options.limit})
    manifest.writable(options.out, options.archives, options.reports)
    if settings.source == "sample":
        entries, containers = _sample(options.out)
    elif settings.source == "folder":
        entries, containers = _own(settings, options.out)
    else:
        entries, containers = _coco(settings, options.out, options.archives)
    _write(options.out, settings.source, entries, containers)
    counts = _summary(entries)
    write_atomic(options.reports / "metrics.json", json.dumps(counts, indent=1) + "\n")
    print(
        f"fetch: {counts['train_images']} training, {counts['val_images']} validation and "
        f"{counts['test_images']} test images ({counts['bytes'] / 1e6:.1f} MB) in {options.out}/manifest.csv"
    )
    return 0


def _sample(out: Path) -> Found:
    return sources.copy_sample(out / "sample"), {"sample": {"kind": "folder", "path": "sample"}}


def _own(settings: Any, out: Path) -> Found:
    """A person's own images: one set with a part held out, or one for training and one held out."""
    choice = Choice(tuple(filter(None, settings.categories.split(","))), settings.min_side)
    held = {"train": open_container(settings.path, settings.root, choice)}
    if settings.val_path:
        held["val"] = open_container(settings.val_path, settings.root, choice)
        if Path(settings.path).resolve() == Path(settings.val_path).resolve():
            raise RequestError("fetch.val_path: is the same as fetch.path; leave it empty instead")
        splits = _split(held["train"].names, held["val"].names, settings)
    else:
        splits = _hold_out(held["train"].names, settings)
    return _entries(splits, held, out)


def _entries(splits: Dict[str, List[str]], held: Dict[str, Container], out: Path) -> Found:
    """Manifest entries of the splits; val and test come from the container "val" where there is one."""
    entries: List[Entry] = []
    for split, names in splits.items():
        key = "val" if split != "train" and "val" in held else next(iter(held))
        entries += held[key].entries(names, split, key, _ticker(f"reading {split} images", len(names)))
    containers = {
        key: {**each.facts, "kind": each.kind, "path": _reference(each.path, out)}
        for key, each in held.items()
    }
    return entries, containers


def _hold_out(names: Sequence[str], settings: Any) -> Dict[str, List[str]]:
    """Hold out a part of one set of images by the hash of their names."""
    return _split(
        *sources.hold_out(names, settings.val_fraction, settings.seed, sources.HELD_OUT_MIN), settings
    )


def _split(train: Sequence[str], held_out: Sequence[str], settings: Any) -> Dict[str, List[str]]:
    """Limit both sets, and share the held-out images among val and test."""
    train, held_out = _limit(train, settings), _limit(held_out, settings)
    # another seed than that of the hold-out: the same hash would put every small value into test
    val, test = sources.hold_out(held_out, settings.test_fraction, settings.seed + 1)
    return {"train": train, "val": val, "test": test}


def _limit(names: Sequence[str], settings: Any) -> List[str]:
    """At most `fetch.limit` names, those with the smallest hashes: a larger limit keeps the smaller's
    choice."""
    if not settings.limit or len(names) <= settings.limit:
        return sorted(names)
    return sorted(
        sorted(names, key=lambda name: manifest.hash_share(settings.seed + 2, name))[: settings.limit]
    )


def _coco(settings: Any, out: Path, archives: Path) -> Found:
    """COCO's own archives: those at hand, else downloaded; with a small `fetch.limit` only a part of them."""
    source = coco.SOURCES[settings.source]
    wanted = {"train": source.train, **({"val": source.held_out} if source.held_out else {})}
    holdings = {
        key: Holding(each, archives, settings.path, settings.mirror, settings.limit > 0)
        for key, each in wanted.items()
    }
    for holding in holdings.values():
        holding.whole(_show_download)
    if "val" in holdings:
        names = holdings["val"].names
        fraction = min(1.0, coco.HELD_OUT / len(names))
        splits = _split(
            holdings["train"].names, sources.hold_out(names, fraction, settings.seed)[1], settings
        )
    else:
        splits = _hold_out(holdings["train"].names, settings)
    held_out = splits["val"] + splits["test"]
    needed = {"train": splits["train"] + ([] if "val" in holdings else held_out), "val": held_out}
    held = {key: each.bring(needed[key], _show_download, _show_images) for key, each in holdings.items()}
    return _entries(splits, held, out)


def _show_download(sizes: Iterator[int], size: Optional[int], name: str) -> None:
    """Run a download with a progress display in MiB."""
    bar = None
    for have in sizes:
        if bar is None:
            total = -(-size // MIB) if size else None
            bar = progress(total=total, initial=have // MIB, desc=f"downloading {name}", unit="MiB")
        bar.update(have // MIB - bar.n)
    if bar is not None:
        bar.close()


def _show_images(images: Iterable, total: int, desc: str) -> Iterable:
    return progress(images, total=total, desc=desc, unit="image")


def _reference(path: Path, out: Path) -> str:
    """How source.json names a place: relative to --out where the person gave a relative path."""
    if path.is_absolute():
        return str(path)
    return Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()


def _ticker(desc: str, total: int) -> sources.Tick:
    return lambda iterable: progress(iterable, total=total, desc=desc, unit="image")


def _write(out: Path, source: str, entries: List[Entry], containers: Dict[str, Any]) -> None:
    counts = {split: sum(entry.split == split for entry in entries) for split in manifest.SPLITS}
    text = json.dumps(
        {"source": source, "containers": containers, "images": counts}, indent=1, sort_keys=True
    )
    manifest.write(out / "manifest.csv", entries)
    write_atomic(out / "source.json", text + "\n")


def _summary(entries: List[Entry]) -> Dict[str, int]:
    counts = {f"{split}_images": sum(entry.split == split for entry in entries) for split in manifest.SPLITS}
    return {**counts, "bytes": sum(entry.size for entry in entries)}


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
