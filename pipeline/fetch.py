"""Stage 1: say which photographs there are (`python -m pipeline.fetch`).

Writes `manifest.csv` and `source.json` into --out. A folder of your own stays where it is, a downloaded
archive stays one file and is read in place; only the small bundled sample is copied.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from pipeline import errors, params
from pipeline.errors import RequestError
from pipeline.images import archive, coco, download, manifest, sources
from pipeline.images.decode import EXTENSIONS, list_images
from pipeline.images.manifest import Entry
from pipeline.runtime.progress import progress

MIB = 1 << 20

Found = Tuple[List[Entry], Dict[str, Dict[str, Any]]]  # entries, and the containers they name


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.fetch", description=__doc__.split("\n")[0])
    parser.add_argument("--params", default="params.yaml", help="file with the section `fetch`")
    parser.add_argument("--out", type=Path, default=Path("data/images"), help="folder of the manifest")
    parser.add_argument("--archives", type=Path, default=Path("data/archives"), help="folder of downloads")
    parser.add_argument("--reports", type=Path, default=Path("reports/fetch"), help="folder of metrics.json")
    options = parser.parse_args(argv)
    settings = params.load("fetch", options.params)
    options.archives.mkdir(parents=True, exist_ok=True)
    if settings.source == "sample":
        entries, containers = _sample(options.out)
    elif settings.source == "folder":
        entries, containers = _folders(settings, options.out)
    else:
        entries, containers = _coco(settings, options.out, options.archives)
    _write(options.out, settings.source, entries, containers)
    counts = _summary(entries)
    manifest.write_atomic(options.reports / "metrics.json", json.dumps(counts, indent=1) + "\n")
    print(
        f"fetch: {counts['train_images']} training, {counts['val_images']} validation and "
        f"{counts['test_images']} test images ({counts['bytes'] / 1e6:.1f} MB) in {options.out}/manifest.csv"
    )
    return 0


def _sample(out: Path) -> Found:
    return sources.copy_sample(out / "sample"), {"sample": {"kind": "folder", "path": "sample"}}


def _folders(settings: Any, out: Path) -> Found:
    """A person's own images: one folder with a part held out, or one for training and one held out."""
    roots = {"train": Path(settings.path)}
    if settings.val_path:
        roots["val"] = Path(settings.val_path)
        if roots["train"].resolve() == roots["val"].resolve():
            raise RequestError("fetch.val_path: is the same folder as fetch.path; leave it empty instead")
    names = {key: _names(root) for key, root in roots.items()}
    if settings.val_path:
        splits = _split(names["train"], names["val"], settings)
    else:
        splits = _hold_out(names["train"], settings)
    entries: List[Entry] = []
    for split, chosen in splits.items():
        container = "val" if settings.val_path and split != "train" else "train"
        tick = _ticker(f"reading {split} images", len(chosen))
        entries += sources.folder_entries(roots[container], chosen, split, container, tick)
    return entries, {key: {"kind": "folder", "path": _reference(root, out)} for key, root in roots.items()}


def _names(root: Path) -> List[str]:
    names = [path.relative_to(root).as_posix() for path in list_images(root)]
    if not names:
        raise RequestError(f"{root}: holds no images ({', '.join(EXTENSIONS)}, nested folders included)")
    return names


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
    """COCO's own archives, downloaded once and left as they are."""
    source = coco.SOURCES[settings.source]
    wanted = {"train": source.train, **({"val": source.held_out} if source.held_out else {})}
    members: Dict[str, Dict[str, Any]] = {}
    containers: Dict[str, Dict[str, Any]] = {}
    for key, each in wanted.items():
        path = archives / each.file
        known = download.verified(path, each.md5) or _download(each, path, settings.mirror)
        members[key] = {member.filename: member for member in archive.image_members(path)}
        containers[key] = {"kind": "zip", "path": _reference(path, out), **known}
    if source.held_out:
        fraction = min(1.0, coco.HELD_OUT / len(members["val"]))
        held_out = sources.hold_out(list(members["val"]), fraction, settings.seed)[1]
        splits = _split(list(members["train"]), held_out, settings)
    else:
        splits = _hold_out(list(members["train"]), settings)
    entries: List[Entry] = []
    for split, names in splits.items():
        key = "val" if source.held_out and split != "train" else "train"
        chosen = [members[key][name] for name in names]
        entries += archive.zip_entries(archives / wanted[key].file, chosen, split, key)
    return entries, containers


def _download(each: coco.Archive, path: Path, mirror: str) -> Dict[str, Any]:
    total = -(-each.size // MIB) if each.size else None
    done = 0
    bar = progress(total=total, desc=f"downloading {each.file}", unit="MiB")
    for have in download.download(each.urls(mirror), path, each.md5, each.size):
        bar.update(have // MIB - done)
        done = have // MIB
    bar.close()
    return download.verified(path, each.md5) or {}


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
    manifest.write_atomic(out / "source.json", text + "\n")


def _summary(entries: List[Entry]) -> Dict[str, int]:
    counts = {f"{split}_images": sum(entry.split == split for entry in entries) for split in manifest.SPLITS}
    return {**counts, "bytes": sum(entry.size for entry in entries)}


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
