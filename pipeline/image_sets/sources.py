"""The sources of photographs: the sample bundled with scikit-image, folders; and reading back what `fetch` found.

`fetch` writes `manifest.csv` (`manifest`) and `source.json`, which says where each container stands.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Sequence, Tuple, Union

from pipeline.errors import RequestError
from pipeline.image_sets import manifest
from pipeline.image_sets.manifest import DEFLATED, Entry
from superglue_sift.images import EXTENSIONS, BadImage

# Photographs inside scikit-image's wheel that a detector of corners and blobs can work with; no drawing, no
# screenshot. The two motorcycle frames show one scene and so share a split.
SAMPLE: Dict[str, Tuple[str, ...]] = {
    "train": (
        "astronaut.png", "coins.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png",
        "motorcycle_left.png", "motorcycle_right.png", "page.png", "retina.jpg", "rocket.jpg",
    ),
    "val": ("brick.png", "chelsea.png"),
    "test": ("camera.png", "coffee.png", "grass.png"),
}  # fmt: skip
HELD_OUT_MIN = 2  # images: one for val, one for test

Tick = Callable[[Iterable], Iterable]  # wraps an iterable in a progress display


class ImageSet:
    """What `fetch` left: entries by split, and their bytes. Cheap to open and to pickle; no handle is kept."""

    def __init__(self, entries: Sequence[Entry], containers: Dict[str, str]) -> None:
        self._entries, self._containers = list(entries), containers

    def entries(self, split: str) -> List[Entry]:
        """The entries of `train`, `val` or `test`, sorted by name."""
        return [entry for entry in self._entries if entry.split == split]

    def without_entries(self) -> ImageSet:
        """The same containers without the list: what a worker process needs to `read`."""
        return ImageSet((), self._containers)

    def read(self, entry: Entry) -> bytes:
        """The bytes of the image file; BadImage when they are not the ones `fetch` saw."""
        root = self._containers[entry.container]
        path = root if entry.offset else os.path.join(root, entry.member)
        try:
            with open(path, "rb") as stream:
                stream.seek(entry.offset)
                data = stream.read(entry.packed if entry.offset else -1)
        except OSError as error:
            raise BadImage(entry.name, f"cannot be read: {error.strerror}") from None
        return _unpack(data, entry)


def open_manifest(folder: Union[str, Path]) -> ImageSet:
    """Open the folder `fetch` wrote; RequestError when it is missing or incomplete.

    Relative paths in source.json count from that folder, so a clone that is moved keeps working.
    """
    folder = Path(folder)
    entries = manifest.read(folder / "manifest.csv")
    try:
        source = json.loads((folder / "source.json").read_text(encoding="utf-8"))
        roots = {key: str(folder / value["path"]) for key, value in source["containers"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(f"{folder}/source.json: missing or damaged; run `dvc repro -f fetch`") from None
    for entry in entries:
        if entry.container not in roots:
            raise RequestError(
                f"{folder}/manifest.csv names '{entry.container}', which {folder}/source.json does not have; "
                "run `dvc repro -f fetch`"
            )
    for key in sorted({entry.container for entry in entries}):
        if not os.path.exists(roots[key]):
            place = os.path.normpath(roots[key])
            raise RequestError(f"{place}: no images there; `dvc repro -f -s fetch` finds or downloads them")
    return ImageSet(entries, roots)


def _unpack(data: bytes, entry: Entry) -> bytes:
    if entry.method == DEFLATED:
        try:
            data = zlib.decompressobj(-15).decompress(data, entry.size + 1)  # never more than it may hold
        except zlib.error as error:
            raise BadImage(entry.name, f"damaged inside its archive: {error}") from None
    if len(data) != entry.size:
        raise BadImage(entry.name, f"has {len(data)} bytes, {entry.size} when it was fetched")
    if entry.crc32 and zlib.crc32(data) != int(entry.crc32, 16):
        raise BadImage(entry.name, "its CRC-32 is not the one it had when it was fetched")
    return data


def sample_folder() -> Path:
    """Where the bundled photographs lie."""
    import skimage

    return Path(skimage.__file__).parent / "data"


def copy_sample(target: Path) -> List[Entry]:
    """Copy the bundled photographs into `target` and give their entries, splits fixed by `SAMPLE`."""
    origin = sample_folder()
    target.mkdir(parents=True, exist_ok=True)
    entries: List[Entry] = []
    for split, names in SAMPLE.items():
        for name in names:
            if not (origin / name).is_file():
                raise RequestError(f"{origin / name}: not in this scikit-image; install the pinned version")
            shutil.copyfile(origin / name, target / name)
        entries += folder_entries(target, names, split, "sample")
    for stale in {path.name for path in target.iterdir()} - {entry.name for entry in entries}:
        (target / stale).unlink()
    return entries


def list_images(folder: Union[str, Path]) -> List[Path]:
    """Image files under `folder`, by extension, nested folders included, hidden ones left out; sorted.

    A dangling link is listed: reading it tells what is wrong. Raises RequestError when the folder is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RequestError(f"{folder}: no such folder; give the folder that holds the images")
    images = (path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS and not path.is_dir())
    names = {path.relative_to(folder).as_posix(): path for path in images}
    return [path for name, path in sorted(names.items()) if "/." not in f"/{name}"]


def folder_entries(root: Path, names: Sequence[str], split: str, container: str, tick: Tick = iter) -> List[Entry]:
    """Entries of the files `names` under `root`. An unreadable file gets one too: `keypoints` reports it."""

    def entry(name: str) -> Entry:
        try:
            data = (root / name).read_bytes()
        except OSError:
            return Entry(name, split, container, name, 0, "")
        return Entry(name, split, container, name, len(data), f"{zlib.crc32(data):08x}", packed=len(data))

    with ThreadPoolExecutor(4) as pool:  # threads: CRC-32 and reading both release the interpreter
        return list(tick(pool.map(entry, names)))


def hold_out(names: Sequence[str], fraction: float, seed: int, at_least: int = 1) -> Tuple[List[str], List[str]]:
    """(kept, held out), each sorted; a name falls by its own hash, so other images do not move it.

    With a fraction between 0 and 1, one name is kept and `at_least` are held out where there are so many.
    """
    ranked = sorted(names, key=lambda name: (manifest.hash_share(seed, name), name))
    count = sum(manifest.hash_share(seed, name) < fraction for name in ranked)
    if 0.0 < fraction < 1.0:
        count = max(min(max(count, at_least), len(ranked) - 1), 0)
    return sorted(ranked[count:]), sorted(ranked[:count])
