"""The one home of torch.distributed: joining the group, and every collective the project uses.

Each function does the right thing in a single process without a group, so that callers never ask.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import os
import re
import uuid
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import compat
from pipeline.errors import AGENT_PID, EXIT_FOLDER, RequestError
from pipeline.processes import signals
from superglue_sift.torch_compat import exact_float32

# A rendezvous or a collective that takes longer is a dead peer; SG_TIMEOUT sets another.
TIMEOUT_SECONDS = 120
BUCKET_MB = 4  # docs/performance.md has the step time beside that of torch's 25 on a slow link


@dataclasses.dataclass(frozen=True)
class Context:
    """Who this process is among the processes of the run."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def _integer(name: str, fallback: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else fallback
    except ValueError:
        raise RequestError(f"environment {name}={text!r}: must be a whole number") from None


def _adopt_slurm() -> None:
    """`srun python -m pipeline.train` names ranks in SLURM's variables; torchrun's have precedence."""
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    # SLURM_PROCID alone is also set inside an sbatch script that starts torchrun or one process itself
    if "RANK" in os.environ or "SLURM_STEP_ID" not in os.environ or _integer("SLURM_NTASKS", 1) < 2:
        return
    for ours, theirs in names.items():
        os.environ[ours] = os.environ[theirs]
    # rank 0 is on the first node of its step; the job may have been started from a login node
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    os.environ.setdefault("MASTER_ADDR", first_host(nodes))
    os.environ.setdefault("MASTER_PORT", str(20000 + _integer("SLURM_JOB_ID", 0) % 20000))


def first_host(nodes: str) -> str:
    """The first of SLURM's list of nodes: gpu07 of `gpu[07-09,12],login1`, as `scontrol show hostnames` has it.

    Without that command, which an image does not have.
    """
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])


def start() -> Context:
    """Join the process group named by torchrun's (or SLURM's) environment; without one, stand alone.

    NCCL carries GPU tensors, gloo CPU ones and everything that is not a tensor; with torch 1.10 NCCL carries all.

    Raises:
        RequestError: an environment variable is not a number.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun: left alone this rank would hold its GPU for ever, and write beside the next run
        signals.end_with_parent(parent=_integer(AGENT_PID, os.getppid()))
    _adopt_slurm()
    rank, world_size = _integer("RANK", 0), _integer("WORLD_SIZE", 1)
    local_rank = _integer("LOCAL_RANK", 0)
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        exact_float32()
    else:
        device = torch.device("cpu")
    if world_size > 1:
        dist.init_process_group(compat.backend(device.type), timeout=_timeout())
    return Context(rank, world_size, local_rank, device)


def finish() -> None:
    """Leave the group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        _kept_group()
        dist.destroy_process_group()


def _kept_group() -> Any:
    """The default group, whose destructor will never run.

    It joins gloo's threads. After a failure these may wait for other ranks; and DistributedDataParallel, where it holds
    the last reference, runs it with Python's lock held, which a thread may need to let go of the last barrier's
    tensors: the end of a finished training then hangs, once in some hundred times.
    """
    group = dist.distributed_c10d._get_default_group()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return group


def abandon() -> None:
    """Leave the group after a failure, without waiting for collectives that other ranks may never join.

    They see the connection close as soon as this process ends.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    group = _kept_group()
    if torch.cuda.is_available() and hasattr(group, "_get_backend"):
        nccl = group._get_backend(torch.device("cuda"))
        if hasattr(nccl, "abort"):
            nccl.abort()


def _timeout() -> datetime.timedelta:
    return datetime.timedelta(seconds=_integer("SG_TIMEOUT", TIMEOUT_SECONDS))


def write_heartbeat(step: int) -> None:
    """Tell the launcher which step this rank has come to, in case it is never heard of again."""
    folder = os.environ.get(EXIT_FOLDER)
    if folder:
        with open(os.path.join(folder, f"{os.environ.get('LOCAL_RANK', '0')}.step"), "w") as file:
            file.write(str(step))


def lost_peer(error: BaseException) -> bool:
    """Is this the failure of a collective because another rank is gone or hangs?"""
    signs = ("Connection closed by peer", "Connection reset", "Broken pipe", "imed out", "imeout", "NCCL", "gloo")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def several() -> bool:
    """Is there another rank?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum over ranks, in place and returned; not differentiable."""
    if several():
        dist.all_reduce(tensor)
    return tensor


class _DifferentiableSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        # every rank's output depends on this rank's input: its gradient is the sum of all of theirs
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


def differentiable_sum(tensor: Tensor) -> Tensor:
    """Sum over ranks through which gradients flow (for synchronised batch statistics)."""
    return _DifferentiableSum.apply(tensor) if several() else tensor


def weighted_means(sums: Mapping[str, float], weight: float) -> Dict[str, float]:
    """Means over ragged shards: every rank's sums over every rank's weight; 0 where that is 0.

    One collective of float64; the same names on every rank.
    """
    names = sorted(sums)
    own = [float(value) for value in (weight, *(sums[name] for name in names))]
    packed = torch.tensor(own, dtype=torch.float64, device=_collective_device())
    whole, *totals = all_reduce_sum(packed).tolist()
    return {name: total / whole if whole else 0.0 for name, total in zip(names, totals)}


def any_rank(flag: Callable[[], bool]) -> Callable[[], bool]:
    """True on every rank when it is true on one; asked for by calling the result.

    On GPUs the flag is read and sent off now, so that the exchange runs beside the work until the answer is asked for.
    On CPUs, and alone, it is read only then.
    """
    if not several():
        return flag

    def exchanged() -> Callable[[], bool]:
        packed = torch.tensor([float(flag())], device=_collective_device())
        work: Any = dist.all_reduce(packed, op=dist.ReduceOp.MAX, async_op=True)

        def answer() -> bool:
            work.wait()
            return bool(packed.item())

        return answer

    return exchanged() if torch.cuda.is_available() else lambda: exchanged()()


def all_gather(item: Any) -> List[Any]:
    """The item of every rank, in rank order; any object the standard library can serialise between processes."""
    if not several():
        return [item]
    items: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def all_gather_tensor(tensor: Tensor) -> Tensor:
    """(W, ...) the tensors of all ranks, of one shape, in rank order."""
    if not several():
        return tensor.unsqueeze(0)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def map_rows_over_ranks(work: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """`work(rows)`, which does each row (K, ...) by itself and keeps its shape: every rank does a part, and has all."""
    if not several():
        return work(rows)
    each = -(-len(rows) // dist.get_world_size())
    own = rows[dist.get_rank() * each :][:each]
    done = torch.zeros_like(rows[:1]).repeat(each, *[1] * (rows.dim() - 1))
    done[: len(own)] = work(own)
    return all_gather_tensor(done).flatten(0, 1)[: len(rows)]


def broadcast(item: Any, source: int = 0) -> Any:
    """The item of rank `source`, on every rank."""
    if not several():
        return item
    box = [item]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def broadcast_tensors(tensors: Mapping[str, Tensor], source: int) -> Dict[str, Tensor]:
    """The tensors of rank `source` by name, on every rank and on the host."""
    if not several():
        return dict(tensors)
    shapes = broadcast({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, source)
    own, device, received = dist.get_rank() == source, _collective_device(), {}
    for name, (dtype, shape) in shapes.items():
        there = tensors[name].to(device) if own else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(there.contiguous(), src=source)
        received[name] = there.cpu()
    return received


def all_equal(number: int) -> bool:
    """Is it the same on every rank? One collective."""
    if not several():
        return True
    both = torch.tensor([number, -number], device=_collective_device())  # the maximum of -x is the minimum of x
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    most, least = both.tolist()
    return most == -least


def writes(folder: Path, context: Context) -> bool:
    """Is this rank the first of those that see `folder`, and so the one that writes there?

    Rank 0 is, and the first rank of each node that has a folder of its own under this name. All ranks call it. Raises
    OSError: rank 0 cannot write there.
    """
    name = broadcast(uuid.uuid4().hex)  # a name that no file system has cached as missing
    marks = [folder / f".{name}-{rank}.tmp" for rank in range(context.world_size)]
    with contextlib.suppress(*(() if context.is_main else (OSError,))):
        folder.mkdir(parents=True, exist_ok=True)
        marks[context.rank].touch()
    barrier()
    first = next((rank for rank, mark in enumerate(marks) if mark.exists()), None)
    barrier()
    with contextlib.suppress(OSError):
        marks[context.rank].unlink()
    return first == context.rank


def barrier() -> None:
    """Wait for all ranks; a rank that does not come within the time-out is an error and not a hang."""
    if several():
        dist.barrier()


def _collective_device() -> torch.device:
    return torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")


def wrap(module: nn.Module) -> nn.Module:
    """DistributedDataParallel around `module` in a group of several; `module` itself otherwise.

    Buckets are small, so that the first are exchanged while the rest of the gradient is still being computed; the
    module's order of parameters should be that in which they work. `find_unused_parameters` is set for what it does
    beside: the gradient's buckets stay as they were laid out. Otherwise they are laid out again after the first step, a
    resumed run starts from the first layout again, and from three ranks on the ring adds in another order: the resumed
    weights differ in their last bits.
    """
    if not several():
        return module
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    return nn.parallel.DistributedDataParallel(
        module, gradient_as_bucket_view=True, find_unused_parameters=True, bucket_cap_mb=BUCKET_MB
    )


@contextlib.contextmanager
def process_group() -> Iterator[Context]:
    """Within, this process is one of its group: `start`, then `finish`, or `abandon` when the work fails."""
    context = start()
    try:
        yield context
    except BaseException:
        abandon()
        raise
    finish()
