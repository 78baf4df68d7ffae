"""What a folder of results was made from, so that a stage that is run again finds that they fit."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict

from pipeline.files import write_atomic

RECORD = "made_from.json"
_LOGS = ".jsonl"  # of tracking; no result


def fits(folder: Path, inputs: Any) -> bool:
    """Were the results in `folder` made from these inputs (JSON values), and is every file as it was written?"""
    record = _read(folder)
    return bool(record) and record["inputs"] == _digest(inputs) and record["files"] == _files(folder)


def clear(folder: Path) -> None:
    """Remove the results that the record names: another set may have fewer."""
    for name in _read(folder).get("files", {}):
        (folder / name).unlink(missing_ok=True)


def write(folder: Path, inputs: Any) -> None:
    """Record what all files in `folder` were made from."""
    content = {"inputs": _digest(inputs), "files": _files(folder)}
    write_atomic(folder / RECORD, json.dumps(content, indent=1, sort_keys=True) + "\n")


def under_dvc() -> bool:
    """Is this a stage of `dvc repro`? By hand a command always does its work."""
    return "DVC_STAGE" in os.environ


def _read(folder: Path) -> Dict[str, Any]:
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return {"inputs": content["inputs"], "files": dict(content["files"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _digest(inputs: Any) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _files(folder: Path) -> Dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != RECORD and path.suffix != _LOGS
    }
