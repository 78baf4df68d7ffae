"""The mounted workspace: what an empty one gets, and one writer at a time across containers."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Dict

HOME = Path(__file__).resolve().parents[1]
SEED = ("pipeline", "presets", "params.yaml", "dvc.yaml", ".dvcignore", ".dvc", "LICENSE")


class Wrong(Exception):
    """A request that cannot be served; the message is the one line a person reads."""


def seed(workspace: Path) -> None:
    """Give an empty workspace the project's files, and check that it can be written to."""
    if not os.access(str(workspace), os.W_OK):
        raise Wrong(f"{workspace} cannot be written by uid {os.getuid()}: add --user $(id -u):$(id -g)")
    if (workspace / "dvc.yaml").exists():
        os.makedirs(str(workspace / ".dvc" / "tmp"), exist_ok=True)
        return
    if any(workspace.iterdir()):
        raise Wrong(f"{workspace} has no dvc.yaml: mount a clone of the project there, or an empty folder")
    print(f"{workspace} is empty: it gets the project as the image has it", flush=True)
    if not os.path.ismount(str(workspace)):
        print(
            'nothing is mounted there, so all goes with the container: add -v "$PWD:/workspace"', flush=True
        )
    for name in SEED:
        source = HOME / name
        if source.is_dir():
            shutil.copytree(
                source, workspace / name, ignore=shutil.ignore_patterns("__pycache__", "cache", "tmp")
            )
        elif source.exists():
            shutil.copy(source, workspace / name)
    os.makedirs(str(workspace / ".dvc" / "tmp"), exist_ok=True)
    if not (workspace / ".git").exists():
        (workspace / ".dvc" / "config.local").write_text("[core]\n    no_scm = true\n")


class WorkspaceLock:
    """flock on a file of the workspace: one kernel, one writer, whatever container it lives in.

    The file names the holder while it is held and is empty after a clean end. What a killed holder left in
    DVC's `rwlock` names process ids of a container that is gone, which may live in this one: it is removed,
    but only when the last holder was one of us.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rwlock = path.with_name("rwlock")

    def __enter__(self) -> WorkspaceLock:
        self.stream = open(self.path, "a+")
        try:
            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Wrong(f"{self.path.parents[2]} is in use by {describe(self._holder())}") from None
        died = self._holder()
        if died and self.rwlock.exists():
            print(f"the last run ({describe(died)}) was killed: its DVC lock is removed", flush=True)
            self.rwlock.unlink()
        elif foreign(self.rwlock):
            raise Wrong(
                f"a DVC run outside of this image holds {self.rwlock}; if there is none, remove the file"
            )
        self._write(
            json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")})
        )
        return self

    def __exit__(self, *_exc: object) -> None:
        if foreign(self.rwlock):  # our DVC has ended, killed before it could tidy up
            self.rwlock.unlink()
        self._write("")
        self.stream.close()

    def _holder(self) -> Dict[str, object]:
        self.stream.seek(0)
        try:
            return json.loads(self.stream.read() or "{}")
        except ValueError:
            return {"host": "unknown"}

    def _write(self, text: str) -> None:
        self.stream.truncate(0)
        self.stream.write(text)
        self.stream.flush()


def describe(holder: Dict[str, object]) -> str:
    """A holder in words: Docker's host name is the container's id."""
    return f"container or host {holder.get('host', 'unknown')}, since {holder.get('since', 'unknown')}"


def foreign(rwlock: Path) -> bool:
    """Whether DVC's lock file names anybody."""
    try:
        return bool(json.loads(rwlock.read_text() or "{}"))
    except (OSError, ValueError):
        return False
