"""torch.distributed: joining the process group, and every collective that the project uses.

Each function also works in a single process without a group.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import errno
import fcntl
import gc
import math
import os
import re
import socket
import time
import uuid
import warnings
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional

import torch
import torch.distributed as dist

# This import comes first, because its functions keep the group that exists when it is imported.
import torch.distributed.nn
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
LOCK = ".lock"  # the file in a folder that its writer locks
NOTICE_SECONDS = 2  # time for torchrun to see which rank was killed, before the other ranks end
# One of these stands in the message of a collective when another rank is gone or hangs.
LOST_PEER = "Connection (closed by peer|reset)|Broken pipe|[Tt]imed out|[Tt]imeout|NCCL|gloo"
# MiB; on a slow link this is faster than torch's 25.
BUCKET_MB = 4


class Context(NamedTuple):
    """This process among the processes of the run."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def _adopt_slurm_variables() -> None:
    """Use SLURM's variables as ranks (`srun python -m pipeline.train`).

    The variables of torchrun have precedence.
    """
    # SLURM_PROCID alone is also set inside an sbatch script that starts torchrun or one process
    # itself. SLURM_NTASKS belongs to the job, whose interactive shell is a step of one task.
    tasks = read_environment_number(
        "SLURM_STEP_NUM_TASKS", read_environment_number("SLURM_NTASKS", 1)
    )
    if "RANK" in os.environ or "SLURM_STEP_ID" not in os.environ or tasks < 2:
        return
    # Set the names that torch reads.
    os.environ["RANK"] = str(read_environment_number("SLURM_PROCID"))
    os.environ["WORLD_SIZE"] = str(tasks)
    os.environ["LOCAL_RANK"] = str(read_environment_number("SLURM_LOCALID"))
    # Rank 0 runs on the first node of its step. The job may have been started on a login node.
    job = os.environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
    os.environ.setdefault(
        "MASTER_ADDR", parse_first_host(os.environ.get("SLURM_STEP_NODELIST", job))
    )
    os.environ.setdefault(
        "MASTER_PORT", str(20000 + read_environment_number("SLURM_JOB_ID", 0) % 20000)
    )


def parse_first_host(nodes: str) -> str:
    """Return the first host in SLURM's list of nodes: gpu07 for `gpu[07-09,12],login1`.

    `scontrol show hostnames` does the same, but images do not have it.
    """
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])


def find_free_port(address: str = "127.0.0.1", port: int = 0) -> int:
    """Return `port` if it is free at an address of this machine, or any free port if it is 0.

    The address "" stands for all addresses. Raises RequestError if the port is in use, or if the
    address belongs to another machine.
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
    """Return the port at which the ranks meet. Raises RequestError if no address is set."""
    if not os.environ.get("MASTER_ADDR"):
        raise RequestError(
            f"environment WORLD_SIZE={world_size}: needs MASTER_ADDR and MASTER_PORT, the address"
            " of rank 0; `python -m pipeline.launch` sets them"
        )
    return read_environment_number("MASTER_PORT", least=1, most=LARGEST_PORT)


def join_group() -> Context:
    """Join the process group that the environment of torchrun (or SLURM) names, if there is one.

    NCCL carries GPU tensors, and gloo carries CPU tensors and other objects. With torch 1.10 NCCL
    carries everything.

    Raises:
        RequestError: an environment variable is not a number, or the port is in use.
        WorkError: the other ranks do not come.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if by_torchrun:
        # Without torchrun this rank would hold its GPU for ever. It would also write into the
        # folder of the next run.
        workers.end_with_parent()
    _adopt_slurm_variables()

    # Each rank of this machine has a device of its own.
    rank = read_environment_number("RANK", 0)
    world_size = read_environment_number("WORLD_SIZE", 1, least=1)
    if rank >= world_size:
        raise RequestError(f"environment RANK={rank}: must be below WORLD_SIZE ({world_size})")
    if torch.cuda.is_available():
        device = torch.device(
            "cuda", read_environment_number("LOCAL_RANK", 0) % torch.cuda.device_count()
        )
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False  # see `weights.choose_device`
    else:
        device = torch.device("cpu")

    # The ranks meet in a store of rank 0, or of torchrun, and then form the group.
    if world_size > 1:
        port = _read_meeting_port(world_size)
        if rank == 0 and not by_torchrun:
            find_free_port("", port)
        meeting = datetime.timedelta(
            seconds=read_environment_number("SG_START_TIMEOUT", START_SECONDS)
        )
        waiting = datetime.timedelta(seconds=read_environment_number("SG_TIMEOUT", TIMEOUT_SECONDS))
        try:
            store = next(iter(rendezvous("env://", rank, world_size, timeout=meeting)))[0]
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WorkError(
                f"rank {rank} of {world_size}: the others did not come within"
                f" {meeting.seconds} s (SG_START_TIMEOUT): {reason}"
            ) from error
        dist.init_process_group(
            torch_compat.choose_backend(device.type),
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=waiting,
        )
    return Context(rank, world_size, device)


_left_groups: List[Any] = []  # groups that this process has left; `_join_threads` releases them


@atexit.register
def _join_threads() -> None:
    """Release the groups at the one moment when it is safe.

    The destructor of a group joins gloo's threads. A thread may still need the GIL to free the
    tensors of the last collective. Earlier, DistributedDataParallel may have the last reference,
    and its destructor holds the GIL, so a finished training hangs. Later, Python ends a thread that
    asks for the GIL, which C++ answers with an abort. Each happened about once in some hundred
    runs.
    """
    gc.collect()  # DistributedDataParallel is part of reference cycles
    _left_groups.clear()  # this is the last reference, and clearing it releases the GIL first


def _abandon_group() -> None:
    """Leave the group after a failure, without waiting for the other ranks."""
    if not dist.is_initialized():
        return
    group = dist.distributed_c10d._get_default_group()
    # The group is never released, because its destructor joins gloo's threads. These may wait for
    # other ranks.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    if torch.cuda.is_available() and hasattr(group, "_get_backend"):
        nccl = group._get_backend(torch.device("cuda"))
        if hasattr(nccl, "abort"):
            nccl.abort()


def has_other_ranks() -> bool:
    """Return whether there are other ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


def sum_with_gradient(tensor: Tensor) -> Tensor:
    """Sum a tensor over ranks. Gradients flow through the sum, as batch normalization needs."""
    if not has_other_ranks():
        return tensor
    return torch.distributed.nn.functional.all_reduce(tensor, group=dist.group.WORLD)


def sum_over_ranks(sums: Mapping[str, float]) -> Dict[str, float]:
    """Return the sums over all ranks, in float64. Every rank has the same names."""
    if not has_other_ranks() or not sums:
        return dict(sums)
    # (names,): all sums are in one tensor, so one collective exchanges them
    names = sorted(sums)
    # With torch 1.10 NCCL is the only backend, and carries tensors of GPUs.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    packed = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(packed)
    return dict(zip(names, packed.tolist()))


def is_true_on_any_rank(flag: bool) -> bool:
    """Return whether the flag is True on any of the ranks."""
    return bool(sum_over_ranks({"flag": flag})["flag"])


def all_gather(item: Any) -> List[Any]:
    """Return the item of every rank, in the order of ranks.

    An item is any object that pickle can send between processes.
    """
    if not has_other_ranks():
        return [item]
    items: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def map_rows_over_ranks(work: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Compute `work(rows)`, where the ranks share the rows (K, ...).

    `work` must treat rows independently and keep their shapes.
    """
    if not has_other_ranks():
        return work(rows)
    # Every rank gets `count` rows, K / ranks rounded up. The last rows may be padding.
    count = -(-len(rows) // dist.get_world_size())
    part = rows[dist.get_rank() * count :][:count]
    done = rows.new_zeros((count, *rows.shape[1:]))
    done[: len(part)] = work(part)
    parts = [torch.empty_like(done) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, done)
    return torch.cat(parts)[: len(rows)]


def broadcast(item: Any, source: int = 0) -> Any:
    """Return the item of rank `source`, on every rank."""
    if not has_other_ranks():
        return item
    box = [item]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def run_on_main(work: Callable[[], Any], is_main: bool) -> Any:
    """Return the result of `work()` on rank 0, on every rank. All ranks call this together.

    If it raises RequestError, rank 0 raises that error, and the other ranks SystemExit.
    """
    outcome: Any = None
    if is_main:
        try:
            outcome = work()
        except RequestError as error:
            outcome = error
    outcome = broadcast(outcome)
    if not isinstance(outcome, RequestError):
        return outcome
    if is_main:
        raise outcome
    raise SystemExit(2)


def elect_writer(folder: Path, context: Context) -> bool:
    """Return whether this rank writes to `folder`. All ranks call this together.

    The first rank of those that share a folder writes. These are rank 0, and the first rank of each
    node that has a folder of its own under this name. Raises OSError if rank 0 cannot write there.
    """
    name = broadcast(uuid.uuid4().hex)  # a new name, which no file system has cached as missing
    # Each rank leaves a mark. A rank that sees the mark of a lower rank shares its folder.
    marks = [folder / f".{name}-{rank}.rank" for rank in range(context.world_size)]
    with contextlib.suppress(*(() if context.is_main else (OSError,))):
        folder.mkdir(parents=True, exist_ok=True)
        marks[context.rank].touch()
    barrier()
    first = next((rank for rank, mark in enumerate(marks) if mark.exists()), None)
    barrier()
    with contextlib.suppress(OSError):
        marks[context.rank].unlink()
    return first == context.rank


@contextlib.contextmanager
def lock_folder(folder: Path, context: Context, seconds: int) -> Iterator[bool]:
    """Keep other runs out of `folder`, and say whether this rank writes there (`elect_writer`).

    The system releases the lock when the process that holds it ends, however it ends. All ranks
    call this together.

    Args:
        seconds: how long to wait for the lock. A run that is started again waits until the system
            has released that of the run before, which may take time on a network folder.

    Raises:
        RequestError: another run has the lock. On other ranks than 0 this is SystemExit.
    """
    is_writer = elect_writer(folder, context)
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(_lock_file(folder / LOCK, seconds)) if is_writer else None
        holders = [name for name in all_gather(holder) if name is not None]
        if holders and not context.is_main:
            raise SystemExit(2)
        if holders:
            raise RequestError(
                f"{folder}: another run writes there ({holders[0]}); wait until it ends, stop it,"
                " or name another folder"
            )
        yield is_writer


@contextlib.contextmanager
def _lock_file(path: Path, seconds: int) -> Iterator[Optional[str]]:
    """Lock a file. Yield None, or the name of the process that has the lock already.

    It is a POSIX lock, which belongs to this process alone: processes that load batches do not
    inherit it. It also holds between the nodes of a network folder. On a file system without locks
    it does nothing.
    """
    deadline = time.monotonic() + seconds
    with path.open("a+", encoding="utf-8") as stream:
        while not _try_to_lock(stream):
            if time.monotonic() > deadline:
                stream.seek(0)
                yield stream.read() or "an unknown process"
                return
            time.sleep(0.2)
        # The message of another process has the name of this one.
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}")
        stream.flush()
        try:
            yield None
        finally:
            stream.truncate(0)


def _try_to_lock(stream: IO[str]) -> bool:
    """Try to lock a file, and return False if another process has locked it."""
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Any other error says that this file system has no locks.
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def copy_from_main(tensors: Dict[str, Tensor]) -> float:
    """Replace the values of tensors by those of rank 0, in place, on every rank.

    Each rank has tensors of the same shapes. Returns the norm of this rank's change, divided by the
    norm of rank 0's values.
    """
    change = 0.0
    size = 0.0
    for _, tensor in sorted(tensors.items()):
        if not (has_other_ranks() and tensor.is_floating_point()):
            continue
        main = tensor.detach().clone()
        dist.broadcast(main, 0)
        change += float((main - tensor.detach()).double().square().sum())
        size += float(main.double().square().sum())
        tensor.detach().copy_(main)
    return math.sqrt(change / size) if size else 0.0


def barrier() -> None:
    """Wait for all ranks. Raises RuntimeError after the timeout (SG_TIMEOUT)."""
    if has_other_ranks():
        dist.barrier()


def wrap_in_ddp(module: nn.Module) -> nn.Module:
    """Wrap `module` in DistributedDataParallel if there are several ranks. Else return `module`.

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
    """Give the context of a process in its group, and leave the group afterwards.

    After a failure it does not wait for the other ranks, which see that the connection closes.
    Raises WorkError if another rank died or hangs.
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
