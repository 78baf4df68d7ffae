"""A file is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Callable, Union


def _nothing(moment: str) -> None:
    """What is done at each moment of a write, unless a test of faults asks for more."""


def write_atomic(
    path: Union[str, Path], content: Union[str, bytes], at: Callable[[str], object] = _nothing
) -> None:
    """Put `content` at `path`, making its folder, so that a kill leaves the old file or the new one, never a half.

    Text is stored as UTF-8; file names that are none keep their bytes (surrogateescape). `at` is called with
    "tmp", "fsync" and "replace", each before the moment of that name. Raises OSError (a full disk), and then leaves
    no half file behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
