"""The mounted workspace: what an empty one gets, and one writer at a time across containers and the
host.

`python docker/workspace.py COMMAND ...` runs a command under the same lock, without a container
(`make repro`).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Dict, List, Set

HOME = Path(__file__).resolve().parents[1]
CODE = ("superglue_sift", "pipeline", "benchmarks", "presets", "dvc.yaml")
SEED = (
    *CODE,
    "pretrained",
    "params.yaml",
    "dvc.lock",
    ".dvcignore",
    ".dvc",
    "LICENSE",
    "README.md",
    "docs",
)


class Wrong(Exception):
    """A request that cannot be served; the message is the one line a person reads."""


def seed(workspace: Path) -> None:
    """Give an empty workspace the project's files, a copy what it lacks of them; check that it can
    be written to.
    """
    if not os.access(str(workspace), os.W_OK):
        raise Wrong(
            f"{workspace} cannot be written by uid {os.getuid()}: add --user $(id -u):$(id -g)"
        )
    if not any(workspace.iterdir()):
        print(
            f"{workspace} is empty: it gets the project as the image has it. Where its README.md"
            " says `make repro`,\n`make ui` or `make report`, give this image the command repro,"
            " ui or report; docs/containers.md has all",
            flush=True,
        )
        if not os.path.ismount(str(workspace)):
            print(
                "nothing is mounted there, so all goes with the container: add -v"
                ' "$PWD:/workspace"',
                flush=True,
            )
    elif not (workspace / "dvc.yaml").exists() and not (workspace / ".dvc").is_dir():
        raise Wrong(
            f"{workspace} has no dvc.yaml: mount a clone of the project there, or an empty folder"
        )
    if not (workspace / ".git").exists():
        fill(workspace)
    os.makedirs(str(workspace / ".dvc" / "tmp"), exist_ok=True)


def fill(workspace: Path) -> None:
    """Copy from the image what a workspace that is no clone has not."""
    fresh = not (workspace / ".dvc").exists()
    for name in SEED:
        source = HOME / name
        copy = workspace / name
        if copy.exists():
            continue
        if source.is_dir():
            shutil.copytree(
                source, copy, ignore=shutil.ignore_patterns("__pycache__", "cache", "tmp")
            )
        elif source.exists():
            shutil.copy(source, copy)
    if fresh:
        (workspace / ".dvc" / "config.local").write_text("[core]\n    no_scm = true\n")


def same_code(workspace: Path) -> None:
    """Refuse a copy of the project that another image left: its code would run, and not this
    image's.

    A clone is its owner's, and runs as it is.
    """
    if (workspace / ".git").exists() or os.environ.get("KEEP_CODE"):
        return
    other = [
        name
        for name in CODE
        if (workspace / name).exists() and sources(workspace / name) != sources(HOME / name)
    ]
    if other:
        raise Wrong(
            f"{workspace} has the code of another image ({', '.join(other)}): `rm -r"
            f" {' '.join(other)}` there, and the next run brings this image's; or add -e"
            " KEEP_CODE=1 to run what is there"
        )


def sources(path: Path) -> Dict[str, bytes]:
    """What stands in a file, or in the Python and YAML files of a folder."""
    files = (
        [path] if path.is_file() else [f for f in path.rglob("*") if f.suffix in (".py", ".yaml")]
    )
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


class WorkspaceLock:
    """flock on a file of the workspace: one kernel, one writer, whatever container or host process
    it is.

    The file names the last holder and the DVC it ran; it is empty after a clean end. Who holds the
    lock knows that this DVC is gone, and removes what a kill left of it in DVC's `rwlock`: its
    process id may be alive here, as that of another. An entry with another process id is of a DVC
    that was started without this lock, and is left alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rwlock = path.with_name("rwlock")

    def __enter__(self) -> WorkspaceLock:
        try:
            os.makedirs(str(self.path.parent), exist_ok=True)
            self.stream = open(self.path, "a+")
        except OSError as error:
            raise Wrong(
                f"{self.path}: {error.strerror}; uid {os.getuid()} has to write it"
            ) from None
        try:
            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Wrong(f"{self.path.parents[2]} is in use by {describe(self._holder())}") from None
        except OSError as error:  # a network file system without locks
            print(
                f"note: {self.path}: {error.strerror}; nothing keeps a second run away", flush=True
            )
        last = self._holder()
        if self._clear(last.get("dvc")):
            print(
                f"the last run ({describe(last)}) was killed: its DVC lock is removed", flush=True
            )
        elif processes(self.rwlock):
            raise Wrong(
                f"a DVC run without our lock holds {self.rwlock}; if there is none, remove the file"
            )
        self.dvc = 0
        self.runs(0)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._clear(self.dvc)  # our DVC has ended, perhaps killed before it could tidy up
        self._write("")
        self.stream.close()

    def fileno(self) -> int:
        """The descriptor that a child inherits, so that the lock lasts as long as the child
        does.
        """
        return self.stream.fileno()

    def runs(self, pid: int) -> None:
        """Note the process that may be DVC."""
        self.dvc = pid
        since = time.strftime("%F %T")
        self._write(
            json.dumps(
                {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "dvc": pid}
            )
        )

    def _clear(self, dvc: object) -> bool:
        """Remove the `rwlock` when all its entries are of this process; tell whether it did."""
        left = processes(self.rwlock) == {dvc}
        if left:
            self.rwlock.unlink()
        return left

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
    """A holder as text: Docker's host name is the container's id."""
    return (
        f"container or host {holder.get('host', 'unknown')}, since {holder.get('since', 'unknown')}"
    )


def processes(rwlock: Path) -> Set[object]:
    """The process ids that DVC's lock file names: `write` has one entry for a path, `read` a
    list.
    """
    try:
        tree = json.loads(rwlock.read_text() or "{}")
        found = [entry for paths in tree.values() for entry in paths.values()]
    except (OSError, ValueError, AttributeError):
        return set()
    return {
        one.get("pid") for entry in found for one in (entry if isinstance(entry, list) else [entry])
    }


def main(words: List[str]) -> None:
    """Become `words` under the lock of the workspace this is started in; the lock ends with the
    process.
    """
    try:
        lock = WorkspaceLock(Path.cwd() / ".dvc" / "tmp" / "workspace.lock").__enter__()
    except Wrong as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    lock.runs(os.getpid())
    os.set_inheritable(lock.fileno(), True)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
