"""Start a stage on all local processes: `python -m pipeline.launch pipeline.train [its arguments]`.

It checks the request first, so that an error is one line and exit code 2, not a traceback of every
rank. It chooses the number of processes (NPROC_PER_NODE, never part of a stage's hash), runs
torchrun, which restarts a run that lost a process, forwards signals, and returns the stage's own
exit code, which torchrun does not.

NPROC_PER_NODE: a number, or auto (the default): the number of GPUs, else 2, on any number of cores,
because it decides the last bits of the weights.
Several nodes: set NNODES (2, or 1:2 for an elastic job) and RDZV_ENDPOINT (host:port of one of
them), the same on each node; RDZV_ID tells jobs at one endpoint apart. One node: MASTER_ADDR and
MASTER_PORT choose another address.
LOCAL_ADDR: the address by which other nodes reach this one, if not its host name (torch's
GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name the network interface). SG_MAX_RESTARTS (3): how often
a run that lost a process is restarted from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Optional, Sequence

import psutil

from pipeline import errors, signals
from pipeline.errors import (
    AGENT_PID,
    EXIT_FOLDER,
    LOST_PEER,
    STOPPED,
    STOPPING,
    RequestError,
    read_number,
)
from superglue_sift.environment import usable_cores, wait_passively

DEFAULT_CPU_PROCESSES = 2
AGENT = "--agent"  # first argument of the process in which torchrun runs
LAUNCHED = ("pipeline.keypoints", "pipeline.train")


def processes_per_node() -> int:
    """NPROC_PER_NODE as a number. Raises RequestError."""
    if os.environ.get("NPROC_PER_NODE", "") in ("", "auto"):
        import torch

        return torch.cuda.device_count() or DEFAULT_CPU_PROCESSES
    return read_number("NPROC_PER_NODE", 1, least=1)


def require_gpus(processes: int) -> None:
    """Raises RequestError if ranks would share a GPU, which NCCL refuses."""
    import torch

    gpus = torch.cuda.device_count()
    if 0 < gpus < processes:
        raise RequestError(
            f"NPROC_PER_NODE={processes}, but GPUs here: {gpus}; set it to {gpus} or auto"
        )


def free_port() -> int:
    """A free TCP port: two runs on one machine must not share torchrun's fixed default."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(module: str, arguments: Sequence[str], processes: int) -> List[str]:
    """The torchrun command line, with underscores in its options for torch 1.10.

    One node, too, has a c10d rendezvous: restarted ranks of a static one read a dead peer's
    address, and hang.
    """
    nodes = os.environ.get("NNODES", "1")
    own = local_address()
    endpoint = os.environ.get("RDZV_ENDPOINT", "")
    if nodes == "1":  # not --standalone, which resolves the host's name; containers may fail to
        endpoint = f"{own}:{os.environ.get('MASTER_PORT') or free_port()}"
    if not endpoint:
        raise RequestError(f"NNODES={nodes} needs RDZV_ENDPOINT=host:port, the same on every node")
    options = {
        "nproc_per_node": processes,
        "nnodes": nodes,
        "max_restarts": read_number("SG_MAX_RESTARTS", 3),
        "rdzv_backend": "c10d",
        "rdzv_endpoint": endpoint,
        "rdzv_id": os.environ.get("RDZV_ID", "pipeline"),
    }
    if own:  # torchrun cannot tell from an address which node has the endpoint
        is_host = endpoint.rsplit(":", 1)[0] == own
        options["rdzv_conf"] = f"is_host={str(is_host).lower()}"
    torchrun = [sys.executable, "-m", "pipeline.launch", AGENT]
    words = [f"--{name}={value}" for name, value in options.items()]
    return [*torchrun, *words, "-m", module, *arguments]


def local_address() -> str:
    """The address by which other ranks reach this node; "": its host name."""
    if os.environ.get("NNODES", "1") == "1":
        return os.environ.get("MASTER_ADDR", "127.0.0.1")
    return os.environ.get("LOCAL_ADDR", "")


def _agent(arguments: Sequence[str]) -> int:
    """torchrun without its traceback and log about a failed rank; 1 if one failed, else 0.

    A rank that raised has shown its own traceback, and the launcher names one that was killed.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    os.environ[AGENT_PID] = str(os.getpid())
    try:
        run.main([*own_address(), *arguments])
    except (ChildFailedError, SignalException):
        return 1  # some schedulers signal every process; the ranks have saved
    return 0


def own_address() -> List[str]:
    """torchrun's option for the address by which other nodes reach this one; none for its host
    name.

    torch 1.10's torchrun has no such option: its agent gets another host name instead.
    """
    from torch.distributed.elastic.agent.server import api
    from torch.distributed.launcher.api import LaunchConfig

    address = local_address()
    if address and hasattr(LaunchConfig, "local_addr"):
        return [f"--local_addr={address}"]
    if address:
        api._get_fq_hostname = lambda: address  # type: ignore[attr-defined]
    return []


def world_sizes(processes: int) -> List[int]:
    """All numbers of ranks the run may have: several with an elastic NNODES such as 1:2. Raises
    RequestError.
    """
    text = os.environ.get("NNODES", "1")
    bounds = text.split(":")
    numbers = [int(part) if part.isdigit() else 0 for part in bounds]
    if min(numbers) < 1 or len(numbers) > 2 or numbers[0] > numbers[-1]:
        raise RequestError(f"NNODES={text!r}: must be a number of nodes, or least:most")
    return [nodes * processes for nodes in range(numbers[0], numbers[-1] + 1)]


def environment(processes: int, exit_folder: Path) -> Dict[str, str]:
    """Environment of the ranks."""
    values = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // processes)),
        # a restarted rank must not read a dead peer's address from a shared store: it would hang
        # (pytorch#135712)
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Seconds for a rank to save after SIGTERM
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90",
        # Torch 1.10, at every import
        "PYTHONWARNINGS": "ignore:pkg_resources:UserWarning",
        # torch's C++ warnings; failures raise in Python
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # a rank that waits for a dead one must fail; the name changed with torch 2.2
        "NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **os.environ,
        EXIT_FOLDER: str(exit_folder),
    }
    wait_passively(values)
    return values


def run_stage(module: str, arguments: Sequence[str], processes: int, folder: Path) -> int:
    """Run torchrun, forward signals to its ranks, and return the stage's own exit code.

    folder: EXIT_FOLDER of the ranks, by which they say how they ended.
    """
    for number in signals.STOP_SIGNALS:
        signal.signal(number, functools.partial(_forward, folder))
    line = command(module, arguments, processes)
    values = environment(processes, folder)
    # torchrun ends with a killed launcher, and the ranks with torchrun
    code = subprocess.Popen(line, env=values, preexec_fn=signals.end_with_parent).wait()
    attempt = max((int(file.suffix[1:]) for file in folder.glob("*.[0-9]*")), default=0)
    lost = errors.lost_ranks(folder, attempt, processes)
    if lost and (folder / STOPPING).exists():
        return STOPPED  # before the ranks had begun, or while they could not save
    if lost and code:
        print(lost, end="", file=sys.stderr)
        return 1
    # not torchrun's own code: torch 1.10's agents may fail after all ranks are done
    ends = [end for _, end in sorted(errors.codes_of(folder, attempt).items()) if end != "0"]
    return next((int(end) for end in ends if end != LOST_PEER), 1 if ends else 0)


def _forward(folder: Path, number: int, frame) -> None:
    """Forward to the ranks, not to torchrun, which would kill them 30 s later, saved or not."""
    (folder / STOPPING).touch()
    ranks: List[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        # torchrun is our only child
        ranks = [rank for torchrun in psutil.Process().children() for rank in torchrun.children()]
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            rank.send_signal(signal.SIGTERM)


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    name = arguments[0]
    rest = arguments[1:]
    if name not in LAUNCHED:
        raise RequestError(f"{name!r} cannot be launched: must be one of {', '.join(LAUNCHED)}")
    module = importlib.import_module(f"{name}.__main__")
    processes = processes_per_node()
    if hasattr(module, "check"):
        processes = module.processes(rest, processes)  # a stage may want fewer
        require_gpus(processes)
        for world_size in world_sizes(processes):
            module.check(rest, world_size)
    # End with a checkpoint if dvc is killed, before it starts another run
    if "DVC_STAGE" in os.environ:
        signals.end_with_parent(signal.SIGTERM)
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        return run_stage(name, rest, processes, Path(folder))


if __name__ == "__main__":
    # not errors.run for the agent: it would write an exit code next to those of the ranks
    raise SystemExit(_agent(sys.argv[2:]) if sys.argv[1:2] == [AGENT] else errors.run(main))
