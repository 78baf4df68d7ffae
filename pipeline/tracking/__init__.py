"""Tracking of runs, from rank 0; it never blocks or ends the work.

A stage opens a run here (`run`) and writes to its `log`, which is its record and contains no
`secrets`. One thread (`sender`) sends the log to MLflow (`mlflow_store`), and `python -m
pipeline.tracking resend` sends what a dead server missed. `matcher_model` is the registered model,
`champion` compares it with the best.
"""

from __future__ import annotations

import getpass
import os
import time
import uuid
from pathlib import Path
from typing import Any, Dict, Optional

from pipeline.parameters.schema import flatten
from pipeline.provenance import repro
from pipeline.tracking.log import (
    Event,
    EventLog,
    find_log,
    now_ms,
    recall_run,
    remember_run,
    take_log,
)
from pipeline.tracking.mlflow_store import EVALUATION, HEADLINE, HIDDEN, LEADING, RUN_ID
from pipeline.tracking.run import NullRun, Run, ending
from pipeline.tracking.secrets import redact

__all__ = [
    "EVALUATION",
    "HEADLINE",
    "HIDDEN",
    "LEADING",
    "RUN_ID",
    "NullRun",
    "Run",
    "attach",
    "ending",
    "known_run",
    "open_run",
    "redact",
    "tracking_uri",
]

EXPERIMENT = "superglue-sift"
RUN_FILE = "run.json"
MACHINE = ("version.", "image.", "host", "platform", "gpus")  # of provenance: parameters of the run


def tracking_uri(stored: str = "") -> str:
    """The address to use: that of a run, `stored` without its password, or the default.

    The default is MLFLOW_TRACKING_URI, else `mlflow.db` in the user's clone (also from a DVC
    experiment's copy). A run's own address comes first, since the environment may be an image's.
    A file that is not there belongs to another machine or container, and does not count.
    """
    default = (
        os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{repro.main_root() / 'mlflow.db'}"
    )
    scheme, _, path = stored.partition(":///")
    is_lost = not stored or (scheme == "sqlite" and not Path(path).is_file())
    return default if is_lost or stored == redact(default) else stored


def open_run(
    reports_dir: Any,
    params: Dict[str, Any],
    tags: Optional[Dict[str, Any]] = None,
    resume: Optional[str] = None,
    enabled: bool = True,
    system_metrics: bool = True,
    training: str = "",
    noted_in: Any = None,
    name: str = "",
) -> NullRun:
    """Open a run, or continue an interrupted one.

    `reports_dir` gets `log.jsonl`. The file `noted_in` (default: run.json there) names the run of
    this `training` for `attach` and `known_run`. The run's name is `name`, or the time. `params`
    may be nested: {"train": {"lr": 1}} becomes `train.lr`. `resume` is `.key` of the interrupted
    run. With `enabled=False` (every rank but the first) it does nothing.
    """
    if not enabled:
        return NullRun()
    folder = Path(reports_dir)
    noted = folder / RUN_FILE if noted_in is None else Path(noted_in)
    log = take_log(folder, resume)
    header = log.header()
    if header:
        uri = tracking_uri(header.get("tracking_uri", ""))
        log.append(
            {"tags": _tags(tags or {}, repro.provenance()), "resumed": True, "time": now_ms()}
        )
    else:
        uri = tracking_uri()
        header = _header(uri, params, tags or {}, resume, name)
        log.append(header)
    about = {key: header.get(key, "") for key in ("experiment", "name")}
    place = {"tracking_uri": redact(uri), "log": os.path.relpath(log.path, noted.parent)}
    remember_run(noted, training, {"key": header["run"], **about, **place})
    return Run(log, uri, True, system_metrics)


def known_run(noted_in: Any, training: str) -> Optional[str]:
    """`resume` of a resumed training; None if its run is unknown (another clone or machine)."""
    known = recall_run(Path(noted_in), training)
    return known["key"] if known else None


def attach(noted_in: Any, training: Optional[str] = None) -> NullRun:
    """Continue the run named in `noted_in` from another stage; without one, a run that does
    nothing.

    `training`: identity of the training that the metrics belong to; None: the latest. Its log gets
    the events. What the server does not have of it is sent first; if it has all, and nothing is
    added, it is not called. Closing does not change the run's state.
    """
    known = recall_run(Path(noted_in), training)
    if known is None:
        return NullRun()
    folder = (Path(noted_in).parent / known["log"]).parent
    log = find_log(folder, known["key"])
    if log is None:  # lost: a new one, which names the run
        log = EventLog(folder / f"log-{known['key']}.jsonl")
        about = {name: known.get(name, "") for name in ("experiment", "name", "tracking_uri")}
        log.append({"run": known["key"], **about})
    return Run(log, tracking_uri(known.get("tracking_uri", "")), False)


def _header(
    uri: str, params: Dict[str, Any], tags: Dict[str, Any], run: Optional[str], name: str
) -> Event:
    given = os.environ.get("MLFLOW_RUN_NAME") or os.environ.get("DVC_EXP_NAME")
    provenance = repro.provenance()
    return {
        "run": run or uuid.uuid4().hex,
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
    """The given tags, and hidden ones, which do not push a run's description down the page."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's --user without an entry in passwd
        user = str(os.getuid())
    dirty = {"git.dirty": "true"} if provenance["git.dirty"] == "true" else {}
    hidden = {
        f"{HIDDEN}{key}": value for key, value in provenance.items() if not key.startswith(MACHINE)
    }
    return {
        **{str(key): str(value) for key, value in tags.items()},
        **dirty,
        **hidden,
        "mlflow.source.name": f"pipeline.{provenance.get('dvc.stage', 'train')}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": provenance["git.commit"],
        "mlflow.user": user,
    }
