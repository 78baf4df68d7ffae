"""Containers of images: a folder, a zip, a list file, or a COCO annotation file, read in place."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Union

from pipeline.errors import RequestError
from pipeline.image_sets.manifest import DEFLATED, STORED, Entry
from pipeline.image_sets.sources import file_entry, list_images
from superglue_sift.features.images import EXTENSIONS
from superglue_sift.progress import Progress

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
HEADER = _LOCAL_HEADER.size  # bytes before a member's name
MAX_RATIO = 100  # uncompressed to compressed size of one image; JPEG in a zip has about 1
MAX_IMAGE_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True)
class Container:
    """A folder or zip of images, and which of them are meant."""

    path: Path
    names: List[str]  # of the images, sorted, relative to it
    # For source.json, such as the SHA-256 of an archive
    facts: Dict[str, Any] = field(default_factory=dict)
    members: Optional[Dict[str, zipfile.ZipInfo]] = None  # of a zip, by name; None: a folder

    _read: Dict[str, Entry] = field(default_factory=dict)  # entries so far, by name

    @cached_property
    def contents(self) -> Dict[str, str]:
        """What tells images with other bytes apart, by name."""
        entries = self.entries(self.names)
        return {e.name: f"{e.size}-{e.crc32}" if e.crc32 else e.name for e in entries}

    def entries(self, names: Sequence[str], split: str = "", key: str = "") -> List[Entry]:
        """Manifest entries of some of its images, each of which is read once.

        key: name of this container in source.json.
        """
        new = [name for name in names if name not in self._read]
        shown = {"total": len(new), "desc": "reading images", "unit": "image"}
        with ThreadPoolExecutor(4) as pool:  # reading and CRC-32 release the GIL
            self._read.update(zip(new, Progress(pool.map(self._entry, new), **shown)))
        return [replace(self._read[name], split=split, container=key) for name in names]

    def _entry(self, name: str) -> Entry:
        if self.members is None:
            return file_entry(self.path, name)
        member = self.members[name]
        with self.path.open("rb") as stream:
            stream.seek(member.header_offset)
            return member_entry(member, stream.read(HEADER), self.path)


def open_container(
    path: Union[str, Path], root: str = "", categories: Sequence[str] = (), min_side: int = 0
) -> Container:
    """Open a folder, a .zip, a .txt list of images or a .json in COCO's annotation format.

    Args:
        root: folder (or zip) the names in a list or annotation file count from; "": the file's own
            folder.
        categories: take the images of an annotation file with any of these; none: all.
        min_side: take those whose smaller side has at least this number of pixels.

    Raises RequestError if there is nothing at `path`, no image in it, or a name that leads outside.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if not path.exists():
        raise RequestError(f"{path}: no such folder, zip, list or annotation file")
    if path.is_dir():
        container = _folder(path)
    elif kind == ".zip":
        container = zip_container(path)
    elif kind in (".txt", ".json"):
        listed = (
            _read_list(path) if kind == ".txt" else _read_annotations(path, categories, min_side)
        )
        container = _choose(path, Path(root or path.parent), listed)
    else:
        raise RequestError(
            f"{path}: must be a folder, a .zip, a .txt list or a .json of COCO annotations"
        )
    if not container.names:
        raise RequestError(
            f"{path}: holds no images ({', '.join(EXTENSIONS)}, nested folders included)"
        )
    return container


def _folder(path: Path) -> Container:
    return Container(path, [file.relative_to(path).as_posix() for file in list_images(path)])


def zip_container(path: Path, **facts: Any) -> Container:
    """All images of an archive, read in place. Raises RequestError for a damaged or unsafe one."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = archive.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise RequestError(
            f"{path}: not a whole zip archive ({error}); delete it and run again"
        ) from None
    members = {member.filename: member for member in check_members(found, path)}
    return Container(path, list(members), facts, members)


def _choose(path: Path, root: Path, names: List[str]) -> Container:
    """The container `root` with the names that a file lists; a missing file is reported when it is
    read.

    COCO's annotations name files without their folder.
    """
    names = [_relative(name, root, path) for name in names]
    if not root.exists():
        raise RequestError(
            f"{root}: no such folder; fetch.root must hold the images that {path} lists"
        )
    zipped = root.suffix.lower() == ".zip"
    members = zip_container(root).members if zipped else None
    there = members or {name for name in names if (root / name).exists()}
    missing = [name for name in names if name not in there]
    if any("/" not in name for name in missing):
        # the first file of that name in a folder below
        whole = sorted(there) if zipped else _folder(root).names
        by_file = {name.rpartition("/")[2]: name for name in reversed(whole)}
        names = [name if name in there else by_file.get(name, name) for name in names]
        missing = [name for name in missing if name not in by_file]
    if missing and (zipped or len(missing) == len(names)):
        more = f" (and {len(missing) - 1} more)"
        raise RequestError(f"{path}: '{missing[0]}' is not in {root}{more}; set fetch.root")
    return Container(root, sorted(set(names)), members=members)


def _relative(name: str, root: Path, path: Path) -> str:
    """The name counted from root. Raises RequestError if it leads outside."""
    top = os.path.abspath(root)
    place = os.path.join(top, name)
    if ".." in name.split("/") or os.path.commonpath([top, place]) != top:
        raise RequestError(
            f"{path}: '{name}' leads outside {root}; set fetch.root to a folder above both"
        )
    return os.path.relpath(place, top)


def _read_list(path: Path) -> List[str]:
    """One relative path per line, without empty lines and lines that begin with #."""
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def _read_annotations(path: Path, categories: Sequence[str], min_side: int) -> List[str]:
    """`file_name` of the images in a COCO annotation file that show one of the categories and are
    large enough.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        images = {image["id"]: image for image in content["images"]}
        known = {category["name"]: category["id"] for category in content.get("categories", [])}
        seen = {(mark["image_id"], mark["category_id"]) for mark in content.get("annotations", [])}
        large = {
            key: image["file_name"]
            for key, image in images.items()
            if min(image.get("width", min_side), image.get("height", min_side)) >= min_side
        }
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(
            f"{path}: is not a COCO annotation file (images, annotations, categories)"
        ) from None
    for name in categories:
        if name not in known:
            raise RequestError(
                f"fetch.categories: '{name}' is not in {path}; known are {', '.join(known)}"
            )
    wanted = {known[name] for name in categories}
    showing = {image for image, category in seen if category in wanted}
    chosen = [name for key, name in large.items() if key in showing or not categories]
    if not chosen:
        raise RequestError(
            f"{path}: no image fits fetch.categories and fetch.min_side; ask for less"
        )
    return chosen


# --- zip archives


def check_members(members: Sequence[zipfile.ZipInfo], path: object) -> List[zipfile.ZipInfo]:
    """The images among the members, without hidden ones, sorted by name. RequestError names an
    unsafe member.
    """
    images = [
        member
        for member in members
        if member.filename.lower().endswith(EXTENSIONS) and "/._" not in f"/{member.filename}"
    ]
    seen = set()
    for member in images:
        problem = _unsafe(member) or ("is in it twice" if member.filename in seen else None)
        if problem:
            raise RequestError(f"{path}: refused, its member '{member.filename}' {problem}")
        seen.add(member.filename)
    if not images:
        raise RequestError(f"{path}: holds no images ({len(members)} other members)")
    return sorted(images, key=lambda member: member.filename)


def _unsafe(member: zipfile.ZipInfo) -> Optional[str]:
    """Why a member is unsafe, or None. Nothing is unpacked, but names appear in other files."""
    name = member.filename
    if name.startswith(("/", "\\")) or ":" in name.split("/")[0] or ".." in name.split("/"):
        return "points outside the archive"
    if (member.external_attr >> 16) & 0o170000 == 0o120000:
        return "is a symbolic link"
    if member.compress_type not in (STORED, DEFLATED) or member.flag_bits & 1:
        return "is encrypted, or compressed by another method than stored and deflate"
    if member.file_size > MAX_IMAGE_BYTES or member.file_size > MAX_RATIO * max(
        member.compress_size, 1024
    ):
        return f"would grow from {member.compress_size} to {member.file_size} bytes"
    return None


def member_entry(member: zipfile.ZipInfo, header: bytes, path: object) -> Entry:
    """The entry of a member, by its local header, without split and container. Raises RequestError
    for bytes that are no header.
    """
    if len(header) < HEADER or header[:4] != b"PK\x03\x04":
        raise RequestError(f"{path}: refused, no data where its directory puts '{member.filename}'")
    *_, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
    offset = member.header_offset + HEADER + name_length + extra_length
    place = (offset, member.compress_size, member.compress_type)
    name = member.filename
    return Entry(name, "", "", name, member.file_size, f"{member.CRC:08x}", *place)
