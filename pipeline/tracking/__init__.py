"""Tracking of runs, from rank 0; it never blocks or ends the work.

A stage opens a run here and writes to its local log (`run`, `run_log`). A thread (`shipper`, `uploads`) sends the log
to MLflow (`mlflow_store`). `matcher_model` is the registered model, `champion` compares it with the best so far,
`system_metrics` samples the machine.
"""

from __future__ import annotations

import getpass
import os
import time
import uuid
from pathlib import Path
from typing import Any, Dict, List, Optional

from pipeline.parameters.schema import flatten
from pipeline.provenance import repro
from pipeline.tracking.mlflow_store import MlflowStore
from pipeline.tracking.run import (
    EVALUATION,
    HEADLINE,
    HIDDEN,
    LEADING,
    RUN_ID,
    NullRun,
    Run,
    ending,
    process_tags,
    redacted,
)  # fmt: skip
from pipeline.tracking.run_log import RUN_FILE, Event, EventLog, now_ms, recall_run, remember_run
from pipeline.tracking.shipper import LogQueue

__all__ = [
    "EVALUATION", "HEADLINE", "HIDDEN", "LEADING", "RUN_ID", "NullRun", "Run", "attach", "ending", "known_run",
    "open_run", "send_pending", "tracking_uri",
]  # fmt: skip

EXPERIMENT = "superglue-sift"
MACHINE = ("version.", "image.", "host", "platform", "gpus")  # prefixes of provenance that become parameters of the run
LOCAL = "local-"  # prefix of the key of a run without an MLflow id


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, else `mlflow.db` in the user's clone (also from a DVC experiment's copy)."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{repro.main_root() / 'mlflow.db'}"


def open_run(
    reports_dir: Any,
    params: Dict[str, Any],
    tags: Optional[Dict[str, Any]] = None,
    resume_run_id: Optional[str] = None,
    enabled: bool = True,
    system_metrics: bool = True,
    training: str = "",
    noted_in: Any = None,
    name: str = "",
) -> NullRun:
    """Open a run, or continue an interrupted one.

    `reports_dir` gets `log.jsonl` and its cursor. The file `noted_in` (default: run.json there) names the run of this
    `training` for `attach` and `known_run`. The run's name is `name`, or the time. `params` may be nested:
    {"train": {"lr": 1}} becomes `train.lr`. `resume_run_id` is `.run_id` of the interrupted process. With
    `enabled=False` (every rank but the first) it does nothing.
    """
    if not enabled:
        return NullRun()
    folder, uri = Path(reports_dir), tracking_uri()
    noted = folder / RUN_FILE if noted_in is None else Path(noted_in)
    log = EventLog(folder / "log.jsonl")
    header = log.header()
    ids = (header.get("run"), header.get("run_id"), log.cursor().get("run_id"))
    if not resume_run_id or resume_run_id not in ids:
        _set_aside(log)
        header = _header(uri, params, tags or {}, resume_run_id, name)
        log.append(header)
    else:
        log.append({"tags": _tags(tags or {}, repro.provenance()), "resumed": True, "time": now_ms()})

    def note(run_id: Optional[str]) -> None:
        """Write the file that names the run, with the store's address without password."""
        kept = {name: header.get(name, "") for name in ("experiment", "name")}
        place = {"tracking_uri": redacted(header["tracking_uri"]), "log": os.path.relpath(log.path, noted.parent)}
        remember_run(noted, training, {"key": header["run"], "run_id": run_id, **kept, **place})

    queue = LogQueue(log, uri, opened=note)
    note(queue.run_id or header.get("run_id"))
    run = Run(queue, [queue, *_leftovers(folder, uri)], lambda: MlflowStore(uri))
    if system_metrics:
        run.sample_system()
    return run


def known_run(noted_in: Any, training: str) -> Optional[str]:
    """`resume_run_id` of a resumed training; None if its run is unknown (another clone or machine)."""
    known = recall_run(Path(noted_in), training)
    return (known["run_id"] or known["key"]) if known else None


def attach(noted_in: Any, reports_dir: Any = None, training: Optional[str] = None) -> NullRun:
    """Continue the run named in `noted_in` from another stage; without one return a run that does nothing.

    `training`: identity of the training that the metrics belong to; None: the latest. The log is `attached.jsonl` in
    `reports_dir`, or next to `noted_in`. Closing does not change the run's state. Unsent events of the training are
    sent first.
    """
    path = Path(noted_in)
    known = recall_run(path, training)
    if known is None:
        return NullRun()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or known.get("tracking_uri") or tracking_uri()
    folder = path.parent if reports_dir is None else Path(reports_dir)
    log = EventLog(folder / "attached.jsonl")
    _set_aside(log)
    about = {"run_id": known["run_id"], "experiment": known["experiment"], "name": known.get("name", "")}
    log.append({"run": known["key"], **about, "tracking_uri": uri, "attached": True})
    queue, before = LogQueue(log, uri), LogQueue(EventLog(path.parent / known.get("log", "log.jsonl")), uri)
    first = [before] if before.log.header().get("run") == known["key"] and before.pending() else []
    return Run(queue, [*first, queue, *_leftovers(folder, uri)], lambda: MlflowStore(uri))


def send_pending(noted_in: Any, reports_dir: Any, training: str) -> None:
    """Send the unsent events of a finished training, if any."""
    known = recall_run(Path(noted_in), training)
    if known is None:
        return
    log = EventLog(Path(noted_in).parent / known.get("log", "log.jsonl"))
    if LogQueue(log, known.get("tracking_uri") or tracking_uri()).pending():
        attach(noted_in, reports_dir, training).close()


def _header(uri: str, params: Dict[str, Any], tags: Dict[str, Any], run_id: Optional[str], name: str) -> Event:
    local = run_id is not None and run_id.startswith(LOCAL)
    given = os.environ.get("MLFLOW_RUN_NAME") or os.environ.get("DVC_EXP_NAME")
    provenance = repro.provenance()
    return {
        "run": run_id if local else LOCAL + uuid.uuid4().hex,
        "run_id": None if local else run_id,
        "continues": bool(run_id),
        "tracking_uri": uri,
        "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT,
        "name": given or name or time.strftime("%Y-%m-%d %H.%M"),
        "params": {
            **{key: str(value) for key, value in flatten(params).items()},
            **{key: value for key, value in provenance.items() if key.startswith(MACHINE)},
        },
        "tags": _tags(tags, provenance),
        "time": now_ms(),
    }


def _tags(tags: Dict[str, Any], provenance: Dict[str, str]) -> Dict[str, str]:
    """The given tags; others are hidden, since they would push a run's description down the page."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's --user without an entry in passwd
        user = str(os.getuid())
    dirty = {"git.dirty": "true"} if provenance["git.dirty"] == "true" else {}
    unseen = {f"{HIDDEN}{key}": value for key, value in provenance.items() if not key.startswith(MACHINE)}
    return {
        **{str(key): str(value) for key, value in tags.items()},
        **dirty,
        **unseen,
        **process_tags(),
        "mlflow.source.name": f"pipeline.{provenance.get('dvc.stage', 'train')}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": provenance["git.commit"],
        "mlflow.user": user,
    }


def _set_aside(log: EventLog) -> None:
    """Delete the old log, or move it to `unshipped/` if it has unsent events."""
    header = log.header()
    if header and not header.get("attached") and "end" not in log.last():
        log.append({"end": "KILLED", "time": now_ms()})  # one writer at a time: its process has ended
    if header and LogQueue(log, header["tracking_uri"]).pending():
        log.move(log.path.parent / "unshipped" / f"{log.path.stem}-{now_ms()}.jsonl")
    else:
        log.delete()


def _leftovers(folder: Path, uri: str) -> List[LogQueue]:
    logs = [EventLog(path) for path in sorted((folder / "unshipped").glob("*.jsonl"))]
    return [LogQueue(log, uri, leftover=True) for log in logs if log.header().get("tracking_uri") == uri]
