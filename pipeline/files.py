"""Atomic writes, JSON files, and digests of files and JSON values."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from pipeline.errors import RequestError
from superglue_sift.files import file_sha256, write_atomic, write_csv  # noqa: F401

GIB = 1 << 30
MIB = 1 << 20


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
