"""The mounted workspace: what an empty one gets, and one writer at a time across containers.

`python docker/workspace.py COMMAND ...` runs a command under the same lock, without a container
(`make repro`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Dict, List, TextIO

HOME = Path(__file__).resolve().parents[1]
CODE = ("superglue_sift", "pipeline", "benchmarks", "presets", "dvc.yaml")
PAGES = ("LICENSE", "README.md", "docs")
SEED = (*CODE, *PAGES, "pretrained", "params.yaml", "dvc.lock", ".dvcignore", ".dvc")


class Wrong(Exception):
    """A request that cannot be served; the message is the one line a person reads."""


def seed(workspace: Path) -> None:
    """Copy the project from the image to a workspace that is no clone, where it lacks it."""
    if not os.access(workspace, os.W_OK):
        user = f"uid {os.getuid()}: add --user $(id -u):$(id -g)"
        raise Wrong(f"{workspace} cannot be written by {user}")
    is_fresh = not (workspace / ".dvc").exists()
    if not any(workspace.iterdir()):
        print(
            f"{workspace} is empty: it gets the project as the image has it. Where its README.md"
            " says `make repro`,\n`make ui` or `make report`, give this image the command repro,"
            " ui or report; docs/containers.md has all",
            flush=True,
        )
        if not workspace.is_mount():
            print('nothing is mounted there: add -v "$PWD:/workspace" to keep it', flush=True)
    elif is_fresh and not (workspace / "dvc.yaml").exists():
        raise Wrong(f"{workspace} has no dvc.yaml: mount a clone there, or an empty folder")
    if (workspace / ".git").exists():
        return
    for name in SEED:
        if (HOME / name).is_dir() and not (workspace / name).exists():
            ignore = shutil.ignore_patterns("__pycache__", "cache", "tmp")
            shutil.copytree(HOME / name, workspace / name, ignore=ignore)
        elif (HOME / name).is_file() and not (workspace / name).exists():
            shutil.copy(HOME / name, workspace / name)
    if is_fresh:
        (workspace / ".dvc" / "config.local").write_text("[core]\n    no_scm = true\n")


def require_same_code(workspace: Path) -> None:
    """Refuse a copy of the project that another image left; a clone runs as it is."""
    if (workspace / ".git").exists() or os.environ.get("KEEP_CODE"):
        return
    there = [name for name in CODE if (workspace / name).exists()]
    other = " ".join(name for name in there if read(workspace / name) != read(HOME / name))
    if other:
        raise Wrong(
            f"{workspace} has the code of another image: `rm -r {other}` there, and the next run"
            " brings this image's; or add -e KEEP_CODE=1 to run what is there"
        )


def read(path: Path) -> Dict[str, bytes]:
    """The content of a file, or of the Python and YAML files of a folder."""
    files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.yaml")]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def lock(workspace: Path) -> TextIO:
    """Lock the workspace while the returned stream is open, here or in a child that inherits it.

    flock works across all containers and processes of one kernel; DVC's `rwlock` only within one
    container, where the process id that a killed container left may be that of another program.
    """
    path = workspace / ".dvc" / "tmp" / "workspace.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+")
    except OSError as error:
        command = f"sudo chown -R {os.getuid()} {shlex.quote(str(workspace))}"
        fix = f"type `{command}`, or use a folder of your own"
        raise Wrong(f"{path}: {error.strerror}; {fix}") from None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = path.read_text() or "another run"
        raise Wrong(f"{workspace} is in use by {holder}; wait until it is done") from None
    except OSError as error:  # a network file system without locks
        print(f"note: {path}: {error.strerror}; nothing keeps a second run away", flush=True)
    rwlock = path.with_name("rwlock")
    if rwlock.exists() and not is_used(rwlock.read_text()):
        rwlock.unlink()
    stream.truncate(0)
    since = time.strftime("%F %T")
    stream.write(f"container or host {socket.gethostname()}, process {os.getpid()}, since {since}")
    stream.flush()
    return stream


def is_used(rwlock: str) -> bool:
    """Whether a DVC that runs here, started without our lock, has an entry in DVC's own lock."""
    for pid, command in re.findall(r'"pid": (\d+), "cmd": "([^"]*)"', rwlock):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if command in " ".join(words):
                return True
    return False


def main(words: List[str]) -> None:
    """Become `words` under the lock of this folder; the lock ends with the process."""
    try:
        stream = lock(Path.cwd())
    except Wrong as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    os.set_inheritable(stream.fileno(), True)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
