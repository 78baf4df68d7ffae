"""The launcher: how many processes, which options of torchrun, wrong requests."""

import socket

import pytest
from reading import read_error

from pipeline import errors, launch
from pipeline.distributed import find_free_port


def test_number_of_processes(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("NPROC_PER_NODE", "3")
    assert launch.count_processes_per_node() == 3
    for gpus, processes in ((0, 2), (4, 4)):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        monkeypatch.setenv("NPROC_PER_NODE", "auto")
        assert launch.count_processes_per_node() == processes


def options():
    """The options of torchrun in this environment."""
    return set(launch.make_torchrun_options(2, restarts=3))


def test_options_of_one_node_and_of_several(monkeypatch):
    port = str(find_free_port())
    monkeypatch.setenv("MASTER_PORT", port)
    one = options()
    assert {"--nnodes=1", "--master_addr=127.0.0.1", "--max_restarts=0"} <= one
    assert f"--master_port={port}" in one
    assert not any("-per-" in part for part in one)  # torch 1.10 knows underscores alone
    job = {"NNODES": "1:2", "RDZV_ENDPOINT": "head:29400", "LOCAL_ADDR": "head"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    two = options()
    assert {"--nnodes=1:2", "--rdzv_endpoint=head:29400", "--max_restarts=3"} <= two
    assert "--rdzv_conf=is_host=true" in two and launch.read_min_nodes() == 1


@pytest.mark.parametrize(
    ("ask", "variables", "said"),
    [
        (lambda: launch.main(["pipeline.export"]), {}, "'pipeline.export' cannot be launched"),
        (lambda: launch.main(["pipeline.train", "--params", "none.yaml"]), {}, "none.yaml: "),
        (
            launch.count_processes_per_node,
            {"NPROC_PER_NODE": "0"},
            "NPROC_PER_NODE='0': must be a whole",
        ),
        (launch.count_processes_per_node, {"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE='two'"),
        (
            launch.count_processes_per_node,
            {"NPROC_PER_NODE": "5"},
            "NPROC_PER_NODE=5, but GPUs here: 4",
        ),
        *(
            (launch.read_min_nodes, {"NNODES": n}, f"NNODES='{n}'")
            for n in ("0", "a", "1:2:3", ":2")
        ),
        (options, {"NNODES": "2", "RDZV_ENDPOINT": "head"}, "needs RDZV_ENDPOINT=host:port"),
        (options, {"MASTER_PORT": "taken"}, "in use"),
        (options, {"MASTER_PORT": "70000"}, "MASTER_PORT=70000: cannot be used"),
        (options, {"MASTER_ADDR": "203.0.113.7"}, "MASTER_ADDR=203.0.113.7"),  # nobody's
        (options, {"MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR=no-such-host.invalid"),
    ],
)
def test_a_wrong_request_is_one_line_before_any_process_starts(
    monkeypatch, capsys, ask, variables, said
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(launch, "run_stage", None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        for name, value in variables.items():
            taken = str(other.getsockname()[1])
            monkeypatch.setenv(name, taken if value == "taken" else value)
        assert errors.run(lambda _: ask()) == 2
    assert said in read_error(capsys)
