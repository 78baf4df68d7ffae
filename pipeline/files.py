"""A file is written whole or not at all, by the library's way, and known by its digest, as JSON values are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline.errors import RequestError
from superglue_sift.files import file_sha256, write_atomic, write_csv

__all__ = ["file_sha256", "json_digest", "read_json", "write_atomic", "write_csv"]


def read_json(path: Path, missing: str) -> Any:
    """What a JSON file holds. Raises RequestError, which says `missing` where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{path}: {missing}") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from None


def json_digest(values: Any) -> str:
    """16 hexadecimal digits that stand for JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
