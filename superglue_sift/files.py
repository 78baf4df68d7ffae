"""A file is written whole or not at all, and known by its SHA-256."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import threading
import zlib
from pathlib import Path
from typing import Any, Callable, Iterable, Union
from zipfile import BadZipFile

DAMAGED = (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error)  # what reading a torn `.npz` raises


def nothing(moment: str) -> None:
    """What is done at each moment of a write, unless a test of faults asks for more."""


def write_atomic(path: Union[str, Path], content: Union[str, bytes], at: Callable[[str], object] = nothing) -> None:
    """Put `content` at `path`, making its folder, so that a kill leaves the old file or the new one, never a half.

    Text is stored as UTF-8; file names that are none keep their bytes (surrogateescape). `at` is
    called with "tmp", "fsync" and "replace", each before the moment of that name. Raises OSError (a full disk).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    # of this thread: two may write what has one content, such as the features of a photograph and of its copy
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as stream:
            at("tmp")
            stream.write(data)
            stream.flush()
            at("fsync")
            os.fsync(stream.fileno())
        at("replace")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name too, not only the bytes, outlives a loss of power
    finally:
        os.close(directory)


def write_csv(path: Union[str, Path], rows: Iterable[Iterable[Any]]) -> None:
    """`write_atomic` of a table; the first row is its head."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomic(path, text.getvalue())


def file_sha256(path: Union[str, Path]) -> str:
    """Hex SHA-256 of a file. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
