"""Start a stage on all local processes: `python -m pipeline.launch pipeline.train [its arguments]`.

The one place that knows torchrun. It checks the request first, so that a wrong one is a single line and
exit code 2 rather than a traceback of every rank; chooses the number of processes (NPROC_PER_NODE, never part
of a stage's hash); passes signals on; and gives the stage's own exit code back, which torchrun does not.

NPROC_PER_NODE: a number, or auto (the default): the number of GPUs, else 2, or 1 on a single core.
Several nodes: set NNODES and RDZV_ENDPOINT (host:port of one of them), the same on each node.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Optional, Sequence

import psutil

from pipeline import errors
from pipeline.errors import EXIT_FILE, RequestError

DEFAULT_CPU_PROCESSES = 2
LAUNCHED = ("pipeline.train",)


def processes_per_node() -> int:
    """NPROC_PER_NODE as a number. RequestError when it is none."""
    text = os.environ.get("NPROC_PER_NODE", "auto").strip()
    if text == "auto":
        import torch

        return torch.cuda.device_count() or min(DEFAULT_CPU_PROCESSES, os.cpu_count() or 1)
    if not text.isdigit() or int(text) < 1:
        raise RequestError(f"NPROC_PER_NODE={text!r}: must be a whole number from 1 on, or auto")
    return int(text)


def free_port() -> int:
    """A TCP port nobody listens on: two runs on one machine must not meet on torchrun's fixed default."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(module: str, arguments: Sequence[str], processes: int) -> List[str]:
    """The torchrun command line. Underscores in its options: torch 1.10 knows no others."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    nodes, endpoint = os.environ.get("NNODES", "1"), os.environ.get("RDZV_ENDPOINT", "")
    if nodes == "1":
        # an explicit address: --standalone asks for the host's name, which a container may not resolve
        torchrun += ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    elif endpoint:
        torchrun += [
            f"--nnodes={nodes}",
            "--rdzv_backend=c10d",
            f"--rdzv_endpoint={endpoint}",
            "--rdzv_id=pipeline",
        ]
    else:
        raise RequestError(f"NNODES={nodes} needs RDZV_ENDPOINT=host:port, the same on every node")
    return [*torchrun, "-m", module, *arguments]


def environment(processes: int, exit_file: Path) -> Dict[str, str]:
    """What the ranks inherit."""
    values = dict(os.environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    values.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    # a restarted rank must not read a dead peer's address from a shared store: it would hang (pytorch#135712)
    values.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    values.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "90")  # seconds a rank has to save after SIGTERM
    values.setdefault("PYTHONWARNINGS", "ignore:pkg_resources:UserWarning")  # torch 1.10, at every import
    values[EXIT_FILE] = str(exit_file)
    return values


def _ranks(torchrun: int) -> List[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(torchrun).children()
    return []


def supervise(arguments: List[str], values: Dict[str, str], exit_file: Path) -> int:
    """Run torchrun, hand it our signals, and return the stage's exit code."""
    process = subprocess.Popen(arguments, env=values)

    def forward(number: int, frame) -> None:
        # to the ranks and not to torchrun, which would kill them 30 s later, saved or not
        for rank in _ranks(process.pid):
            with contextlib.suppress(psutil.Error):
                rank.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, forward)
    code = process.wait()
    if exit_file.is_file() and exit_file.read_text().strip():
        return int(exit_file.read_text())
    return 1 if code else 0


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name not in LAUNCHED:
        raise RequestError(
            f"{name!r} cannot be launched: must be pipeline.train, pipeline.keypoints or pipeline.evaluate"
        )
    module = importlib.import_module(name)
    processes = processes_per_node()
    nodes = int(os.environ.get("NNODES", "1").split(":")[-1])
    module.check(rest, processes * nodes)
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        exit_file = Path(folder) / "exit"
        return supervise(command(name, rest, processes), environment(processes, exit_file), exit_file)


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
