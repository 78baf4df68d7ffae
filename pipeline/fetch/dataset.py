"""List the photographs in a manifest, from folders, zips and lists, and read them.

`fetch` writes the manifest, and every stage reads it. The photographs are split into training,
validation and test.

The manifest has one row for each image, whose columns are the fields of `Entry`. An image is
`packed` bytes at `offset` of a file. This file is `member` in a folder, or the archive for a zip.
Any number of processes read a zip in place, without its index. `source.json` contains the path of
each folder and zip.
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
# Numbers of the zip format: two methods of compression, and the header in front of a member's name.
STORED = 0
DEFLATED = 8
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
HEADER = _LOCAL_HEADER.size
MAX_IMAGE_BYTES = 1 << 29  # largest image of a zip, against zip bombs
# Names of COCO's files, with the prefix of 2014 or without one as in 2017, and of its folders and
# archives.
_COCO_FILE = re.compile(r"(COCO_(?:train|val|test)20\d\d_)?(\d{12})\.\w+")
_COCO_FOLDER = re.compile(r"(?:train|val|test|unlabeled)20\d\d")

MAX_UPSCALE = 2.0  # most view pixels per image pixel; it limits how small images may be
MAX_SIDE = 32_767  # px; cv2.warpPerspective takes images with shorter sides

SEED = 0  # seed of the hash of names, which decides the split
Splits = Dict[str, List[str]]  # names of the images by split

# Photographs of scikit-image's wheel with corners and blobs to detect, without drawings and
# screenshots. The two motorcycle frames show one scene and so share a split.
SAMPLE: Dict[str, Tuple[str, ...]] = {
    "train": (
        "astronaut.png", "hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png",
        "motorcycle_right.png", "page.png", "retina.jpg",
    ),
    "val": ("brick.png", "chelsea.png"),
    # There are at least six: intervals of fewer photographs decide nothing.
    "test": ("camera.png", "coffee.png", "coins.png", "grass.png", "gravel.png", "rocket.jpg"),
}  # fmt: skip


# --- the manifest


@dataclass(frozen=True)
class Entry:
    """One image. `name` is unique within its split and never an absolute path."""

    name: str  # relative path, with forward slashes
    split: str  # train, val or test
    container: str  # key of source.json's "containers": a folder or a zip
    member: str  # path inside the container
    size: int  # bytes of the image file
    crc32: str  # 8 hexadecimal digits; empty when the file could not be read
    offset: int = 0  # where its bytes begin in the file that holds them
    packed: int = 0  # how many bytes it takes there
    method: int = STORED


def parse_coco_number(name: str) -> str:
    """Return the number of a photograph of COCO that has this name, or "" for another name."""
    match = _COCO_FILE.fullmatch(name.rpartition("/")[2])
    # A date has twelve digits, too.
    return str(int(match[2])) if match and int(match[2]) < 1_000_000 else ""


def write_manifest(path: Path, entries: Iterable[Entry]) -> None:
    """Write the manifest atomically, sorted by split and name.

    The same entries give the same bytes.
    """
    rows = sorted(entries, key=lambda entry: (entry.split, entry.name))
    write_csv(path, [[field.name for field in fields(Entry)], *(astuple(row) for row in rows)])


def read_manifest(path: Path) -> List[Entry]:
    """Read a manifest. Raises RequestError, which names the wrong line."""
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
    """The images that `fetch` lists. It keeps no file open.

    `containers` has the path of each folder or zip by its key, which is all that `read` needs.
    `source` is `fetch.source`, or "" if it is not known.
    """

    listed: Sequence[Entry]
    containers: Dict[str, str]
    source: str = ""

    def select_entries(self, split: str) -> List[Entry]:
        """Return the entries of "train", "val" or "test", sorted by name."""
        return [entry for entry in self.listed if entry.split == split]

    def identify_photograph(self, entry: Entry) -> str:
        """Return the identifier of the photograph, by which training overlap is found.

        It is "" if it is not known. A photograph of COCO has its number, which is unique over all
        years, and so the same for smaller or gray copies. Other photographs have CRC-32 and size of
        the file. These do not depend on the name, but change if the file is encoded again.
        """
        content = f"{entry.crc32}-{entry.size}" if entry.crc32 else ""
        return (self._is_of_coco(entry) and parse_coco_number(entry.name)) or content

    def _is_of_coco(self, entry: Entry) -> bool:
        """Return whether `entry` is COCO's, if its name is: frames of a video are numbered, too.

        The source, the prefix of the name, or the folder or zip that it lies in says so.
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
        """Return the bytes of the image file. Raises BadImage if they changed since `fetch`."""
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
    """Open the folder that `fetch` wrote. Raises RequestError if it is missing or incomplete.

    Paths in source.json are relative to that folder, so a clone can be moved.
    """
    entries = read_manifest(folder / "manifest.csv")
    try:
        source = json.loads((folder / "source.json").read_text(encoding="utf-8"))
        keys = sorted({entry.container for entry in entries})
        roots = {key: str(folder / source["containers"][key]["path"]) for key in keys}
        kind = str(source.get("source", ""))
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
    return ImageSet(entries, roots, kind)


def unpack_and_check(data: bytes, entry: Entry) -> bytes:
    """Unpack the bytes of an image.

    Raises:
        BadImage: Unless its size and CRC-32 are as the entry states.
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
    """Make the entry of a file under `root`.

    An unreadable file also gets an entry, and the stage `keypoints` reports it.
    """
    try:
        data = (root / name).read_bytes()
    except OSError:
        return Entry(name, split, container, name, 0, "")
    crc32 = f"{zlib.crc32(data):08x}"
    return Entry(name, split, container, name, len(data), crc32, packed=len(data))


def find_sample_folder() -> Path:
    """Return the folder of the bundled photographs."""
    import skimage

    return Path(skimage.__file__).parent / "data"


def copy_sample(target: Path) -> List[Entry]:
    """Copy the bundled photographs into the new folder `target`.

    Returns:
        Their entries, with the splits of `SAMPLE`.
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
    """A folder or zip of images, and which of its images are meant."""

    path: Path
    names: List[str]  # names of the images, sorted, relative to it
    # What source.json says about it, such as the SHA-256 of an archive.
    facts: Dict[str, Any] = field(default_factory=dict)
    # The members of a zip by name. It is None for a folder.
    members: Optional[Dict[str, zipfile.ZipInfo]] = None

    _read: Dict[str, Entry] = field(default_factory=dict)  # entries that were read so far, by name

    @cached_property
    def contents(self) -> Dict[str, str]:
        """Return a text for the bytes of each image, by name. Copies have the same text."""
        entries = self.read_entries(self.names)
        return {e.name: f"{e.size}-{e.crc32}" if e.crc32 else e.name for e in entries}

    def read_entries(self, names: Sequence[str], split: str = "", key: str = "") -> List[Entry]:
        """Return the manifest entries of some of its images. Each image is read only once.

        `key` is the name of this container in source.json.
        """
        # The contents of all images decide the split, so they may have been read before.
        new = [name for name in names if name not in self._read]
        shown = {"total": len(new), "desc": "reading images", "unit": "image"}
        with ThreadPoolExecutor(4) as pool:  # reading and CRC-32 release the GIL
            self._read.update(zip(new, Progress(pool.map(self._read_entry, new), **shown)))
        return [replace(self._read[name], split=split, container=key) for name in names]

    def _read_entry(self, name: str) -> Entry:
        if self.members is None:
            return read_file_entry(self.path, name)
        member = self.members[name]
        with self.path.open("rb") as stream:
            stream.seek(member.header_offset)
            return make_member_entry(member, stream.read(HEADER), self.path)


def open_container(path: Union[str, Path], root: str = "") -> Container:
    """Open a folder, a .zip, a .txt list of images or a .json in COCO's annotation format.

    The names in a list or annotation file are relative to `root`, which may be a zip. If it is "",
    they are relative to the file's own folder.

    Raises:
        RequestError: If there is nothing at `path`, no image in it, or a name that leads outside.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if not path.exists():
        raise RequestError(f"{path}: no such folder, zip, list or annotation file")
    if path.is_dir():
        photos = list_photos(path)
        container = Container(path, sorted(file.relative_to(path).as_posix() for file in photos))
    elif kind == ".zip":
        container = open_zip(path)
    # A list or an annotation file names images of a folder or zip.
    elif kind in (".txt", ".json"):
        names = (
            _read_annotations(path) if kind == ".json" else [line for _, line in read_lines(path)]
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
    """Open all images of an archive, which are read in place.

    Raises:
        RequestError: If the archive is damaged or unsafe.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = archive.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise RequestError(
            f"{path}: not a whole zip archive ({error}); copy it again, or name another"
        ) from None
    members = {member.filename: member for member in select_and_check_members(found, path)}
    return Container(path, list(members), facts, members)


def _open_listed(path: Path, root: Path, names: Sequence[str]) -> Container:
    """Open the container `root` with the names that the file `path` lists.

    Programs name files without a folder, or with a folder of their own machine. Such a name is
    searched by its file name in all folders below `root`. This holds for a name without a folder,
    for a name that leads outside `root`, and for every missing name of an annotation file. A name
    that is not found in a folder is kept, and reported when it is read.
    """
    if not root.exists():
        raise RequestError(
            f"{root}: no such folder; fetch.root must hold the images that {path} lists"
        )
    # The list has all images of a zip, and as yet none of a folder.
    base = open_zip(root) if root.is_file() else Container(root, [])
    members = {_compose_accents(name): name for name in base.names}
    top = os.path.abspath(root)
    chosen = []
    missing = []
    # Look for every name in its place.
    for name in names:
        place = os.path.abspath(os.path.join(top, name))
        inside = ".." not in name.split("/") and os.path.commonpath([top, place]) == top
        relative = os.path.relpath(place, top) if inside else name.rpartition("/")[2]
        spelled = (
            members.get(_compose_accents(relative)) if members else find_spelling(root, relative)
        )
        if spelled is None:
            missing.append(relative)
        else:
            chosen.append(spelled)
    # Else take the first file of that name in a folder below.
    searched = [name for name in missing if "/" not in name or path.suffix.lower() == ".json"]
    if searched:
        whole = base if members else open_container(root)
        by_file = {
            _compose_accents(name).rpartition("/")[2]: name for name in reversed(whole.names)
        }
        found = {name: by_file.get(_compose_accents(name).rpartition("/")[2]) for name in searched}
        chosen += [place for place in found.values() if place]
        missing = [name for name in missing if not found.get(name)]
    if missing and (members or not chosen):
        more = f" (and {len(missing) - 1} more)"
        raise RequestError(f"{path}: '{missing[0]}' is not in {root}{more}; set fetch.root")
    return replace(base, names=sorted({*chosen, *missing}))


def _compose_accents(name: str) -> str:
    """Return a name in which an accented letter is one character, unlike on a Mac."""
    return unicodedata.normalize("NFC", name.replace("\\", "/"))


def _read_annotations(path: Path) -> List[str]:
    """Return the image files that a COCO annotation file names. Files of other programs work too.

    Label Studio writes backslashes, `../` and addresses of its server. LVIS writes `coco_url` in
    place of `file_name`. Programs on Windows write a byte order mark. Raises RequestError if it is
    no COCO annotation file.
    """
    try:
        content = json.loads(path.read_bytes())  # UTF-8, UTF-16 or UTF-32
        named = [image.get("file_name") or image["coco_url"] for image in content["images"]]
        names = [str(name).replace("\\", "/") for name in named]
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
    """Return the photographs among the members, sorted by name.

    Raises:
        RequestError: Which names the member, if one cannot be used. Nothing is unpacked, but names
            go to other files.
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
    """Make the entry of a member from its local header, without split and container.

    Raises:
        RequestError: If the bytes are no header.
    """
    if len(header) < HEADER or header[:4] != b"PK\x03\x04":
        raise RequestError(f"{path}: refused, no data where its directory puts '{member.filename}'")
    *_, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
    offset = member.header_offset + HEADER + name_length + extra_length
    place = (offset, member.compress_size, member.compress_type)
    name = member.filename
    return Entry(name, "", "", name, member.file_size, f"{member.CRC:08x}", *place)


# --- how large an image must be


def require_size(name: str, image_size: Size, view_size: Size) -> None:
    """Raise BadImage for an image that is too small for a view, or that OpenCV cannot warp."""
    if max(image_size) >= MAX_SIDE:
        raise BadImage(name, f"too long: {max(image_size)} px, at most {MAX_SIDE - 1}")
    smallest = [math.ceil((side - 1) / MAX_UPSCALE) + 1 for side in view_size]
    if any(side < least for side, least in zip(image_size, smallest)):
        size, needed = ("x".join(map(str, each)) for each in (image_size, smallest))
        raise BadImage(name, f"too small: {size}, a view needs {needed} pixels")


# --- the split


def hash_fraction(seed: int, name: str) -> float:
    """Return a number in [0, 1) that depends on the name and the seed alone."""
    digest = hashlib.sha256(f"{seed}\n{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def open_and_split_local(settings: FetchParams) -> Tuple[Splits, Dict[str, Container]]:
    """Split the user's own images. They are one set, of which a part is held out, or two sets.

    Returns:
        The names by split, and the containers.

    Raises:
        RequestError: If a path is wrong, or no image is left to train or to validate. Test images
            may be missing, since the evaluation then uses the val images.
    """
    # There is one set, or a second one with the held-out images.
    held = {"train": open_container(settings.path, settings.root)}
    names = held["train"].names
    contents = held["train"].contents
    held_out = None
    if settings.val_path:
        val = held["val"] = open_container(settings.val_path, settings.root)
        if Path(settings.path).resolve() == Path(settings.val_path).resolve():
            raise RequestError("fetch.val_path: is the same as fetch.path; leave it empty instead")
        # Training images that are copies of held-out ones are left out.
        copies = set(val.contents.values())
        names = [name for name in names if contents[name] not in copies]
        contents = val.contents
        held_out = val.names
    splits = split_names(names, settings, contents, held_out)
    empty = [split for split in ("train", "val") if not splits[split]]
    if empty:
        container = held.get(empty[0], held["train"])
        raise RequestError(
            f"{container.path}: {len(set(container.contents.values()))} different image(s), and"
            f" none for {' and '.join(empty)}; at least two are needed, one to train and one to"
            " validate, which is no copy: give more images, or change fetch.val_fraction and"
            " fetch.test_fraction"
        )
    return splits, held


def split_names(
    train: Sequence[str],
    settings: FetchParams,
    contents: Mapping[str, str],
    held_out: Optional[Sequence[str]] = None,
) -> Splits:
    """Split names into train, val and test.

    `held_out` has the names for val and test. If it is None, a part of `train` is held out.
    `contents` tells by name which images are equal. Each name that it lacks is an image of its own.
    """

    def different(names: Sequence[str]) -> int:
        return len({contents.get(name, name) for name in names})

    if held_out is None:
        # In a small set chance could hold out too few images. Take the fraction itself, but enough
        # images to judge by.
        count = different(train)
        at_least = max(2, min(8, count // 3), min(round(settings.val_fraction * count), 32))
        train, held_out = hold_out(train, settings.val_fraction, SEED, at_least, 1, contents)
    # Keep the names with the smallest hashes, so that a larger limit only adds names.
    train, held_out = (
        sorted(
            sorted(names, key=lambda name: hash_fraction(SEED + 2, name))[: settings.limit or None]
        )
        for names in (train, held_out)
    )
    tested = round(settings.test_fraction * different(held_out))
    least_test = max(1, min(tested, 16))
    least_val = max(1, min(different(held_out) - tested, 16))
    # With the seed of the hold-out, every held-out image would have a small hash and go to test.
    val, test = hold_out(
        held_out, settings.test_fraction, SEED + 1, least_test, least_val, contents
    )
    return {"train": train, "val": val, "test": test}


def hold_out(
    names: Sequence[str],
    fraction: float,
    seed: int,
    at_least: int = 1,
    keep: int = 1,
    contents: Mapping[str, str] = MappingProxyType({}),
) -> Tuple[List[str], List[str]]:
    """Divide the names into (kept, held out), each sorted.

    The hash of a name decides, so other images do not move it. With a fraction between 0 and 1, at
    least `keep` images are kept and, if possible, at least `at_least` are held out. Copies, by
    `contents`, go where the first of them goes, and count as one image.
    """
    # The hash of the first of equal images decides for all of them.
    first: Dict[str, str] = {}  # name of the first image with this content
    for name in sorted(names):
        first.setdefault(contents.get(name, name), name)
    ranked = sorted((hash_fraction(seed, name), name) for name in first.values())
    count = sum(value < fraction for value, _ in ranked)
    if 0.0 < fraction < 1.0:
        count = max(min(max(count, at_least), len(ranked) - keep), 0)
    chosen = {name for _, name in ranked[:count]}
    held_out = {name for name in names if first[contents.get(name, name)] in chosen}
    return sorted(set(names) - held_out), sorted(held_out)
