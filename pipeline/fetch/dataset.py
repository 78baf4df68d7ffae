"""List the photographs in a manifest, from folders, zips and lists, and read them.

`fetch` writes the manifest, and later stages read it. The photographs are split into training,
validation and test.

The manifest has one row for each image, whose columns are the fields of `Entry`. An image takes
`packed` bytes at `offset` of a file. In a folder this file is `member`, and in a zip it is the zip
itself. Thus any number of processes can read a zip in place. `zipfile` would read the directory in
each of them, which takes 2 s and 67 MiB for train2017. `source.json` has the path of each folder
and zip.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from pipeline.errors import RequestError
from pipeline.params import FetchParams
from superglue_sift.features.images import BadImage
from superglue_sift.features.photo_folder import EXTENSIONS, is_photo, list_photos
from superglue_sift.files import find_spelling, read_json, read_lines, write_csv
from superglue_sift.progress import Progress

SPLITS = ("train", "val", "test")
# The header of a zip before the name of a member
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
HEADER = _LOCAL_HEADER.size
# Names of COCO's files, with the prefix of 2014 or without one as in 2017, and of its folders and
# archives.
_COCO_FILE = re.compile(r"(COCO_(?:train|val|test)20\d\d_)?(\d{12})\.\w+")
_COCO_FOLDER = re.compile(r"(?:train|val|test|unlabeled)20\d\d")

SEED = 0  # Seed of the hash of names, which decides the split
FEW_HELD_OUT = 12  # Least number of images to hold out of 24 or more: six to validate, six to test
FEW_TESTED = 16  # Least number to validate and to test, of enough held-out images
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
        method: how it is compressed there, `zipfile.ZIP_STORED` or `ZIP_DEFLATED`.
    """

    name: str
    split: str
    container: str
    member: str
    size: int
    crc32: str
    offset: int = 0
    packed: int = 0
    method: int = zipfile.ZIP_STORED


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
        RequestError: If there is no manifest.
    """
    try:
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as stream:
            rows = list(csv.DictReader(stream))
    except FileNotFoundError:
        raise RequestError(f"{path}: no manifest here; run `dvc repro fetch` first") from None
    numbers = ("size", "offset", "packed", "method")
    return [Entry(**{**row, **{key: int(row[key]) for key in numbers}}) for row in rows]


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
    content = read_json(folder / "source.json", "missing; run `dvc repro -f fetch`")
    keys = sorted({entry.container for entry in entries})
    roots = {key: str(folder / content["containers"][key]["path"]) for key in keys}
    for root in roots.values():
        if not os.path.exists(root):
            raise RequestError(
                f"{os.path.normpath(root)}: no images there; `dvc repro -f -s fetch` finds or"
                " downloads them"
            )
    return ImageSet(entries, roots, content["source"])


def unpack_and_check(data: bytes, entry: Entry) -> bytes:
    """Return the bytes of an image file from the bytes that its container holds.

    Args:
        data: the bytes in the container, which may be compressed.
        entry: the entry of the image.

    Raises:
        BadImage: If the size or the CRC-32 is not what the entry states.
    """
    if entry.method == zipfile.ZIP_DEFLATED:
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
    # Tables and pages have text only, so a name that is not UTF-8 is escaped, as in caf\xe9.jpg.
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    try:
        data = (root / name).read_bytes()
    except OSError:
        return Entry(text, split, container, name, 0, "")
    crc32 = f"{zlib.crc32(data):08x}"
    return Entry(text, split, container, name, len(data), crc32, packed=len(data))


def find_sample_folder() -> Path:
    """Return the folder of scikit-image that has the bundled photographs."""
    import skimage

    return Path(skimage.__file__).parent / "data"


def copy_sample(target: Path) -> List[Entry]:
    """Copy the bundled photographs into the folder `target`.

    Returns:
        The entries of the photographs, with the splits of SAMPLE.
    """
    target.mkdir(parents=True, exist_ok=True)
    entries = []
    for split, names in SAMPLE.items():
        for name in names:
            (target / name).unlink(missing_ok=True)  # It may be a link to DVC's cache
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
        members: the members of a zip by name. It is None for a folder.
    """

    path: Path
    names: List[str]
    members: Optional[Dict[str, zipfile.ZipInfo]] = None

    _entries: Dict[str, Entry] = field(default_factory=dict)  # Read so far, by name

    @cached_property
    def contents(self) -> Dict[str, str]:
        """Return a text for the content of each image, by name. Copies have the same text."""
        entries = self.read_entries(self.names)
        return {
            name: f"{entry.size}-{entry.crc32}" if entry.crc32 else name
            for name, entry in zip(self.names, entries)
        }

    def read_entries(self, names: Sequence[str], split: str = "", key: str = "") -> List[Entry]:
        """Read images, and return their entries. Each image is read only once.

        Args:
            names: names of the images.
            split: "train", "val" or "test", or "" if it is not decided.
            key: the key of this container in source.json, or "" if it is not decided.
        """
        # The contents of images decide the split, so some images have been read for it.
        unread = [name for name in names if name not in self._entries]
        progress_options = {"total": len(unread), "desc": "reading images", "unit": "image"}
        with ThreadPoolExecutor(4) as pool:  # Reading and CRC-32 release the GIL
            self._entries.update(
                zip(unread, Progress(pool.map(self._read_entry, unread), **progress_options))
            )
        return [replace(self._entries[name], split=split, container=key) for name in names]

    def _read_entry(self, name: str) -> Entry:
        if self.members is None:
            return read_file_entry(self.path, name)
        member = self.members[name]
        with self.path.open("rb") as stream:
            stream.seek(member.header_offset)
            return make_member_entry(member, stream.read(HEADER))


def open_container(path: Union[str, Path], root: str = "") -> Container:
    """Open a folder, a .zip, a .txt list of images or a .json in COCO's annotation format.

    Args:
        path: the folder or file.
        root: folder or zip to which the names in a list or annotation file are relative. If it is
            "", this is the folder of that file.

    Raises:
        RequestError: If there is nothing at `path`, or no image in it.
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
    elif suffix == ".txt":
        names = [line for _, line in read_lines(path)]
        container = _open_listed(path, Path(root or path.parent), names)
    elif suffix == ".json":
        # The bytes may be UTF-8 or UTF-16.
        names = [image["file_name"] for image in json.loads(path.read_bytes())["images"]]
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


def open_zip(path: Path) -> Container:
    """Open a zip with all of its images, which are read in place.

    Raises:
        RequestError: If it is no whole zip.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = select_image_members(archive.infolist())
    except zipfile.BadZipFile as error:
        raise RequestError(f"{path}: not a whole zip: {error}") from None
    return Container(path, list(members), members)


def select_image_members(members: Iterable[zipfile.ZipInfo]) -> Dict[str, zipfile.ZipInfo]:
    """Return the members of a zip that are images, by name, sorted."""
    images = [member for member in members if is_photo(member.filename)]
    return {image.filename: image for image in sorted(images, key=lambda image: image.filename)}


def _open_listed(path: Path, root: Path, names: Sequence[str]) -> Container:
    """Open the folder or zip `root` with the images `names`, which the file `path` lists.

    A file that is missing in a folder is reported as a bad image when it is read.
    """
    if root.is_file():
        container = open_zip(root)
        present = set(names).intersection(container.names)
        missing = set(names) - present
    else:
        container = Container(root, [])
        spellings = {name: find_spelling(root, name) for name in names}
        present = set(filter(None, spellings.values()))
        missing = {name for name, spelling in spellings.items() if not spelling}
    if missing and (container.members or not present):
        raise RequestError(
            f"{path}: {len(missing)} of {len(names)} images are not in {root}, such as"
            f" '{min(missing)}'; set fetch.root"
        )
    return replace(container, names=sorted(present | missing))


def make_member_entry(member: zipfile.ZipInfo, header: bytes) -> Entry:
    """Make the entry of a member of a zip, without split and container.

    Args:
        member: what the directory of the zip says about it.
        header: the bytes at the offset of the member, at least HEADER.
    """
    *_, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
    offset = member.header_offset + HEADER + name_length + extra_length
    position = (offset, member.compress_size, member.compress_type)
    name = member.filename
    return Entry(name, "", "", name, member.file_size, f"{member.CRC:08x}", *position)


# --- the split


def hash_fraction(seed: int, name: str) -> float:
    """Return a number in [0, 1) that depends on the name and the seed alone."""
    digest = hashlib.sha256(f"{seed}\n{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def list_local_images(settings: FetchParams) -> Tuple[List[Entry], Dict[str, Container]]:
    """List and split the user's own images.

    They are one set, of which a part is held out, or two sets (`fetch.val_path`).

    Returns:
        The entries of all images, and the containers by their key in source.json.

    Raises:
        RequestError: If a path is wrong, or if no image is left to train or to validate.
    """
    containers = {"train": open_container(settings.path, settings.root)}
    names = containers["train"].names
    contents = containers["train"].contents
    held_out = None
    if settings.val_path:
        containers["val"] = open_container(settings.val_path, settings.root)
        # Leave out training images that are copies of held-out ones.
        copies = set(containers["val"].contents.values())
        names = [name for name in names if contents[name] not in copies]
        contents = containers["val"].contents
        held_out = containers["val"].names
    splits = split_names(names, settings, contents, held_out)
    return make_entries(splits, containers), containers


def make_entries(splits: Splits, containers: Mapping[str, Container]) -> List[Entry]:
    """Make the entries of all images.

    Args:
        splits: the names of the images by split.
        containers: the containers by their key in source.json. Val and test have one container,
            which is that of train if there is no key "val".

    Raises:
        RequestError: If there is no image to train or to validate. Test images may be missing,
            since the evaluation then uses the val images.
    """
    for split in ("train", "val"):
        if not splits[split]:
            raise RequestError(
                f"{containers.get(split, containers['train']).path}: no image is left for {split};"
                " give more images that are no copies, or change fetch.val_fraction"
            )
    entries = []
    for split, names in splits.items():
        key = "val" if split != "train" and "val" in containers else "train"
        entries += containers[key].read_entries(names, split, key)
    return entries


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
        # Chance could hold out too few images of a small set to judge by.
        count = count_different_images(train)
        expected = round(settings.val_fraction * count)
        minimum = max(min(FEW_HELD_OUT, count // 2), min(expected, 2 * FEW_TESTED))
        train, held_out = hold_out(train, settings.val_fraction, SEED, (1, minimum), contents)
    # Keep the names with the smallest hashes, so that a larger limit only adds names.
    train, held_out = (
        sorted(
            sorted(names, key=lambda name: hash_fraction(SEED + 2, name))[: settings.limit or None]
        )
        for names in (train, held_out)
    )
    count = count_different_images(held_out)
    expected = round(count / 2)
    minima = (max(1, min(count - expected, FEW_TESTED)), max(1, min(expected, FEW_TESTED)))
    # The seed is another one, because by the seed above all held-out images have small hashes, and
    # would all go to test.
    val, test = hold_out(held_out, 0.5, SEED + 1, minima, contents)
    return {"train": train, "val": val, "test": test}


def hold_out(
    names: Sequence[str],
    fraction: float,
    seed: int,
    minima: Tuple[int, int] = (1, 1),
    contents: Mapping[str, str] = MappingProxyType({}),
) -> Tuple[List[str], List[str]]:
    """Divide the names into those to keep and those to hold out, each sorted.

    An image is held out if the hash of its name is below the fraction. If a part then has fewer
    images than its minimum, it gets those whose hashes come next. Copies go where the first of them
    goes, and count as one image.

    Args:
        names: the names to divide.
        fraction: about the fraction of the images to hold out.
        seed: seed of the hash.
        minima: smallest numbers of images to keep and to hold out, if the fraction is between 0 and
            1. The first one comes first.
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
        count = max(min(max(count, minima[1]), len(ranked) - minima[0]), 0)
    first_held_out = {name for _, name in ranked[:count]}
    held_out = {
        name for name in names if first_of_content[contents.get(name, name)] in first_held_out
    }
    return sorted(set(names) - held_out), sorted(held_out)
