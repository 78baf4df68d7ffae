"""Read and write text, JSON and CSV. Files are written whole or not at all.

This module also computes digests, names files, and reads lists of names.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import hashlib
import io
import json
import math
import os
import stat
import tempfile
import threading
import unicodedata
from pathlib import Path
from typing import Any, Iterable, List, Optional, Tuple, Union

from superglue_sift.errors import RequestError

FileName = Union[str, Path]
GIB = 1 << 30
MIB = 1 << 20


def write_atomically(path: FileName, content: Union[str, bytes]) -> None:
    """Write a file, and create its folder.

    If the process is killed, the complete old or the complete new file is there. Links are followed
    (`resolve_link`), and an earlier file keeps its mode. A path that is no regular file, such as a
    pipe or a device, is opened and written.

    Args:
        path: the file.
        content: bytes, or a text that is stored as UTF-8. Names of files in the text that are not
            UTF-8 keep their bytes (surrogateescape).

    Raises:
        OSError: If the file cannot be written, such as to a full disk. It names `path`.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            Path(path).write_bytes(data)
        else:
            _write_file(resolve_link(path), data)
    except OSError as error:
        error.filename = str(path)
        raise


def _write_file(path: Path, data: bytes) -> None:
    """Write a regular file by means of a temporary one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is unique for each thread, since two threads may write the same path, such as the
    # features of a photograph and of its copy.
    temporary = path.with_name(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            # The mode comes first, so that nobody else can read the content meanwhile.
            _copy_mode(temporary, path)
            file.write(data)
        replace_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def resolve_link(path: FileName) -> Path:
    """Return the file to which a link points, or `path` itself if it is no link.

    The file need not exist. A link to a write-protected file is not followed, since DVC makes such
    links into its cache, whose files must never change.
    """
    path = Path(path)
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    is_protected = target.is_file() and not target.stat().st_mode & stat.S_IWUSR
    return path if is_protected else target


def replace_file(new: Path, path: FileName) -> None:
    """Replace a file by the complete file `new`, so that either survives a power loss.

    The mode of the file is kept. Links are followed (`resolve_link`), so `new` must be on the disk
    of the file to which the link points.

    Raises:
        OSError: If the file cannot be replaced.
    """
    target = resolve_link(path)
    _copy_mode(new, target)
    # The content must be on the disk before the rename.
    with new.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(new, target)
    try:
        folder = os.open(target.parent, os.O_RDONLY)
    except PermissionError:
        # Windows cannot open a folder, and Linux only with permission to read.
        return
    try:
        # The rename, too, must survive a power loss.
        os.fsync(folder)
    finally:
        os.close(folder)


def _copy_mode(new: Path, path: Path) -> None:
    """Give `new` the mode of the file `path`, if there is one.

    The owner may write to the new file, even if `path` is a write-protected file of DVC's cache.
    """
    # Some file systems have no modes.
    with contextlib.suppress(OSError):
        new.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)


def name_below(path: FileName, root: FileName) -> str:
    """Return the path of a file below `root`, with "/" on every system, as COLMAP and hloc do."""
    return Path(os.path.relpath(path, root)).as_posix()


def check_writable(path: FileName, named: Optional[FileName] = None) -> None:
    """Check before long work that a file can be written. Nothing is written.

    Args:
        path: the file.
        named: the file or folder that the user typed, which the message names instead of `path`.

    Raises:
        RequestError: If the file cannot be written.
    """
    try:
        folder = resolve_link(path).absolute().parent
        # Missing folders would be created in the first one that exists. On Windows even the drive
        # can be missing.
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequestError(
            f"{named or path}: cannot be written: {error.strerror}; name another"
        ) from None


def write_csv(path: FileName, rows: Iterable[Iterable[Any]]) -> None:
    """Write a table atomically (`write_atomically`).

    Args:
        path: the file.
        rows: the rows. The first one is the header.

    Raises:
        OSError: If the file cannot be written.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomically(path, text.getvalue())


def compute_file_sha256(path: FileName) -> str:
    """Compute the SHA-256 of a file as hexadecimal digits. Raises OSError if it cannot be read."""
    return compute_file_digest(path, "sha256")


def compute_file_digest(path: FileName, algorithm: str) -> str:
    """Compute a digest of a file by an algorithm of hashlib, such as "md5", as hexadecimal digits.

    Raises:
        OSError: If the file cannot be read.
    """
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(MIB), b""):
            digest.update(block)
    return digest.hexdigest()


def read_lines(path: FileName) -> List[Tuple[int, str]]:
    """Read the lines of a text file, stripped, with their numbers from 1.

    Empty lines and lines that begin with `#` are left out. The text is UTF-8, or UTF-16 with a byte
    order mark, as PowerShell writes it. Its line ends are those of any system. Names of files that
    are not UTF-8 keep their bytes (surrogateescape).

    Raises:
        RequestError: If the file is missing, or no text.
    """
    try:
        data = Path(path).read_bytes()
        is_utf16 = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        text = data.decode("utf-16") if is_utf16 else data.decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        # These bytes are no text, which the check below reports.
        text = "\0"
    if "\0" in text:
        raise RequestError(f"{path}: is not a text file; save it as text in UTF-8")
    numbered = enumerate(map(str.strip, io.StringIO(text, newline=None)), 1)
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]


def find_spelling(folder: FileName, name: str) -> Optional[str]:
    """Return how the file system spells a file below `folder`, or None if there is no such file.

    A list from another system may name a file with backslashes, or spell an accented letter as one
    character or as two (Unicode's NFC, or NFD on a Mac).
    """
    for path in (name, name.replace("\\", "/")):
        for spelling in (path, *(unicodedata.normalize(form, path) for form in ("NFC", "NFD"))):
            if os.path.lexists(os.path.join(folder, spelling)):
                return spelling
    return None


def read_json(path: Path, missing: str) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        missing: what the error says if there is no such file.

    Raises:
        RequestError: If the file is missing, or cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{path}: {missing}") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from None


def write_json(path: Path, content: Any, indent: int = 1) -> None:
    """Write indented JSON with a final newline, atomically."""
    write_atomically(path, json.dumps(content, indent=indent) + "\n")


def compute_json_digest(values: Any) -> str:
    """Compute 16 hexadecimal digits of the SHA-256 of JSON values. Keys may have any order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def format_bytes(count: float) -> str:
    """Format a number of bytes, such as "64 MiB" or "1.5 GiB"."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{math.ceil(count / MIB)} MiB"
