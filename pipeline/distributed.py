"""Join and leave the process group of torch.distributed, and exchange values between its ranks.

Each function also works in a single process without a group.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import gc
import os
import re
import socket
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple

import torch
import torch.distributed as dist

# This import comes first, because its functions keep the group that exists when it is imported.
import torch.distributed.nn
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from pipeline import workers
from pipeline.errors import RequestError, WorkError, read_environment_number
from superglue_sift import torch_compat

# Seconds for all ranks to meet at the start (SG_START_TIMEOUT), and later for the slowest rank to
# come to a collective (SG_TIMEOUT). It may have to write a checkpoint or to compile first.
START_SECONDS = 120
TIMEOUT_SECONDS = 600  # NCCL has the same limit
LARGEST_PORT = 65535
NOTICE_SECONDS = 2  # Time for torchrun to see which rank was killed, before the other ranks end
# One of these stands in the message of a collective when another rank is gone or hangs.
LOST_PEER = "Connection (closed by peer|reset)|Broken pipe|[Tt]imed out|[Tt]imeout|NCCL|gloo"
# Size of a bucket of gradients in MiB. On a slow link this is faster than torch's 25.
BUCKET_MB = 4


class Context(NamedTuple):
    """This process among the processes of the run.

    Attributes:
        rank: its number, from 0 on.
        world_size: the number of processes.
        device: where it computes.
        local_rank: its number among the processes of its node, from 0 on.
    """

    rank: int
    world_size: int
    device: torch.device
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_first_of_node(self) -> bool:
        """Whether this rank writes on its node. In a shared folder, nodes write the same bytes."""
        return self.local_rank == 0


def _adopt_slurm_variables() -> None:
    """Set the environment variables of torchrun from those of SLURM (`srun python -m ...`).

    If those of torchrun are set, nothing happens.
    """
    # SLURM_PROCID alone is also set inside an sbatch script that starts torchrun or one process
    # itself. SLURM_NTASKS belongs to the job, whose interactive shell is a step of one task.
    tasks = read_environment_number(
        "SLURM_STEP_NUM_TASKS", read_environment_number("SLURM_NTASKS", 1)
    )
    if "RANK" in os.environ or "SLURM_STEP_ID" not in os.environ or tasks < 2:
        return
    os.environ["RANK"] = str(read_environment_number("SLURM_PROCID"))
    os.environ["WORLD_SIZE"] = str(tasks)
    os.environ["LOCAL_RANK"] = str(read_environment_number("SLURM_LOCALID"))
    # Rank 0 runs on the first node of its step. The job may have been started on a login node.
    job_nodes = os.environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
    os.environ.setdefault(
        "MASTER_ADDR", parse_first_host(os.environ.get("SLURM_STEP_NODELIST", job_nodes))
    )
    os.environ.setdefault(
        "MASTER_PORT", str(20000 + read_environment_number("SLURM_JOB_ID", 0) % 20000)
    )


def parse_first_host(nodes: str) -> str:
    """Return the first host in SLURM's list of nodes, such as gpu07 for `gpu[07-09,12],login1`.

    `scontrol show hostnames` does the same, but images do not have it.
    """
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])


def find_free_port(address: str = "127.0.0.1", port: int = 0) -> int:
    """Return a port that is free at an address of this machine.

    Args:
        address: host name or number. The address "" stands for all addresses of this machine.
        port: the only port to try, or 0 for any port.

    Raises:
        RequestError: If the port is in use, or if the address belongs to another machine.
    """
    try:
        with socket.create_server((address, port)) as server:
            return server.getsockname()[1]
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"MASTER_ADDR={address}, MASTER_PORT={port}: cannot be used on this machine: {error};"
            " leave them unset; several nodes need NNODES and RDZV_ENDPOINT"
        ) from None


def _read_meeting_port(world_size: int) -> int:
    """Return the port at which the ranks meet.

    Raises:
        RequestError: If no address is set, or if MASTER_PORT is no port.
    """
    if not os.environ.get("MASTER_ADDR"):
        raise RequestError(
            f"environment WORLD_SIZE={world_size}: needs MASTER_ADDR and MASTER_PORT, the address"
            " of rank 0; `python -m pipeline.launch` sets them"
        )
    return read_environment_number("MASTER_PORT", minimum=1, maximum=LARGEST_PORT)


def join_group() -> Context:
    """Join the process group that the environment of torchrun (or SLURM) names, if there is one.

    NCCL carries GPU tensors, and gloo carries CPU tensors and other objects. With torch 1.10 NCCL
    carries everything.

    Raises:
        RequestError: If an environment variable is not a number, or if the port is in use.
        WorkError: If the other ranks do not come.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if by_torchrun:
        # Without torchrun this rank would hold its GPU for ever. It would also write into the
        # folder of the next run.
        workers.end_with_parent()
    _adopt_slurm_variables()

    # Each rank of this machine has a device of its own.
    rank = read_environment_number("RANK", 0)
    world_size = read_environment_number("WORLD_SIZE", 1, minimum=1)
    if rank >= world_size:
        raise RequestError(f"environment RANK={rank}: must be below WORLD_SIZE ({world_size})")
    local_rank = read_environment_number("LOCAL_RANK", 0)
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False  # The reason is in `weights.choose_device`
    else:
        device = torch.device("cpu")

    # The ranks meet in a store of rank 0, or of torchrun, and then form the group.
    if world_size > 1:
        port = _read_meeting_port(world_size)
        if rank == 0 and not by_torchrun:
            find_free_port("", port)
        meeting_timeout = datetime.timedelta(
            seconds=read_environment_number("SG_START_TIMEOUT", START_SECONDS)
        )
        collective_timeout = datetime.timedelta(
            seconds=read_environment_number("SG_TIMEOUT", TIMEOUT_SECONDS)
        )
        try:
            store = next(iter(rendezvous("env://", rank, world_size, timeout=meeting_timeout)))[0]
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WorkError(
                f"rank {rank} of {world_size}: the others did not come within"
                f" {meeting_timeout.seconds} s (SG_START_TIMEOUT): {reason}"
            ) from error
        dist.init_process_group(
            torch_compat.choose_backend(device.type),
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=collective_timeout,
        )
    return Context(rank, world_size, device, local_rank)


_left_groups: List[Any] = []  # Groups that this process has left; `_join_threads` releases them


@atexit.register
def _join_threads() -> None:
    """Release the groups at the one moment when it is safe.

    The destructor of a group joins gloo's threads. A thread may still need the GIL to free the
    tensors of the last collective. Before this moment, DistributedDataParallel may have the last
    reference, and its destructor holds the GIL, so a finished training hangs. After this moment,
    Python ends a thread that asks for the GIL, and C++ aborts the process. Each of the two happened
    about once in some hundred runs.
    """
    # DistributedDataParallel refers to the group from reference cycles, which only gc frees.
    gc.collect()
    # These are the last references. Clearing them releases the GIL before threads are joined.
    _left_groups.clear()


def _abandon_group() -> None:
    """Leave the group after a failure, without waiting for the other ranks."""
    if not dist.is_initialized():
        return
    group = dist.distributed_c10d._get_default_group()
    # The group is never released, because its destructor waits for gloo's threads, and these may
    # wait for other ranks.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    if torch.cuda.is_available():
        torch_compat.abort_nccl(group)


def has_other_ranks() -> bool:
    """Return whether the group has other ranks than this one."""
    return dist.is_initialized() and dist.get_world_size() > 1


def sum_with_gradient(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks. Gradients flow through it (for `norm: batch`)."""
    if not has_other_ranks():
        return tensor
    return torch.distributed.nn.functional.all_reduce(tensor, group=dist.group.WORLD)


def sum_over_ranks(sums: Mapping[str, float]) -> Dict[str, float]:
    """Return the sums over all ranks, in float64. Every rank has the same names."""
    if not has_other_ranks() or not sums:
        return dict(sums)
    # One tensor (names,) holds all sums, so that one collective exchanges them.
    names = sorted(sums)
    # With torch 1.10 NCCL is the only backend, and carries tensors of GPUs.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    packed = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(packed)
    return dict(zip(names, packed.tolist()))


def is_true_on_any_rank(flag: bool) -> bool:
    """Return whether `flag` is True on at least one rank. All ranks call this together."""
    return bool(sum_over_ranks({"flag": flag})["flag"])


def gather_objects(item: Any) -> List[Any]:
    """Return the item of every rank, in the order of ranks. All ranks call this together.

    An item is any object that pickle can send between processes.
    """
    if not has_other_ranks():
        return [item]
    items: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def map_rows_over_ranks(work: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return `work(rows)`, where each rank computes a part of the rows.

    All ranks call this together, with the same rows.

    Args:
        work: a function that treats rows independently and keeps their shapes.
        rows: (K, ...), on the device of this rank.
    """
    if not has_other_ranks():
        return work(rows)
    # K / ranks, rounded up. The last rows may be padding.
    rows_per_rank = -(-len(rows) // dist.get_world_size())
    rank_rows = rows[dist.get_rank() * rows_per_rank :][:rows_per_rank]
    rank_results = rows.new_zeros((rows_per_rank, *rows.shape[1:]))
    rank_results[: len(rank_rows)] = work(rank_rows)
    all_results = [torch.empty_like(rank_results) for _ in range(dist.get_world_size())]
    dist.all_gather(all_results, rank_results)
    return torch.cat(all_results)[: len(rows)]


def broadcast(item: Any, source: int = 0) -> Any:
    """Return the item of rank `source`, on every rank. All ranks call this together."""
    if not has_other_ranks():
        return item
    items = [item]
    dist.broadcast_object_list(items, src=source)
    return items[0]


@contextlib.contextmanager
def lock_folder(folder: Path, context: Context, seconds: int) -> Iterator[None]:
    """Keep other runs out of `folder` in this context. All ranks call this together.

    Rank 0 has the lock. The system releases it when the process ends, however it ends.

    Args:
        folder: what to lock. It is created if it is missing.
        context: this process among the ranks.
        seconds: how long to wait for the lock. A run that is started again waits until the system
            has released that of the run before, which may take time on a network folder.

    Raises:
        RequestError: If another run has the lock. On other ranks than 0 this is SystemExit.
    """
    lock = FileLock(str(folder / ".lock"))
    is_locked = False
    if context.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=seconds)
            is_locked = True
    if not broadcast(is_locked):
        if not context.is_main:
            raise SystemExit(2)
        raise RequestError(
            f"{folder}: another run writes there; wait until it ends, stop it, or name another"
            " folder"
        )
    try:
        yield
    finally:
        lock.release()


def barrier() -> None:
    """Wait until all ranks have come here.

    Raises:
        RuntimeError: If a rank does not come within the timeout (SG_TIMEOUT).
    """
    if has_other_ranks():
        dist.barrier()


def wrap_in_ddp(module: nn.Module) -> nn.Module:
    """Return `module` in DistributedDataParallel, or `module` itself if there is one rank.

    Buckets are small, so that the first ones are exchanged while the rest of the gradient is
    computed. Parameters should be registered in the order of the forward pass.

    `find_unused_parameters` is set for a side effect: the buckets keep their layout. Without it
    they change after the first step, but not at the same step of a resumed run. With three or more
    ranks the ring would then add in another order, and the resumed weights would differ in their
    last bits. Two ranks on CPUs take the same processor time with and without it (20.3 and 20.5 ms
    for a step of 0.1 M weights).
    """
    if not has_other_ranks():
        return module
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    return nn.parallel.DistributedDataParallel(
        module, gradient_as_bucket_view=True, find_unused_parameters=True, bucket_cap_mb=BUCKET_MB
    )


@contextlib.contextmanager
def process_group() -> Iterator[Context]:
    """Join the process group, yield the context of this process, and leave the group afterwards.

    After a failure this rank does not wait for the others, which see that the connection closes.

    Raises:
        RequestError: If the environment is wrong (`join_group`).
        WorkError: If another rank does not come, died or hangs.
    """
    try:
        yield join_group()
    except BaseException as error:
        _abandon_group()
        if not (isinstance(error, RuntimeError) and re.search(LOST_PEER, str(error))):
            raise
        time.sleep(NOTICE_SECONDS)
        rank = os.environ.get("RANK", "0")
        reason = str(error).splitlines()[0]
        raise WorkError(f"rank {rank}: another rank died or hangs ({reason})") from error
    if dist.is_initialized():
        _left_groups.append(dist.distributed_c10d._get_default_group())
        dist.destroy_process_group()
