"""A file is written whole or not at all, by the library's way, and known by its digest, as JSON values are."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from superglue_sift.files import file_sha256, write_atomic, write_csv

__all__ = ["file_sha256", "json_digest", "write_atomic", "write_csv"]


def json_digest(values: Any) -> str:
    """16 hexadecimal digits that stand for JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
