"""Copies of a stage's results and what they were made from, so that a stage that is run again finds that they fit.

DVC removes the outputs of a stage before it runs it, and keeps no run cache of a stage where it may not. So a copy
stays in `.dvc/tmp`, one for each stage, that of its last results. `dvc repro -f` asks to compute, and is obeyed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from pipeline.files import file_sha256, json_digest, write_atomic

RECORD = "made_from.json"
_LOGS = (".jsonl", ".cursor.json")  # of tracking; no results


def restore(folder: Path, inputs: Any) -> bool:
    """Put into `folder` what was made from these inputs (JSON values), if that was kept and is as it was written.

    False, with nothing done, when it was not, under `dvc repro -f`, and outside of `dvc repro`: by hand a command
    always does its work.
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
    """Under DVC, keep a copy of the results in `folder`, made from these inputs; it replaces the one before."""
    kept = _kept()
    if kept is None:
        return
    shutil.rmtree(kept, ignore_errors=True)
    ignored = shutil.ignore_patterns(RECORD, *(f"*{ending}" for ending in _LOGS))
    shutil.copytree(folder, kept, ignore=ignored, copy_function=shutil.copyfile)
    content = {"inputs": json_digest(inputs), "files": _files(kept)}
    write_atomic(kept / RECORD, json.dumps(content, indent=1, sort_keys=True) + "\n")


def forced() -> bool:
    """Was the stage started by `dvc repro -f` or `dvc exp run -f`? DVC tells a stage only by its own command line."""
    words = next((words for words in _commands_above() if _asks_dvc(words)), [])
    return "--force" in words or any(re.fullmatch("-[A-Za-z]*f[A-Za-z]*", word) for word in words)


def _asks_dvc(words: List[str]) -> bool:
    """`dvc ...`, `python .../bin/dvc ...` or `python -m dvc ...`."""
    return any(Path(word).name == "dvc" for word in words[:3])


def _commands_above(proc: Path = Path("/proc")) -> Iterator[List[str]]:
    """The command line of each process above this one, as words, nearest first; none where there is no /proc."""
    pid = os.getppid()
    while pid > 0:
        try:
            words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
            stat = (proc / str(pid) / "stat").read_text()
        except OSError:  # it has ended, or is another's
            return
        yield [os.fsdecode(word) for word in words]
        pid = int(stat.rpartition(")")[2].split()[1])


def _kept() -> Optional[Path]:
    """Where the results of the stage that DVC runs are kept; None outside of DVC."""
    stage, root = os.environ.get("DVC_STAGE"), os.environ.get("DVC_ROOT")
    return Path(root) / ".dvc" / "tmp" / "made_from" / stage if stage and root else None


def _files(folder: Path) -> Dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): file_sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != RECORD and not path.name.endswith(_LOGS)
    }
