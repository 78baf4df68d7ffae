"""Sources of photographs: the sample bundled with scikit-image, folders, and the image sets that
`fetch` lists.

`fetch` writes `manifest.csv` (`manifest`) and `source.json`, which contains the path of each
container.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from pipeline.errors import RequestError
from pipeline.image_sets import manifest
from pipeline.image_sets.manifest import DEFLATED, Entry
from superglue_sift.features.images import EXTENSIONS, BadImage

# Photographs of scikit-image's wheel with corners and blobs to detect, without drawings and
# screenshots. The two motorcycle frames show one scene and so share a split.
SAMPLE: Dict[str, Tuple[str, ...]] = {
    "train": (
        "astronaut.png", "coins.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png",
        "motorcycle_left.png", "motorcycle_right.png", "page.png", "retina.jpg", "rocket.jpg",
    ),
    "val": ("brick.png", "chelsea.png"),
    "test": ("camera.png", "coffee.png", "grass.png"),
}  # fmt: skip


@dataclass(frozen=True)
class ImageSet:
    """The images that `fetch` lists: entries by split, and their bytes. Keeps no handle.

    containers: path of each folder or zip, all that `read` needs.
    """

    listed: Sequence[Entry]
    containers: Dict[str, str]

    def entries(self, split: str) -> List[Entry]:
        """The entries of `train`, `val` or `test`, sorted by name."""
        return [entry for entry in self.listed if entry.split == split]

    def read(self, entry: Entry) -> bytes:
        """The bytes of the image file. Raises BadImage when they changed since `fetch`."""
        root = self.containers[entry.container]
        path = root if entry.offset else os.path.join(root, entry.member)
        try:
            with open(path, "rb") as stream:
                stream.seek(entry.offset)
                data = stream.read(entry.packed if entry.offset else -1)
        except OSError as error:
            raise BadImage(entry.name, f"cannot be read: {error.strerror}") from None
        return unpack(data, entry)


def open_manifest(folder: Path) -> ImageSet:
    """Open the folder that `fetch` wrote. Raises RequestError when it is missing or incomplete.

    Paths in source.json are relative to that folder, so a clone can be moved.
    """
    entries = manifest.read(folder / "manifest.csv")
    try:
        source = json.loads((folder / "source.json").read_text(encoding="utf-8"))
        roots = {key: str(folder / value["path"]) for key, value in source["containers"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(
            f"{folder}/source.json: missing or damaged; run `dvc repro -f fetch`"
        ) from None
    for key in sorted({entry.container for entry in entries}):
        if key not in roots:
            raise RequestError(
                f"{folder}/manifest.csv names '{key}', which {folder}/source.json does not have;"
                " run `dvc repro -f fetch`"
            )
        if not os.path.exists(roots[key]):
            place = os.path.normpath(roots[key])
            raise RequestError(
                f"{place}: no images there; `dvc repro -f -s fetch` finds or downloads them"
            )
    return ImageSet(entries, roots)


def unpack(data: bytes, entry: Entry) -> bytes:
    """The bytes of an image from those it is packed in. Raises BadImage unless size and CRC-32 are
    those of the entry.
    """
    if entry.method == DEFLATED:
        try:
            # Bounded, against zip bombs
            data = zlib.decompressobj(-15).decompress(data, entry.size + 1)
        except zlib.error as error:
            raise BadImage(entry.name, f"damaged inside its archive: {error}") from None
    if len(data) != entry.size:
        raise BadImage(entry.name, f"has {len(data)} bytes, {entry.size} when it was fetched")
    if entry.crc32 and zlib.crc32(data) != int(entry.crc32, 16):
        raise BadImage(entry.name, "its CRC-32 is not the one it had when it was fetched")
    return data


def sample_folder() -> Path:
    """Folder of the bundled photographs."""
    import skimage

    return Path(skimage.__file__).parent / "data"


def copy_sample(target: Path) -> List[Entry]:
    """Copy the bundled photographs into `target` and return their entries, with the splits of
    `SAMPLE`.
    """
    origin = sample_folder()
    target.mkdir(parents=True, exist_ok=True)
    entries: List[Entry] = []
    for split, names in SAMPLE.items():
        for name in names:
            if not (origin / name).is_file():
                raise RequestError(
                    f"{origin / name}: not in this scikit-image; install the pinned version"
                )
            shutil.copyfile(origin / name, target / name)
            entries.append(file_entry(target, name, split, "sample"))
    for stale in {path.name for path in target.iterdir()} - {entry.name for entry in entries}:
        (target / stale).unlink()
    return entries


def list_images(folder: Path) -> List[Path]:
    """Image files under `folder`, by extension, sorted, with nested folders, without hidden ones.

    Lists dangling links too: reading them reports the error. Raises RequestError when the folder is
    missing.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder}: no such folder; give the folder that holds the images")
    images = (
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in EXTENSIONS and not path.is_dir()
    )
    names = {path.relative_to(folder).as_posix(): path for path in images}
    return [path for name, path in sorted(names.items()) if "/." not in f"/{name}"]


def file_entry(root: Path, name: str, split: str = "", container: str = "") -> Entry:
    """The entry of a file under `root`, also of an unreadable one, which `keypoints` reports."""
    try:
        data = (root / name).read_bytes()
    except OSError:
        return Entry(name, split, container, name, 0, "")
    crc32 = f"{zlib.crc32(data):08x}"
    return Entry(name, split, container, name, len(data), crc32, packed=len(data))
