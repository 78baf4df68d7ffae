"""Copies of a stage's last results with a digest of their inputs, so that a stage need not compute them again.

DVC removes the outputs of a stage before it runs the stage, and does not always keep a run cache. So `.dvc/tmp` keeps a
copy of the last results of each stage. `dvc repro -f` ignores it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import psutil

from pipeline.files import file_sha256, json_digest, write_atomic

RECORD = "made_from.json"
_LOGS = (".jsonl", ".cursor.json")  # of tracking; no results


def restore(folder: Path, inputs: Any) -> bool:
    """Copy the kept results of these inputs (JSON values) into `folder`, if there are any and they are unchanged.

    Returns False without any, under `dvc repro -f`, and outside of `dvc repro`: a command run by hand always computes.
    """
    kept = None if forced() else _kept()
    try:
        record = json.loads((kept / RECORD).read_text(encoding="utf-8")) if kept else None
    except (OSError, ValueError):
        return False
    if not kept or record != {"inputs": json_digest(inputs), "files": _files(kept)}:
        return False
    ignored = shutil.ignore_patterns(RECORD)
    shutil.copytree(kept, folder, ignore=ignored, copy_function=shutil.copyfile, dirs_exist_ok=True)
    return True


def keep(folder: Path, inputs: Any) -> None:
    """Under DVC, keep a copy of the results of these inputs in `folder`; it replaces the previous one."""
    kept = _kept()
    if kept is None:
        return
    shutil.rmtree(kept, ignore_errors=True)
    ignored = shutil.ignore_patterns(RECORD, *(f"*{ending}" for ending in _LOGS))
    shutil.copytree(folder, kept, ignore=ignored, copy_function=shutil.copyfile)
    content = {"inputs": json_digest(inputs), "files": _files(kept)}
    write_atomic(kept / RECORD, json.dumps(content, indent=1, sort_keys=True) + "\n")


def forced() -> bool:
    """Whether `dvc repro -f` or `dvc exp run -f` started the stage; only DVC's command line shows it."""
    # `dvc ...`, `python .../bin/dvc ...` or `python -m dvc ...`
    words = next((words for words in _commands_above() if any(Path(word).name == "dvc" for word in words[:3])), [])
    return "--force" in words or any(re.fullmatch("-[A-Za-z]*f[A-Za-z]*", word) for word in words)


def _commands_above() -> Iterator[List[str]]:
    """The command line of each ancestor process, as words, nearest first."""
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            yield process.cmdline()


def _kept() -> Optional[Path]:
    """Folder of the kept results of the stage that DVC runs; None outside of DVC."""
    stage, root = os.environ.get("DVC_STAGE"), os.environ.get("DVC_ROOT")
    return Path(root) / ".dvc" / "tmp" / "made_from" / stage if stage and root else None


def _files(folder: Path) -> Dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): file_sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != RECORD and not path.name.endswith(_LOGS)
    }
