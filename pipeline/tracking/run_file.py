"""reports/run.json: which MLflow run belongs to which training, on this machine.

Another file in every clone and after every training, so neither git nor DVC keeps it. A training is named by the
identity that its checkpoints and models carry: figures find their run also after `dvc checkout` of an older model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Optional

from pipeline.files import write_atomic

NAME = "run.json"
_NEEDED = ("key", "run_id", "experiment")


def remember(path: Path, training: str, run: Dict[str, Any]) -> None:
    """Note the newest run of a training: `key`, `run_id`, `experiment`, `tracking_uri`, and `log` beside `path`."""
    runs = _read(path).get("runs", {})
    runs[training] = run
    write_atomic(path, json.dumps({"latest": training, "runs": runs}, indent=2) + "\n")


def recall(path: Path, training: Optional[str] = None) -> Optional[Dict[str, Any]]:
    """The run of a training, or of the latest one; None where there is no file or it names none."""
    content = _read(path)
    found = content.get("runs", {}).get(content.get("latest") if training is None else training)
    return found if isinstance(found, dict) and all(key in found for key in _NEEDED) else None


def _read(path: Path) -> Dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("runs"), dict) else {}
