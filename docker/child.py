"""Run one command of `repro`, and pass a stop on to the right process below it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from typing import List, Optional

import psutil

WORK_FAILED = 1
BAD_REQUEST = 2
STOPPED = 143


class Child:
    """A command in a session of its own, so that Ctrl-C and SIGTERM reach it only through `stop`.

    A stop that comes before the command has started, or between two commands, stops the next one.
    The command inherits the descriptor `keep`, a lock, so that a kill of this process alone does
    not release it.
    """

    stopped = False

    def __init__(self, words: List[str], keep: int) -> None:
        self.process: Optional[subprocess.Popen] = None
        self.target: Optional[psutil.Process] = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.stop)
        self.process = subprocess.Popen(words, start_new_session=True, pass_fds=[keep])
        if Child.stopped:
            self.stop()

    def stop(self, *_signal: object) -> None:
        """Pass the stop on: to the trainer's launcher, else a running stage, else the command."""
        Child.stopped = True
        if self.process is None or self.process.poll() is not None:
            return
        self.target = find_trainer(self.process.pid)
        name = "the command" if self.target.pid == self.process.pid else "the trainer"
        print(f"stopping: SIGTERM to {name}, which may take a while to save", flush=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            self.target.terminate()

    def wait(self) -> int:
        """Wait for the end of the command, and return an exit code of the images.

        DVC's own codes only say that a stage failed.
        """
        code = self.process.wait()
        if Child.stopped:
            # Some schedulers signal DVC as well, which ends before the trainer has saved.
            while self.target and is_alive(self.target):
                time.sleep(0.1)
            return STOPPED
        return code if code in (0, BAD_REQUEST) else WORK_FAILED


def find_trainer(root: int) -> psutil.Process:
    """Find the process to stop: the launcher of torchrun, else a stage, else the root.

    Args:
        root: number of the process below which they are.
    """
    processes = [psutil.Process(root)]
    # Parents come before children.
    for process in processes[0].children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if words[1:3] == ["-m", "pipeline.launch"]:
                return process
            if words[1:2] == ["-m"] and words[2].startswith("pipeline."):
                processes.append(process)
    return processes[min(1, len(processes) - 1)]


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs. A zombie does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
