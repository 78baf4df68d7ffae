"""Lock of the workspace for a stage of a `dvc repro` that was started by hand.

`make repro` and the containers hold the lock for the whole run (docker/workspace.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Dict, List, TextIO

import psutil

from pipeline.errors import RequestError, typed

LOCK = Path(".dvc") / "tmp" / "workspace.lock"
_held: List[TextIO] = []  # open, and so locked, until this process ends


def take() -> None:
    """Under DVC, lock the workspace until this process ends, unless an ancestor holds the lock.

    Raises RequestError if another run, on this machine or in a container on it, uses the workspace.
    """
    root = os.environ.get("DVC_ROOT")
    if not root or "DVC_STAGE" not in os.environ or _held:
        return
    path = Path(root) / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; uid {os.getuid()} has to write it") from None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(stream)
        stream.close()
        # Ids are valid within one container only
        ancestors = {process.pid for process in psutil.Process().parents()}
        if (
            holder.get("host") != socket.gethostname()
            or not {holder.get("pid"), holder.get("dvc")} & ancestors
        ):
            since = (
                f"container or host {holder.get('host', 'unknown')}, since"
                f" {holder.get('since', 'unknown')}"
            )
            raise RequestError(
                f"{root} is in use by {since}; wait until it is done, or stop it"
            ) from None
        return
    except OSError as error:  # a network file system without locks
        print(f"note: {path}: {error.strerror}; nothing keeps a second run away")
        stream.close()
        return
    _held.append(stream)
    stream.truncate(0)
    # without the id of DVC's process: another stage of the same run may take the lock
    stream.write(
        json.dumps(
            {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}
        )
    )
    stream.flush()
    locks = f"the workspace is locked stage by stage; `{typed('repro')}` locks it throughout"
    print(f"note: this DVC was started by hand: {locks}")


def _holder(stream: TextIO) -> Dict[str, Any]:
    stream.seek(0)
    try:
        return json.loads(stream.read() or "{}")
    except ValueError:
        return {}
