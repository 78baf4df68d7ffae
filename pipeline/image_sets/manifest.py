"""The manifest of the stage `fetch`: one row per image.

Its columns are the fields of `Entry`. An image is `packed` bytes at `offset` of a file: of `member`
in a folder, of the archive for a zip. Any number of processes read a zip in place, without its
index.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Iterable, List

from pipeline.errors import RequestError
from pipeline.files import write_csv

SPLITS = ("train", "val", "test")
# zip's own numbers
STORED = 0
DEFLATED = 8
# File names of 2014, of 2017
_COCO = re.compile(r"(?:COCO_(?:train|val|test)20\d\d_)?(\d{12})\.\w+")


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
        """Identifier of the photograph, to recognize what a model was trained on; "": unknown.

        For COCO its number, which is unique over all years, and so the same for smaller or gray
        copies. For others CRC-32 and size of the file, which do not depend on its name but change
        when it is encoded again.
        """
        numbered = _COCO.fullmatch(self.name.rpartition("/")[2])
        if numbered and int(numbered[1]) < 1_000_000:  # dates have twelve digits, too
            return str(int(numbered[1]))
        return f"{self.crc32}-{self.size}" if self.crc32 else ""


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Write the manifest atomically, sorted by split and name; the same entries give the same
    bytes.
    """
    rows = sorted(entries, key=lambda entry: (entry.split, entry.name))
    write_csv(path, [[field.name for field in fields(Entry)], *map(astuple, rows)])


def read(path: Path) -> List[Entry]:
    """Read a manifest. Raises RequestError naming the line that is wrong."""
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
            raise RequestError(
                f"{path} line {line}: not a manifest row; run `dvc repro -f fetch`"
            ) from None
    if not entries:
        raise RequestError(f"{path}: lists no image; run `dvc repro -f fetch`")
    return entries


def hash_fraction(seed: int, name: str) -> float:
    """A number in [0, 1) from a name, which does not depend on other images."""
    digest = hashlib.sha256(f"{seed}\n{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def writable(*folders: Path) -> None:
    """Create these folders. Raises RequestError for one that cannot be created or written to."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"{folder}: cannot be created: {error.strerror}; name another folder"
            ) from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise RequestError(
                f"{folder}: cannot be written to; change its rights or name another folder"
            )
