"""Start a stage on all local processes: `python -m pipeline.launch pipeline.train [its arguments]`.

It checks the request first, so that an error is one line and exit code 2, not a traceback of every
rank. Then torchrun runs in this process. It starts the ranks, and passes a signal on to them. The
launcher starts the ranks again if one of them was killed, and returns the exit code of the stage.

NPROC_PER_NODE: the number of processes, or auto (the default), which is the number of GPUs. Without
a GPU auto means 2, on any number of cores, because the number decides the last bits of the weights.
Several nodes: set NNODES (2, or 1:2 for an elastic job) and RDZV_ENDPOINT (host:port of one of
them), the same on each node. RDZV_ID tells jobs at one endpoint apart. LOCAL_ADDR is the address by
which other nodes reach this one, if its host name does not resolve to it (torch 2).
GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network interface.
One node: MASTER_ADDR and MASTER_PORT choose another address than a free port of 127.0.0.1.
SG_MAX_RESTARTS: how often a run that lost a process starts again from its newest checkpoint (3).
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import sys
from typing import Dict, List, Optional, Sequence, Tuple

from pipeline import errors, workers
from pipeline.errors import RESTARTS, STOPPED, RequestError, read_environment_number
from superglue_sift.environment import count_usable_cores, wait_passively

DEFAULT_CPU_PROCESSES = 2
LAUNCHED = ("pipeline.keypoints", "pipeline.train")
# Variables of the ranks, set unless they are set already.
VARIABLES = {
    # The oldest torch, 1.10, warns at every import.
    "PYTHONWARNINGS": "ignore:pkg_resources:UserWarning",
    # Torch's C++ code prints no warnings, because its failures raise in Python.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # A restarted rank must not read a dead peer's address from a shared store: it would hang
    # (pytorch#135712).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # Seconds that a rank has to save after SIGTERM (with torch 1.10 always 30).
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90",
    # A rank that waits for a dead one must fail. The name changed with torch 2.2.
    "NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}


def count_processes_per_node() -> int:
    """Return the number of processes of this node, which NPROC_PER_NODE says.

    Raises:
        RequestError: If it is no number, or if ranks would share a GPU, which NCCL refuses.
    """
    import torch

    gpus = torch.cuda.device_count()
    if os.environ.get("NPROC_PER_NODE", "") in ("", "auto"):
        return gpus or DEFAULT_CPU_PROCESSES
    processes = read_environment_number("NPROC_PER_NODE", 1, minimum=1)
    if 0 < gpus < processes:
        raise RequestError(
            f"NPROC_PER_NODE={processes}, but GPUs here: {gpus}; set it to {gpus} or auto"
        )
    return processes


def is_one_node() -> bool:
    """Return whether this node is the only one, which NNODES says."""
    return os.environ.get("NNODES", "1") == "1"


def read_min_nodes() -> int:
    """Return the number of nodes that NNODES gives, and 1 without it. Of a range, return the first.

    Raises:
        RequestError: If NNODES is neither a number nor a range.
    """
    text = os.environ.get("NNODES", "1")
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", text):
        raise RequestError(f"NNODES={text!r}: must be a number of nodes, or least:most")
    return int(text.partition(":")[0])


def make_torchrun_options(processes: int, restarts: int) -> List[str]:
    """Make the options of torchrun from the environment.

    Their names have underscores, because torch 1.10 knows no other spelling.

    Args:
        processes: number of processes of this node.
        restarts: how often torchrun starts several nodes again. One node is started again by
            `run_stage`.

    Raises:
        RequestError: If the address is wrong, or if the port is in use.
    """
    from pipeline.distributed import find_free_port

    # Torchrun looks ten times a second whether a rank has ended.
    options: Dict[str, object] = {"nproc_per_node": processes, "monitor_interval": 0.1}
    if is_one_node():
        # --standalone would resolve the host's name, which fails in some containers. The backend is
        # spelled out, because PET_RDZV_BACKEND of an operator would replace a default.
        address = os.environ.get("MASTER_ADDR") or "127.0.0.1"
        port = find_free_port(address, read_environment_number("MASTER_PORT", 0))
        options.update(max_restarts=0, nnodes=1, rdzv_backend="static", rdzv_endpoint="")
        options.update(master_addr=address, master_port=port)
    else:
        nodes = os.environ["NNODES"]
        endpoint = os.environ.get("RDZV_ENDPOINT", "")
        if ":" not in endpoint:
            raise RequestError(
                f"NNODES={nodes} needs RDZV_ENDPOINT=host:port, the same on every node"
            )
        options.update(max_restarts=restarts, nnodes=nodes, rdzv_backend="c10d")
        job = os.environ.get("RDZV_ID", "pipeline")
        options.update(rdzv_endpoint=endpoint, rdzv_id=job)
        local_address = os.environ.get("LOCAL_ADDR", "")
        if local_address:  # Torchrun cannot tell from an address which node has the endpoint
            is_host = endpoint.rsplit(":", 1)[0] == local_address
            options.update(local_addr=local_address, rdzv_conf=f"is_host={str(is_host).lower()}")
    return [f"--{name}={value}" for name, value in options.items()]


def run_torchrun(arguments: List[str]) -> Tuple[int, int]:
    """Run torchrun in this process until the ranks have ended.

    Args:
        arguments: the command line of torchrun.

    Returns:
        The first rank that failed, and its exit code. The code is 0 if no rank failed, and negative
        if a signal killed the rank.

    Raises:
        SignalException: If this process was asked to stop. The ranks have ended then.
        RequestError: If the nodes do not meet.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    logging.disable(logging.CRITICAL)  # A rank that raised has shown its own traceback
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        # Failures are in the order in which they were seen. Torchrun ended the later ranks itself.
        rank, failure = next(iter(error.failures.items()))
        return rank, failure.exitcode
    except RendezvousError as error:
        endpoint = os.environ.get("RDZV_ENDPOINT")
        raise RequestError(f"RDZV_ENDPOINT={endpoint}: the nodes do not meet: {error}") from None
    return 0, 0


def run_stage(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run the ranks of a stage until they are done, and start them again if one was killed.

    Several nodes have to start again together, so torchrun starts them, whatever ended a rank.

    Args:
        module: name of the module of the stage.
        arguments: command line of the stage.
        processes: number of processes of this node.

    Returns:
        The exit code: 0, 1, 2, or 143 if the launcher or a rank was asked to stop.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    threads = count_usable_cores() // processes or 1
    for name, value in {**VARIABLES, "OMP_NUM_THREADS": threads}.items():
        os.environ.setdefault(name, str(value))
    wait_passively()

    # Torchrun passes SIGTERM, SIGINT and SIGHUP on to the ranks.
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))

    restarts = read_environment_number("SG_MAX_RESTARTS", 3)
    for attempt in range(restarts + 1 if is_one_node() else 1):
        os.environ[RESTARTS] = str(attempt)
        options = [f"--rdzv_id={attempt}"] if is_one_node() else []
        options += make_torchrun_options(processes, restarts)
        try:
            rank, code = run_torchrun([*options, "-m", module, *arguments])
        except SignalException:
            return STOPPED
        if code >= 0:
            return code
        name = signal.Signals(-code).name
        print(f"rank {rank} was killed ({name}), perhaps for lack of memory", file=sys.stderr)
        if attempt < restarts and is_one_node():
            print("starting again where it was", file=sys.stderr)
    return 1


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    workers.end_with_dvc()  # The ranks save a checkpoint before they end
    stage = arguments[0]
    stage_arguments = arguments[1:]
    if stage not in LAUNCHED:
        raise RequestError(f"{stage!r} cannot be launched: must be one of {', '.join(LAUNCHED)}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # Torch reads it when it is loaded
    module = importlib.import_module(f"{stage}.__main__")
    processes = count_processes_per_node()
    world_size = read_min_nodes() * processes
    if hasattr(module, "check_request"):
        module.check_request(stage_arguments, world_size)
    exit_code = run_stage(stage, stage_arguments, processes)
    # From here on a signal ends the launcher at once, so that DVC does not start the next stage.
    for signal_number in workers.STOP_SIGNALS:
        signal.signal(signal_number, signal.SIG_DFL)
    return exit_code


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
