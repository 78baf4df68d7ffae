"""Collectives in groups of one, two and three processes over gloo."""

import contextlib
import os
import socket
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from processes import CONTEXT, in_group
from waiting import has_ended, wait_until

from pipeline import distributed
from pipeline.distributed import find_free_port
from pipeline.errors import RequestError, WorkError


def collectives(context):
    rank = context.rank
    distributed.barrier()
    return {
        "gathered": distributed.gather_objects({"rank": rank, "items": list(range(rank))}),
        "broadcast": distributed.broadcast(f"from {rank}"),
        "sums": distributed.sum_over_ranks({"loss": 2.0 * rank, "pairs": 1.0}),
        "any": [distributed.is_true_on_any_rank(rank == 0), distributed.is_true_on_any_rank(False)],
        "rows": distributed.map_rows_over_ranks(torch.neg, torch.arange(5)).tolist(),
    }


@pytest.mark.parametrize("count", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_collectives(count):
    ranks = range(count)
    expected = {
        "gathered": [{"rank": rank, "items": list(range(rank))} for rank in ranks],
        "broadcast": "from 0",
        "sums": {"loss": 2.0 * sum(ranks), "pairs": count},
        "any": [True, False],
        "rows": [0, -1, -2, -3, -4],
    }
    alone = [collectives(distributed.join_group())] if count == 1 else None
    assert (alone or in_group(count, collectives)) == [expected] * count


def fail_on_rank_0(rank, port, pids):
    """Rank 0 fails while an exchange waits for rank 1, which does not come; rank 1 tells whether it
    is gone.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with contextlib.suppress(KeyError), distributed.process_group():
        distributed.barrier()
        if rank == 0:
            pids.put(os.getpid())
            torch.distributed.all_reduce(torch.ones(3), async_op=True)
            raise KeyError("an error of rank 0 alone")
        peer = pids.get()
        wait_until(lambda: has_ended(peer), 60)
        pids.put(True)
        os._exit(0)


@pytest.mark.slow
def test_a_rank_that_fails_ends_without_waiting_for_the_others():
    pids = CONTEXT.SimpleQueue()
    port = find_free_port()
    ranks = [
        CONTEXT.Process(target=fail_on_rank_0, args=(rank, port, pids), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=120)
    assert not pids.empty() and pids.get() is True


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("a1,b[2-3]", "a1"),
        ("10.0.0.1", "10.0.0.1"),
        ("rack[0-1]node[03-05]", "rack0node03"),
        ("x[1,3-4]y[2-3],z", "x1y2"),
    ],
)
def test_rank_0_is_on_the_first_host_as_scontrol_counts(nodes, first):
    assert distributed.parse_first_host(nodes) == first


STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "localhost", "SG_START_TIMEOUT": "1",
}  # fmt: skip


def test_a_shell_of_a_job_with_four_tasks_starts_one_process(monkeypatch):
    """SLURM_NTASKS is the job's, and an interactive shell is a step of one task."""
    for name, value in {**STEP, "SLURM_STEP_NUM_TASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    assert distributed.join_group().world_size == 1


@pytest.mark.parametrize(
    ("variables", "error", "name"),
    [
        ({"RANK": "first"}, RequestError, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, RequestError, "RANK"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": ""}, RequestError, "MASTER_ADDR"),
        ({**STEP, "SLURM_PROCID": ""}, RequestError, "SLURM_PROCID"),
        ({**STEP, "MASTER_PORT": "in use"}, RequestError, "MASTER_PORT"),
        (STEP, WorkError, "rank 0 of 4"),  # the other ranks do not come
    ],
)
def test_a_start_that_cannot_succeed_names_the_variable(monkeypatch, variables, error, name):
    with socket.create_server(("", 0)) as listener:
        used_port = listener.getsockname()[1]
        port = used_port if "MASTER_PORT" in variables else find_free_port()
        for variable, value in {**variables, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(variable, value)
        with pytest.raises(error, match=name), distributed.process_group():
            pass


def can_lock(folder):
    """Return whether a run of one process gets the lock of a folder."""
    try:
        with distributed.lock_folder(folder, distributed.Context(0, 1, torch.device("cpu")), 0):
            return True
    except RequestError:
        return False


def test_one_of_two_processes_has_the_lock_of_a_folder(tmp_path):
    with ProcessPoolExecutor(1, CONTEXT) as pool:
        with distributed.lock_folder(tmp_path, distributed.Context(0, 1, torch.device("cpu")), 0):
            assert not pool.submit(can_lock, tmp_path).result()
            assert pool.submit(can_lock, tmp_path / "other").result()
        assert pool.submit(can_lock, tmp_path).result()
