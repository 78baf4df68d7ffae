"""Read and write text, JSON and CSV. Files are written whole or not at all.

This module also computes digests, names files, and reads lists of names.
"""

from __future__ import annotations

import codecs
import csv
import errno
import hashlib
import io
import json
import math
import os
import tempfile
import threading
import time
import unicodedata
from pathlib import Path
from typing import Any, Iterable, List, Optional, Tuple, Union

from superglue_sift.errors import RequestError

FileName = Union[str, Path]
GIB = 1 << 30
MIB = 1 << 20
TRIES = 5  # Windows refuses to replace a file that another program has open, so try again


def write_atomic(path: FileName, content: Union[str, bytes]) -> None:
    """Write `content` to `path`, and create its folder. Text is stored as UTF-8.

    If the process is killed, the complete old or the complete new file is there. Names of files in
    a text that are not UTF-8 keep their bytes (surrogateescape). Raises OSError that names `path`,
    such as for a full disk.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    # The name is unique for each thread, since two threads may write the same path, such as the
    # features of a photograph and of its copy.
    temporary = path.with_name(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            # The content must be on the disk before the rename.
            os.fsync(stream.fileno())
        _replace(temporary, path)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    try:
        directory = os.open(path.parent, os.O_RDONLY)
    except PermissionError:  # Windows opens no folder, and Linux none without permission to read
        return
    try:
        os.fsync(directory)  # the rename, too, must survive a power loss
    finally:
        os.close(directory)


def _replace(temporary: Path, path: Path) -> None:
    """Rename a file, in several tries on Windows.

    Windows refuses while another program or thread reads the old file.
    """
    for attempt in range(TRIES):
        try:
            os.replace(temporary, path)
        except PermissionError:
            if attempt + 1 == TRIES:
                raise
            time.sleep(0.1)
        else:
            return


def name_below(path: FileName, root: FileName) -> str:
    """Name a file by its path below `root`, with "/" on every system, as COLMAP and hloc do."""
    return Path(os.path.relpath(path, root)).as_posix()


def check_writable(path: FileName, named: Optional[FileName] = None) -> None:
    """Raise RequestError if `path` could not be written. Call it before long work. It writes
    nothing.

    named: the file or folder that the user gave, which the message names instead of `path`.
    """
    folder = Path(path).absolute().parent
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Find the folder that exists, and in which the others would be made.
        while not folder.exists() and folder != folder.parent:  # even a drive can be missing
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequestError(
            f"{named or path}: cannot be written: {error.strerror}; name another"
        ) from None


def write_csv(path: FileName, rows: Iterable[Iterable[Any]]) -> None:
    """Write a table atomically. The first row is the header. Raises OSError as `write_atomic`."""
    # The whole table is made in memory, so that it appears whole.
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomic(path, text.getvalue())


def file_sha256(path: FileName) -> str:
    """Compute the hex SHA-256 of a file. Raises OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def read_lines(path: FileName) -> List[Tuple[int, str]]:
    """Read the lines of a text file, stripped, with their numbers from 1.

    Empty lines and those that begin with `#` are left out. UTF-8 is read, UTF-16 with a byte order
    mark (as PowerShell writes it), and line ends of any system. Names of files that are not UTF-8
    keep their bytes (surrogateescape). Raises RequestError for a file that is missing or no text.
    """
    try:
        data = Path(path).read_bytes()
        # Names that are no UTF-8 keep their bytes. UTF-16 is known by its mark.
        is_wide = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        text = data.decode("utf-16") if is_wide else data.decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:  # the file is no text
        text = "\0"
    if "\0" in text:
        raise RequestError(f"{path}: is not a text file; save it as text in UTF-8")
    numbered = enumerate(map(str.strip, io.StringIO(text, newline=None)), 1)
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]


def spelled_as_file(folder: FileName, name: str) -> Optional[str]:
    """Return `name` as a file below `folder` spells it, or None if there is no such file.

    Lists from another system name a file with backslashes, or spell an accented letter as one
    character or as two (Unicode NFC, and NFD on a Mac).
    """
    for path in (name, name.replace("\\", "/")):
        # Try the spelling as it is, then both forms of accented letters.
        for form in (path, *(unicodedata.normalize(kind, path) for kind in ("NFC", "NFD"))):
            if os.path.lexists(os.path.join(folder, form)):
                return form
    return None


def read_json(path: Path, missing: str) -> Any:
    """Read a JSON file. Raises RequestError, with the text `missing` if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{path}: {missing}") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from None


def write_json(path: Path, content: Any, indent: int = 1) -> None:
    """Write indented JSON with a final newline, atomically."""
    write_atomic(path, json.dumps(content, indent=indent) + "\n")


def json_digest(values: Any) -> str:
    """Return a digest (16 hexadecimal digits) of JSON values, the same for any order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def format_bytes(count: float) -> str:
    """Return bytes as text, such as "64 MiB" or "1.5 GiB"."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{math.ceil(count / MIB)} MiB"
