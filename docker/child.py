"""One command of `repro`, and how a stop reaches the right process below it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Dict, List, Optional

WORK_FAILED = 1
BAD_REQUEST = 2
STOPPED = 143


class Child:
    """One command in a session of its own, so that Ctrl-C and SIGTERM reach it through `stop`
    alone.

    A stop that comes before the command has started, or between two commands, stops the next one.
    The command inherits the descriptor `keep`, which may be a lock, so that a kill of this process
    alone does not release it.
    """

    stopped = False

    def __init__(self, words: List[str], keep: int) -> None:
        self.process: Optional[subprocess.Popen] = None
        self.target = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.stop)
        self.process = subprocess.Popen(words, start_new_session=True, pass_fds=[keep])
        if Child.stopped:
            self.stop()

    def stop(self, *_signal: object) -> None:
        """Pass the stop on: to the trainer's launcher, else to the running stage, else to the
        command itself.
        """
        Child.stopped = True
        if self.process is None or self.process.poll() is not None:
            return
        target = self.target = trainer(self.process.pid) or self.process.pid
        name = "the trainer" if target != self.process.pid else "the command"
        print(
            f"stopping: SIGTERM to {name} (process {target}), which may take a while to save",
            flush=True,
        )
        try:
            os.kill(target, signal.SIGTERM)
        except ProcessLookupError:
            pass

    def wait(self) -> int:
        """The exit code a person can count on; DVC's own codes mean that a stage failed."""
        code = self.process.wait()
        if Child.stopped:
            # Some schedulers signal DVC as well, which ends before the trainer has saved
            while alive(self.target):
                time.sleep(0.1)
            return STOPPED
        return code if code in (0, BAD_REQUEST) else WORK_FAILED


def trainer(root: int) -> Optional[int]:
    """Among the descendants of `root`, the launcher of torchrun, else the python of a stage."""
    stages: List[int] = []
    for pid in descendants(root):
        words = cmdline(pid)
        if "-m" not in words[:-1]:
            continue
        module = words[words.index("-m") + 1]
        if module == "pipeline.launch":
            return pid
        if module.startswith("pipeline.") and os.path.basename(words[0]).startswith("python"):
            stages.append(pid)
    return stages[0] if stages else None


def alive(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        return (
            pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except (OSError, IndexError):
        return False


def descendants(root: int) -> List[int]:
    """Process ids below `root`, parents before children."""
    children: Dict[int, List[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(parent(entry), []).append(int(entry.name))
    found = []
    front = [root]
    while front:
        front = [child for pid in front for child in sorted(children.get(pid, []))]
        found += front
    return found


def parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return -1


def cmdline(pid: int) -> List[str]:
    try:
        return [
            word.decode("utf-8", "replace")
            for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ]
    except OSError:
        return []
