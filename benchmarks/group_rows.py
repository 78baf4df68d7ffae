"""Rows of several processes: a step with and without the gradient's exchange."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List

import torch

from benchmarks import flops, timing
from benchmarks.row import Row, Setting, activation_bytes
from pipeline.launch import free_port

CLONE = Path(__file__).resolve().parents[1]  # ranks import `benchmarks` from here
KEYPOINTS = 512
BUDGETS = 6.0  # times `--seconds`, for a row whose processes have to start first


def places(setting: Setting) -> int:
    """GPUs, or cores."""
    return torch.cuda.device_count() if setting.device.type == "cuda" else os.cpu_count() or 1


def groups(setting: Setting) -> Iterator[Row]:
    """DistributedDataParallel with 1, 2, 4, 8 processes."""
    cuda = setting.device.type == "cuda"
    places_here = places(setting)
    pairs = 64 if cuda else 2
    for processes in (1, 2, 4, 8):
        several = "processes" if processes > 1 else "process"
        name = f"DDP, {processes} {several} of {pairs} pairs, N = {KEYPOINTS}"
        reason = f"{places_here} {'GPUs' if cuda else 'cores'}" if processes > places_here else ""
        operations = pairs * flops.training_flops(setting.config, KEYPOINTS)
        sharing = 1 if cuda else processes  # each rank has a GPU of its own
        memory = sharing * activation_bytes(setting.config, KEYPOINTS, pairs)
        reason = reason or setting.too_dear(operations, memory, calls=2 * setting.rounds, budgets=BUDGETS)
        if reason:
            yield Row("training", name, skipped=reason)
            continue
        exchanged, alone = step_seconds(setting, processes, pairs)
        rate = processes * pairs / statistics.median(exchanged)
        ratio = timing.speed_up(alone, exchanged)
        against = f"the same processes alone, {1e3 * statistics.median(alone):.0f} ms a step"
        yield Row("training", name, rate, "pairs/s", ratio, None, against, 0.95 if processes > 1 else None)


def step_seconds(setting: Setting, processes: int, pairs: int) -> List[List[float]]:
    """Seconds of steps of `processes` processes: [with gradient exchange, without], each a list over the rounds."""
    command = [
        sys.executable, "-m", "benchmarks.rank", "--config", json.dumps(setting.config.to_dict()),
        "--keypoints", str(KEYPOINTS), "--pairs", str(pairs), "--rounds", str(setting.rounds),
    ]  # fmt: skip
    return json.loads(in_processes(setting, command, processes, 1))


def in_processes(setting: Setting, command: List[str], processes: int, threads: int) -> str:
    """Run `command` as the ranks of a group with this many threads each; the output of rank 0.

    Raises:
        RuntimeError: a rank failed.
    """
    ranks = Ranks(setting, command, processes, threads)
    answers = [rank.communicate()[0] for rank in ranks.all]
    ranks.check()
    return answers[0]


class Ranks:
    """Processes of a group, `all`, with pipes to their standard input and output.

    If one fails, the others are killed: in a collective they would wait for it until the time-out.
    """

    def __init__(self, setting: Setting, command: List[str], processes: int, threads: int) -> None:
        shared = {
            "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR", "SG_TIMEOUT": "3600",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(CLONE), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        if setting.device.type == "cpu":
            shared["CUDA_VISIBLE_DEVICES"] = ""
        self.all: List[subprocess.Popen] = []
        self._errors: List[IO[str]] = []
        for rank in range(processes):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._errors.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115  a pipe that nobody reads would fill
            pipes: Dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.all.append(subprocess.Popen(command, env=environment, stderr=self._errors[-1], **pipes))
        self._failed: Dict[int, int] = {}  # exit codes by rank
        self._guard = threading.Thread(target=self._watch, daemon=True)
        self._guard.start()

    def check(self) -> None:
        """Wait for the ranks to end.

        Raises:
            RuntimeError: one failed.
        """
        self._guard.join()
        if self._failed:
            failed = ", ".join(f"rank {rank} ended with {code}" for rank, code in self._failed.items())
            raise RuntimeError(f"{failed}, of {len(self.all)} ranks{self._why()}")

    def _why(self) -> str:
        """The last line of a failed rank, without the package of its exception's class."""
        for rank, code in self._failed.items():
            self._errors[rank].seek(0)
            lines = self._errors[rank].read().strip().splitlines()
            if lines:
                return ": " + re.sub(r"^(\w+\.)+(?=\w+: )", "", lines[-1])
            if code == -9:
                return ": killed, as by the system when memory is short"
        return ""

    def _watch(self) -> None:
        running = True
        while running and not self._failed:
            time.sleep(0.2)
            running = any(rank.poll() is None for rank in self.all)
            self._failed = {i: rank.returncode for i, rank in enumerate(self.all) if rank.poll()}
        if self._failed:
            for rank in self.all:
                rank.kill()


class Group:
    """Processes that do a piece of work (`items` items) for each call.

    A line on the standard input of each starts it; a line on the standard output of the first reports its end.
    """

    def __init__(
        self, setting: Setting, command: List[str], processes: int, threads: int, items: int, unit: str
    ) -> None:
        self.items, self.unit = items, unit
        self.ranks = Ranks(setting, command, processes, threads)
        self._answered()

    def __call__(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # of a rank that has ended, which `_answered` names
            for rank in self.ranks.all:
                rank.stdin.write("step\n")
                rank.stdin.flush()
        self._answered()

    def _answered(self) -> None:
        """Raises RuntimeError when a rank has failed."""
        if not self.ranks.all[0].stdout.readline():
            self.close()
            self.ranks.check()
            raise RuntimeError("rank 0 ended without an answer")

    def close(self) -> None:
        """End the ranks."""
        for rank in self.ranks.all:
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        for rank in self.ranks.all:
            rank.wait()
            rank.stdout.close()


def training_group(
    setting: Setting,
    kept: Path,
    keypoints: int,
    pairs: int,
    changes: Dict[str, Any],
    processes: int,
    threads: int = 1,
    ahead: bool = False,
) -> Group:
    """A group whose call is a step of `pairs` over all processes; `ahead`: with prefetching, as in the stage."""
    command = [
        sys.executable, "-m", "benchmarks.mode_rank", "--store", str(kept),
        "--params", str(setting.params), "--config", json.dumps(setting.config.to_dict()),
        "--keypoints", str(keypoints), "--pairs", str(pairs), "--changes", json.dumps(changes),
        *(["--ahead"] if ahead else []),
    ]  # fmt: skip
    return Group(setting, command, processes, threads, pairs, "pairs/s")
