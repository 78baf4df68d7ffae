"""The manifest: one row per image, the truth of the stage `fetch` about what there is to read.

Its columns are the fields of `Entry`. An image is `packed` bytes at `offset` of a file: of `member` itself in a folder;
of the archive in a zip, which is read in place, by any number of processes, without its index.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Iterable, List, Union

from pipeline.errors import RequestError
from pipeline.files import write_csv

SPLITS = ("train", "val", "test")
STORED, DEFLATED = 0, 8  # zip's own numbers
_COCO = re.compile(r"(?:COCO_(?:train|val|test)20\d\d_)?(\d{12})\.\w+")  # file names of 2014, of 2017


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

    @property
    def photograph(self) -> str:
        """What stands for the photograph wherever it is met again, to tell what a model was trained on; "": unknown.

        COCO's number, which COCO never gives twice: the same in all its years, zips and folders, and of a copy that was
        made smaller or gray. Of any other the CRC-32 and size of its file, as names such as IMG_0001.jpg say nothing:
        found again under any name, but not after it was encoded again.
        """
        numbered = _COCO.fullmatch(self.name.rpartition("/")[2])
        return str(int(numbered[1])) if numbered else f"{self.crc32}-{self.size}" if self.crc32 else ""


def sort(entries: Iterable[Entry]) -> List[Entry]:
    """By split and name: the order every later stage sees, whatever the order of files on disk."""
    return sorted(entries, key=lambda entry: (entry.split, entry.name))


def write(path: Union[str, Path], entries: Iterable[Entry]) -> None:
    """Write the manifest, sorted, atomically; the same entries give the same bytes."""
    write_csv(path, [[field.name for field in fields(Entry)], *(astuple(entry) for entry in sort(entries))])


def read(path: Union[str, Path]) -> List[Entry]:
    """Read a manifest; RequestError names the line that is wrong."""
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as stream:
            rows = list(csv.DictReader(stream))
    except OSError:
        raise RequestError(f"{path}: no manifest here; run `dvc repro fetch` first") from None
    entries = []
    for line, row in enumerate(rows, 2):
        try:
            numbers = {key: int(row[key]) for key in ("size", "offset", "packed", "method")}
            entries.append(Entry(**{**row, **numbers}))
        except (KeyError, TypeError, ValueError):
            raise RequestError(f"{path} line {line}: not a manifest row; run `dvc repro -f fetch`") from None
    return entries


def hash_share(seed: int, name: str) -> float:
    """A number in [0, 1) from a name: adding or removing other images does not move it."""
    digest = hashlib.sha256(f"{seed}\n{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def writable(*folders: Union[str, Path]) -> None:
    """Make these folders; RequestError names one that cannot be made or written to."""
    for folder in folders:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"{folder}: cannot be made: {error.strerror}; name another folder") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise RequestError(f"{folder}: cannot be written to; change its rights or name another folder")
