"""Read and write text, JSON and CSV. Files are written whole or not at all.

This module also computes digests, names files, and reads lists of names.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import errno
import hashlib
import io
import json
import math
import os
import stat
import sys
import tempfile
import threading
import time
import unicodedata
from pathlib import Path
from typing import Any, BinaryIO, Iterable, List, Optional, Tuple, Union

from superglue_sift.errors import RequestError

FileName = Union[str, Path]
GIB = 1 << 30
MIB = 1 << 20
TRIES = 5  # Windows refuses to replace a file that another program has open, so try again


def write_atomic(path: FileName, content: Union[str, bytes]) -> None:
    """Write `content` to `path`, and create its folder. Text is stored as UTF-8.

    If the process is killed, the complete old or the complete new file is there. Links are followed
    (`real_path`), and an earlier file keeps its mode and owner. A pipe, a device and the output of
    this process are written into. Names of files in a text that are not UTF-8 keep their bytes
    (surrogateescape). Raises OSError that names `path`, such as for a full disk.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    try:
        stream = _open_stream(path)
        if stream is not None:
            with stream:
                stream.write(data)
            return
        _write_file(real_path(path), data)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _write_file(path: Path, data: bytes) -> None:
    """Write a plain file by way of a temporary one. Raises OSError that names `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is unique for each thread, since two threads may write the same path, such as the
    # features of a photograph and of its copy.
    temporary = path.with_name(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            _keep_mode(temporary, path)  # now, so that nobody else can read the content meanwhile
            file.write(data)
        replace_file(temporary, path)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def real_path(path: FileName) -> Path:
    """Return the file that a link stands for, or `path` itself if it is no link.

    The file need not exist. A link to a write-protected file is not followed, since such are the
    links of DVC into its cache, whose files must never change. Raises OSError for a ring of links.
    """
    path = Path(path)
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    is_protected = target.is_file() and not target.stat().st_mode & stat.S_IWUSR
    return path if is_protected else target


def replace_file(new: Path, path: FileName) -> None:
    """Let the complete file `new` take the place of `path`, which keeps its mode and owner.

    Links are followed (`real_path`), so `new` must be on the disk of the real file. Both survive a
    power loss. Raises OSError.
    """
    target = real_path(path)
    _keep_mode(new, target)
    # The content must be on the disk before the rename.
    with new.open("rb+") as file:
        os.fsync(file.fileno())
    _rename(new, target)
    try:
        folder = os.open(target.parent, os.O_RDONLY)
    except PermissionError:  # Windows opens no folder, and Linux none without permission to read
        return
    try:
        os.fsync(folder)  # the rename, too, must survive a power loss
    finally:
        os.close(folder)


def _keep_mode(new: Path, path: Path) -> None:
    """Give `new` the mode and the owner of the file `path`, if there is one, as far as possible.

    The owner may write, since a write-protected file of DVC's cache is replaced by one of the user.
    """
    # A disk of another system may have no modes, and only root changes the owner.
    with contextlib.suppress(OSError):
        old = path.stat()
        for owner in ((old.st_uid, -1), (-1, old.st_gid)) if hasattr(os, "chown") else ():
            with contextlib.suppress(PermissionError):
                os.chown(new, *owner)
        new.chmod(stat.S_IMODE(old.st_mode) | stat.S_IWUSR)


def _open_stream(path: FileName) -> Optional[BinaryIO]:
    """Open what cannot be replaced: a pipe, a device, and the output of this process.

    Returns None for a plain file and for a missing one. Raises OSError, also for a folder.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    # /dev/stdout may be a plain file. If it was replaced, later output would be lost.
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(number), status):
                sys.stdout.flush()
                return open(os.dup(number), "wb")
    return None if stat.S_ISREG(status.st_mode) else open(path, "wb")


def _rename(temporary: Path, path: Path) -> None:
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
    """Raise RequestError if `path` could not be written. This writes nothing.

    Call it before long work.

    Args:
        named: the file or folder that the user gave, which the message names instead of `path`.
    """
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if Path(path).exists() and not Path(path).is_file():  # a pipe or a device
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        folder = real_path(path).absolute().parent
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
