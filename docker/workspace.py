"""Fill a mounted workspace that is empty, and lock it for one writer across containers.

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
COPIED = (*CODE, *PAGES, "pretrained", "params.yaml", "dvc.lock", ".dvcignore", ".dvc")


class WrongRequest(Exception):
    """A request that cannot be served. The message is one line with the reason and the fix."""


def copy_project(workspace: Path) -> None:
    """Copy files of the project that a workspace lacks from the image, unless it is a clone."""
    if not os.access(workspace, os.W_OK):
        user = f"uid {os.getuid()}: add --user $(id -u):$(id -g)"
        raise WrongRequest(f"{workspace} cannot be written by {user}")
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
        raise WrongRequest(f"{workspace} has no dvc.yaml: mount a clone there, or an empty folder")
    if (workspace / ".git").exists():
        return
    for name in COPIED:
        if (HOME / name).is_dir() and not (workspace / name).exists():
            ignore = shutil.ignore_patterns("__pycache__", "cache", "tmp")
            shutil.copytree(HOME / name, workspace / name, ignore=ignore)
        elif (HOME / name).is_file() and not (workspace / name).exists():
            shutil.copy(HOME / name, workspace / name)
    if is_fresh:
        (workspace / ".dvc" / "config.local").write_text("[core]\n    no_scm = true\n")


def require_same_code(workspace: Path) -> None:
    """Raise WrongRequest for a copy of the project of another image. A clone runs as it is."""
    if (workspace / ".git").exists():
        return
    names = [name for name in CODE if (workspace / name).exists()]
    changed = [name for name in names if read_code(workspace / name) != read_code(HOME / name)]
    if changed:
        raise WrongRequest(
            f"{workspace} has the code of another image: `rm -r {' '.join(changed)}` there, and the"
            " next run brings this image's; or `git init` there, to run what is there"
        )


def read_code(path: Path) -> Dict[str, bytes]:
    """Return the content of a file, or of the Python and YAML files of a folder, by path."""
    files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.yaml")]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def lock_workspace(workspace: Path) -> TextIO:
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
        raise WrongRequest(f"{path}: {error.strerror}; {fix}") from None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = path.read_text() or "another run"
        raise WrongRequest(f"{workspace} is in use by {holder}; wait until it is done") from None
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
    """Return whether DVC's own lock names a running DVC, which was started without our lock.

    Args:
        rwlock: the content of DVC's lock.
    """
    for pid, command in re.findall(r'"pid": (\d+), "cmd": "([^"]*)"', rwlock):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if command in " ".join(words):
                return True
    return False


def main(words: List[str]) -> None:
    """Lock this folder, and become the process of the command `words`, which keeps the lock."""
    try:
        stream = lock_workspace(Path.cwd())
    except WrongRequest as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    os.set_inheritable(stream.fileno(), True)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
