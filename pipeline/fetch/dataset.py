"""List the photographs in a manifest, from folders, zips and lists, and read them.

`fetch` writes the manifest, and later stages read it. The photographs are split into training,
validation and test.

The manifest has one row for each image, whose columns are the fields of `Entry`. An image takes
`packed` bytes at `offset` of a file. In a folder this file is `member`, and in a zip it is the zip
itself. Any number of processes can thus read a zip in place, without its directory. `source.json`
contains the path of each folder and zip.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
import shutil
import struct
import unicodedata
import urllib.parse
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from pipeline.errors import RequestError
from pipeline.params import FetchParams
from superglue_sift.features.images import BadImage
from superglue_sift.features.photo_folder import EXTENSIONS, is_photo, list_photos
from superglue_sift.files import find_spelling, read_lines, write_csv
from superglue_sift.geometry.two_view import Size
from superglue_sift.progress import Progress

SPLITS = ("train", "val", "test")
# Constants of the zip format: two methods of compression, and the header before a member's name.
STORED = 0
DEFLATED = 8
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
HEADER = _LOCAL_HEADER.size
MAX_IMAGE_BYTES = 1 << 29  # Largest image of a zip, against zip bombs
# Names of COCO's files, with the prefix of 2014 or without one as in 2017, and of its folders and
# archives.
_COCO_FILE = re.compile(r"(COCO_(?:train|val|test)20\d\d_)?(\d{12})\.\w+")
_COCO_FOLDER = re.compile(r"(?:train|val|test|unlabeled)20\d\d")

MAX_UPSCALE = 2.0  # Most view pixels per image pixel. It limits how small images may be
MAX_SIDE = 32_767  # px. cv2.warpPerspective takes images with shorter sides

SEED = 0  # Seed of the hash of names, which decides the split
Splits = Dict[str, List[str]]  # Names of the images by split

# Photographs of scikit-image's wheel with corners and blobs to detect, without drawings and
# screenshots. The two motorcycle frames show one scene and so share a split.
SAMPLE: Dict[str, Tuple[str, ...]] = {
    "train": (
        "astronaut.png", "hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png",
        "motorcycle_right.png", "page.png", "retina.jpg",
    ),
    "val": ("brick.png", "chelsea.png"),
    # There are at least six, because intervals of fewer photographs decide nothing.
    "test": ("camera.png", "coffee.png", "coins.png", "grass.png", "gravel.png", "rocket.jpg"),
}  # fmt: skip


# --- the manifest


@dataclass(frozen=True)
class Entry:
    """One image, a row of the manifest.

    Attributes:
        name: relative path with forward slashes, unique within the split.
        split: "train", "val" or "test".
        container: key of the folder or zip in source.json.
        member: path inside the folder or zip.
        size: bytes of the image file.
        crc32: CRC-32 of the image file, 8 hexadecimal digits. Empty if it could not be read.
        offset: where its bytes begin in the file that holds them.
        packed: how many bytes it takes there.
        method: how it is compressed there, STORED or DEFLATED.
    """

    name: str
    split: str
    container: str
    member: str
    size: int
    crc32: str
    offset: int = 0
    packed: int = 0
    method: int = STORED


def parse_coco_number(name: str) -> str:
    """Return the number in the name of a photograph of COCO, or "" for any other name."""
    match = _COCO_FILE.fullmatch(name.rpartition("/")[2])
    # A date has twelve digits, too.
    return str(int(match[2])) if match and int(match[2]) < 1_000_000 else ""


def write_manifest(path: Path, entries: Iterable[Entry]) -> None:
    """Write the manifest atomically, sorted by split and name. Equal entries give equal bytes."""
    rows = sorted(entries, key=lambda entry: (entry.split, entry.name))
    write_csv(path, [[field.name for field in fields(Entry)], *(astuple(row) for row in rows)])


def read_manifest(path: Path) -> List[Entry]:
    """Read the entries of a manifest.

    Raises:
        RequestError: If there is no manifest, or if a line is wrong. The error names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as stream:
            rows = list(csv.DictReader(stream))
    except OSError:
        raise RequestError(f"{path}: no manifest here; run `dvc repro fetch` first") from None
    entries = []
    # Line 1 has the names of the columns.
    for line, row in enumerate(rows, 2):
        try:
            numbers = {key: int(row[key]) for key in ("size", "offset", "packed", "method")}
            entries.append(Entry(**{**row, **numbers}))
        except (KeyError, TypeError, ValueError):
            raise RequestError(
                f"{path} line {line}: not a manifest row; run `dvc repro -f fetch`"
            ) from None
    return entries


# --- reading images that are listed


@dataclass(frozen=True)
class ImageSet:
    """The images that `fetch` lists. No file stays open.

    Attributes:
        listed: the entries of all images. Method `read` does not need them.
        containers: path of each folder or zip, by its key.
        source: the key `fetch.source`, or "" if it is not known.
    """

    listed: Sequence[Entry]
    containers: Dict[str, str]
    source: str = ""

    def select_entries(self, split: str) -> List[Entry]:
        """Return the entries of "train", "val" or "test", sorted by name."""
        return [entry for entry in self.listed if entry.split == split]

    def identify_photograph(self, entry: Entry) -> str:
        """Return an identifier of the photograph, which tells whether a model was trained on it.

        The identifier of a photograph of COCO is its number, which is unique over all years and the
        same for smaller or gray copies. That of any other photograph is the CRC-32 and the size of
        the file. They do not depend on the name, but change if the file is encoded again. The
        identifier is "" if the file could not be read.
        """
        content = f"{entry.crc32}-{entry.size}" if entry.crc32 else ""
        return (self._is_of_coco(entry) and parse_coco_number(entry.name)) or content

    def _is_of_coco(self, entry: Entry) -> bool:
        """Return whether an entry with a number in its name is a photograph of COCO.

        Frames of a video are numbered, too. The source, the prefix of the name, or the name of the
        folder or zip tells them apart.
        """
        *folders, name = entry.name.split("/")
        folder = folders[-1] if folders else Path(self.containers[entry.container]).stem
        match = _COCO_FILE.fullmatch(name)
        return (
            self.source.startswith("coco")
            or (match is not None and match[1] is not None)
            or _COCO_FOLDER.fullmatch(folder) is not None
        )

    def read(self, entry: Entry) -> bytes:
        """Read the bytes of the image file.

        Raises:
            BadImage: If the file cannot be read, or has changed since `fetch`.
        """
        root = self.containers[entry.container]
        path = root if entry.offset else os.path.join(root, entry.member)
        try:
            with open(path, "rb") as stream:
                stream.seek(entry.offset)
                data = stream.read(entry.packed if entry.offset else -1)
        except OSError as error:
            raise BadImage(entry.name, f"cannot be read: {error.strerror}") from None
        return unpack_and_check(data, entry)


def open_manifest(folder: Path) -> ImageSet:
    """Read the images from the folder that `fetch` wrote.

    Paths in source.json are relative to that folder, so a clone can be moved.

    Raises:
        RequestError: If the folder is missing or incomplete, or if the images are gone.
    """
    entries = read_manifest(folder / "manifest.csv")
    try:
        content = json.loads((folder / "source.json").read_text(encoding="utf-8"))
        keys = sorted({entry.container for entry in entries})
        roots = {key: str(folder / content["containers"][key]["path"]) for key in keys}
        source = str(content.get("source", ""))
    except (OSError, ValueError, KeyError, TypeError):
        raise RequestError(
            f"{folder}/source.json: missing or damaged; run `dvc repro -f fetch`"
        ) from None
    for root in roots.values():
        if not os.path.exists(root):
            raise RequestError(
                f"{os.path.normpath(root)}: no images there; `dvc repro -f -s fetch` finds or"
                " downloads them"
            )
    return ImageSet(entries, roots, source)


def unpack_and_check(data: bytes, entry: Entry) -> bytes:
    """Return the bytes of an image file from the bytes that its container holds.

    Args:
        data: the bytes in the container, which may be compressed.
        entry: the entry of the image.

    Raises:
        BadImage: If the size or the CRC-32 is not what the entry states.
    """
    if entry.method == DEFLATED:
        try:
            # At most one byte more than stated is unpacked, against zip bombs.
            data = zlib.decompressobj(-15).decompress(data, entry.size + 1)
        except zlib.error as error:
            raise BadImage(entry.name, f"damaged inside its archive: {error}") from None
    if len(data) != entry.size:
        raise BadImage(entry.name, f"has {len(data)} bytes, {entry.size} when it was fetched")
    if entry.crc32 and zlib.crc32(data) != int(entry.crc32, 16):
        raise BadImage(entry.name, "its CRC-32 is not the one it had when it was fetched")
    return data


def read_file_entry(root: Path, name: str, split: str = "", container: str = "") -> Entry:
    """Read a file, and return its entry.

    An unreadable file also gets an entry, and the stage `keypoints` reports it.

    Args:
        root: the folder of the container.
        name: path of the file in that folder, with forward slashes.
        split: "train", "val" or "test", or "" if it is not decided.
        container: key of the container in source.json, or "" if it is not decided.
    """
    try:
        data = (root / name).read_bytes()
    except OSError:
        return Entry(name, split, container, name, 0, "")
    crc32 = f"{zlib.crc32(data):08x}"
    return Entry(name, split, container, name, len(data), crc32, packed=len(data))


def find_sample_folder() -> Path:
    """Return the folder of scikit-image that has the bundled photographs."""
    import skimage

    return Path(skimage.__file__).parent / "data"


def copy_sample(target: Path) -> List[Entry]:
    """Copy the bundled photographs into the new folder `target`.

    Returns:
        The entries of the photographs, with the splits of SAMPLE.
    """
    target.mkdir(parents=True)
    entries = []
    for split, names in SAMPLE.items():
        for name in names:
            shutil.copyfile(find_sample_folder() / name, target / name)
            entries.append(read_file_entry(target, name, split, target.name))
    return entries


# --- folders, zips and lists


@dataclass(frozen=True)
class Container:
    """A folder or zip, and which of its images are used.

    Attributes:
        path: path of the folder or zip.
        names: names of the images, sorted, relative to the folder or zip.
        facts: what source.json says about it, such as the size of an archive.
        members: the members of a zip by name. It is None for a folder.
    """

    path: Path
    names: List[str]
    facts: Dict[str, Any] = field(default_factory=dict)
    members: Optional[Dict[str, zipfile.ZipInfo]] = None

    _known_entries: Dict[str, Entry] = field(default_factory=dict)  # Read so far, by name

    @cached_property
    def contents(self) -> Dict[str, str]:
        """Return a text for the content of each image, by name. Copies have the same text."""
        entries = self.read_entries(self.names)
        return {
            entry.name: f"{entry.size}-{entry.crc32}" if entry.crc32 else entry.name
            for entry in entries
        }

    def read_entries(self, names: Sequence[str], split: str = "", key: str = "") -> List[Entry]:
        """Read images, and return their entries. Each image is read only once.

        Args:
            names: names of the images.
            split: "train", "val" or "test", or "" if it is not decided.
            key: the key of this container in source.json, or "" if it is not decided.
        """
        # The contents of images decide the split, so some images have been read for it.
        unread = [name for name in names if name not in self._known_entries]
        progress_options = {"total": len(unread), "desc": "reading images", "unit": "image"}
        with ThreadPoolExecutor(4) as pool:  # Reading and CRC-32 release the GIL
            self._known_entries.update(
                zip(unread, Progress(pool.map(self._read_entry, unread), **progress_options))
            )
        return [replace(self._known_entries[name], split=split, container=key) for name in names]

    def _read_entry(self, name: str) -> Entry:
        if self.members is None:
            return read_file_entry(self.path, name)
        member = self.members[name]
        with self.path.open("rb") as stream:
            stream.seek(member.header_offset)
            return make_member_entry(member, stream.read(HEADER), self.path)


def open_container(path: Union[str, Path], root: str = "") -> Container:
    """Open a folder, a .zip, a .txt list of images or a .json in COCO's annotation format.

    Args:
        path: the folder or file.
        root: folder or zip to which the names in a list or annotation file are relative. If it is
            "", this is the folder of that file.

    Raises:
        RequestError: If there is nothing at `path`, no image in it, or an image is missing.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if not path.exists():
        raise RequestError(f"{path}: no such folder, zip, list or annotation file")
    if path.is_dir():
        photos = list_photos(path)
        container = Container(path, sorted(file.relative_to(path).as_posix() for file in photos))
    elif suffix == ".zip":
        container = open_zip(path)
    # A list or an annotation file names images of a folder or zip.
    elif suffix in (".txt", ".json"):
        names = (
            _read_annotations(path) if suffix == ".json" else [line for _, line in read_lines(path)]
        )
        container = _open_listed(path, Path(root or path.parent), names)
    else:
        raise RequestError(
            f"{path}: must be a folder, a .zip, a .txt list or a .json of COCO annotations"
        )
    if not container.names:
        raise RequestError(
            f"{path}: holds no images ({', '.join(EXTENSIONS)}, nested folders included)"
        )
    return container


def open_zip(path: Path, **facts: Any) -> Container:
    """Open a zip with all of its images, which are read in place.

    Args:
        path: the zip.
        facts: what source.json is to say about it.

    Raises:
        RequestError: If the zip is damaged or unsafe.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            all_members = archive.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise RequestError(
            f"{path}: not a whole zip archive ({error}); copy it again, or name another"
        ) from None
    members = {member.filename: member for member in select_and_check_members(all_members, path)}
    return Container(path, list(members), facts, members)


def _open_listed(path: Path, root: Path, names: Sequence[str]) -> Container:
    """Open the folder or zip `root` with the images `names`, which the file `path` lists.

    Many programs name files without a folder, or with a folder of another machine. Such a name is
    searched by its file name in all folders below `root`. This holds for a name without a folder,
    for a name that leads outside `root`, and for every missing name of an annotation file. A name
    that is missing in a folder stays in the result, and is reported when it is read.
    """
    if not root.exists():
        raise RequestError(
            f"{root}: no such folder; fetch.root must hold the images that {path} lists"
        )
    # A zip lists all of its images. A folder is listed below, if a name has to be searched.
    container = open_zip(root) if root.is_file() else Container(root, [])
    member_of_name = {_compose_accents(name): name for name in container.names}
    root_path = os.path.abspath(root)
    present = []
    missing = []
    # First look for every name at its own path.
    for name in names:
        path_in_root = os.path.abspath(os.path.join(root_path, name))
        is_inside = (
            ".." not in name.split("/")
            and os.path.commonpath([root_path, path_in_root]) == root_path
        )
        relative = (
            os.path.relpath(path_in_root, root_path) if is_inside else name.rpartition("/")[2]
        )
        stored_name = (
            member_of_name.get(_compose_accents(relative))
            if member_of_name
            else find_spelling(root, relative)
        )
        if stored_name is None:
            missing.append(relative)
        else:
            present.append(stored_name)
    # Otherwise take the first file of that name in a folder below `root`.
    searched_names = [name for name in missing if "/" not in name or path.suffix.lower() == ".json"]
    if searched_names:
        searched_container = container if member_of_name else open_container(root)
        by_file = {
            _compose_accents(name).rpartition("/")[2]: name
            for name in reversed(searched_container.names)
        }
        file_of_name = {
            name: by_file.get(_compose_accents(name).rpartition("/")[2]) for name in searched_names
        }
        present += [file for file in file_of_name.values() if file]
        missing = [name for name in missing if not file_of_name.get(name)]
    if missing and (member_of_name or not present):
        further = f" (and {len(missing) - 1} more)"
        raise RequestError(f"{path}: '{missing[0]}' is not in {root}{further}; set fetch.root")
    return replace(container, names=sorted({*present, *missing}))


def _compose_accents(name: str) -> str:
    """Return a name in which an accented letter is one character, unlike on a Mac."""
    return unicodedata.normalize("NFC", name.replace("\\", "/"))


def _read_annotations(path: Path) -> List[str]:
    """Return the names of the images in a COCO annotation file.

    Files of other programs work, too. Label Studio writes backslashes, `../` and addresses of its
    server. LVIS writes `coco_url` in place of `file_name`. Programs on Windows write a byte order
    mark.

    Raises:
        RequestError: If it is no COCO annotation file.
    """
    try:
        content = json.loads(path.read_bytes())  # It detects UTF-8, UTF-16 and UTF-32
        listed = [image.get("file_name") or image["coco_url"] for image in content["images"]]
        names = [str(name).replace("\\", "/") for name in listed]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(
            f"{path}: is not a COCO annotation file; it must have a list `images`, each with a"
            " `file_name`"
        ) from None
    return [
        urllib.parse.unquote(urllib.parse.urlsplit(name).path).lstrip("/")
        if "://" in name
        else name
        for name in names
    ]


# --- zip archives


def select_and_check_members(
    members: Sequence[zipfile.ZipInfo], path: object
) -> List[zipfile.ZipInfo]:
    """Return the photographs among the members of a zip, sorted by name.

    Names are checked although nothing is unpacked, since later stages write them into files.

    Args:
        members: the members of the zip.
        path: the zip, named in errors.

    Raises:
        RequestError: If there is no photograph, or if one cannot be read in place: it is encrypted,
            too large, neither stored nor deflated, or its name points outside the zip. The error
            names the member.
    """
    images = [member for member in members if is_photo(member.filename)]
    for member in images:
        name = member.filename
        problem = ""
        if name.startswith(("/", "\\")) or ":" in name.split("/")[0] or ".." in name.split("/"):
            problem = "points outside the archive"
        elif member.compress_type not in (STORED, DEFLATED) or member.flag_bits & 1:
            problem = "is encrypted, or compressed by another method than stored and deflate"
        elif member.file_size > MAX_IMAGE_BYTES:
            problem = f"would grow to {member.file_size} bytes"
        if problem:
            raise RequestError(f"{path}: refused, its member '{name}' {problem}")
    if not images:
        raise RequestError(f"{path}: holds no images ({len(members)} other members)")
    return sorted(images, key=lambda member: member.filename)


def make_member_entry(member: zipfile.ZipInfo, header: bytes, path: object) -> Entry:
    """Make the entry of a member of a zip, without split and container.

    Args:
        member: what the directory of the zip says about it.
        header: the bytes at the offset of the member, at least HEADER.
        path: the zip, which errors name.

    Raises:
        RequestError: If the bytes are no header.
    """
    if len(header) < HEADER or header[:4] != b"PK\x03\x04":
        raise RequestError(f"{path}: refused, no data where its directory puts '{member.filename}'")
    *_, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
    offset = member.header_offset + HEADER + name_length + extra_length
    position = (offset, member.compress_size, member.compress_type)
    name = member.filename
    return Entry(name, "", "", name, member.file_size, f"{member.CRC:08x}", *position)


# --- how large an image must be


def require_size(name: str, image_size: Size, view_size: Size) -> None:
    """Check that a view of this size can be made of an image.

    Args:
        name: name of the image, which the error names.
        image_size: width and height of the image in px.
        view_size: width and height of the view in px.

    Raises:
        BadImage: If the image is too small for the view, or so large that OpenCV cannot warp it.
    """
    if max(image_size) >= MAX_SIDE:
        raise BadImage(name, f"too long: {max(image_size)} px, at most {MAX_SIDE - 1}")
    smallest = [math.ceil((side - 1) / MAX_UPSCALE) + 1 for side in view_size]
    if any(side < least for side, least in zip(image_size, smallest)):
        size, needed = ("x".join(map(str, size_px)) for size_px in (image_size, smallest))
        raise BadImage(name, f"too small: {size}, a view needs {needed} pixels")


# --- the split


def hash_fraction(seed: int, name: str) -> float:
    """Return a number in [0, 1) that depends on the name and the seed alone."""
    digest = hashlib.sha256(f"{seed}\n{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def open_and_split_local(settings: FetchParams) -> Tuple[Splits, Dict[str, Container]]:
    """Open and split the user's own images.

    They are one set, of which a part is held out, or two sets (`fetch.val_path`).

    Returns:
        The names of the images by split, and the containers by their key in source.json.

    Raises:
        RequestError: If a path is wrong, or if no image is left to train or to validate. Test
            images may be missing, since the evaluation then uses the val images.
    """
    containers = {"train": open_container(settings.path, settings.root)}
    names = containers["train"].names
    contents = containers["train"].contents
    held_out = None
    if settings.val_path:
        val_container = containers["val"] = open_container(settings.val_path, settings.root)
        if Path(settings.path).resolve() == Path(settings.val_path).resolve():
            raise RequestError("fetch.val_path: is the same as fetch.path; leave it empty instead")
        # Leave out training images that are copies of held-out ones.
        copies = set(val_container.contents.values())
        names = [name for name in names if contents[name] not in copies]
        contents = val_container.contents
        held_out = val_container.names
    splits = split_names(names, settings, contents, held_out)
    empty_splits = [split for split in ("train", "val") if not splits[split]]
    if empty_splits:
        container = containers.get(empty_splits[0], containers["train"])
        raise RequestError(
            f"{container.path}: {len(set(container.contents.values()))} different image(s), and"
            f" none for {' and '.join(empty_splits)}; at least two are needed, one to train and one"
            " to validate, which is no copy: give more images, or change fetch.val_fraction and"
            " fetch.test_fraction"
        )
    return splits, containers


def split_names(
    train: Sequence[str],
    settings: FetchParams,
    contents: Mapping[str, str],
    held_out: Optional[Sequence[str]] = None,
) -> Splits:
    """Split names into train, val and test.

    Args:
        train: the names for train.
        settings: the section `fetch`.
        contents: a text for each name, which is equal for copies. A name that it lacks is the only
            one of its image.
        held_out: the names for val and test. If it is None, a part of `train` is held out.
    """

    def count_different_images(names: Sequence[str]) -> int:
        return len({contents.get(name, name) for name in names})

    if held_out is None:
        # In a small set, chance could hold out too few images to judge by.
        count = count_different_images(train)
        min_held_out = max(2, min(8, count // 3), min(round(settings.val_fraction * count), 32))
        train, held_out = hold_out(train, settings.val_fraction, SEED, min_held_out, 1, contents)
    # Keep the names with the smallest hashes, so that a larger limit only adds names.
    train, held_out = (
        sorted(
            sorted(names, key=lambda name: hash_fraction(SEED + 2, name))[: settings.limit or None]
        )
        for names in (train, held_out)
    )
    test_count = round(settings.test_fraction * count_different_images(held_out))
    min_test = max(1, min(test_count, 16))
    min_val = max(1, min(count_different_images(held_out) - test_count, 16))
    # The seed is another one, because by the seed above all held-out images have small hashes, and
    # would all go to test.
    val, test = hold_out(held_out, settings.test_fraction, SEED + 1, min_test, min_val, contents)
    return {"train": train, "val": val, "test": test}


def hold_out(
    names: Sequence[str],
    fraction: float,
    seed: int,
    min_held_out: int = 1,
    min_kept: int = 1,
    contents: Mapping[str, str] = MappingProxyType({}),
) -> Tuple[List[str], List[str]]:
    """Divide the names into those to keep and those to hold out, each sorted.

    The hash of a name decides, so other images do not move it. Copies go where the first of them
    goes, and count as one image.

    Args:
        names: the names to divide.
        fraction: about the fraction of the images to hold out.
        seed: seed of the hash.
        min_held_out: smallest number of images to hold out, if there are enough and the fraction is
            between 0 and 1.
        min_kept: smallest number of images to keep, if the fraction is between 0 and 1.
        contents: a text for each name, which is equal for copies. A name that it lacks is the only
            one of its image.
    """
    # The hash of the first name decides for all copies.
    first_of_content: Dict[str, str] = {}  # The first name by content
    for name in sorted(names):
        first_of_content.setdefault(contents.get(name, name), name)
    ranked = sorted((hash_fraction(seed, name), name) for name in first_of_content.values())
    count = sum(value < fraction for value, _ in ranked)
    if 0.0 < fraction < 1.0:
        count = max(min(max(count, min_held_out), len(ranked) - min_kept), 0)
    first_held_out = {name for _, name in ranked[:count]}
    held_out = {
        name for name in names if first_of_content[contents.get(name, name)] in first_held_out
    }
    return sorted(set(names) - held_out), sorted(held_out)
