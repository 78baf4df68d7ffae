"""A file is written whole or not at all, by the library's way, and known by its digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Union

from superglue_sift.files import write_atomic

__all__ = ["file_sha256", "json_digest", "write_atomic"]


def file_sha256(path: Union[str, Path]) -> str:
    """Hex SHA-256 of a file. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def json_digest(values: Any) -> str:
    """16 hexadecimal digits that stand for JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
