"""The launcher: how many processes, which options of torchrun, wrong requests."""

import socket

import pytest
from reading import read_error

from pipeline import errors, launch
from pipeline.distributed import find_free_port


def test_a_node_has_a_process_for_each_gpu_or_two(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("NPROC_PER_NODE", "3")
    assert launch.count_processes_per_node() == 3
    for gpus, processes in ((0, 2), (4, 4)):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        monkeypatch.setenv("NPROC_PER_NODE", "auto")
        assert launch.count_processes_per_node() == processes


def make_options():
    """The options of torchrun in this environment."""
    return set(launch.make_torchrun_options(2, restarts=3))


def test_options_of_one_node_and_of_several(monkeypatch):
    port = str(find_free_port())
    monkeypatch.setenv("MASTER_PORT", port)
    options = make_options()
    assert {"--nnodes=1", "--master_addr=127.0.0.1", "--max_restarts=0"} <= options
    assert f"--master_port={port}" in options
    assert not any("-per-" in option for option in options)  # torch 1.10 knows underscores alone
    job = {"NNODES": "1:2", "RDZV_ENDPOINT": "head:29400", "LOCAL_ADDR": "head"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    options = make_options()
    assert {"--nnodes=1:2", "--rdzv_endpoint=head:29400", "--max_restarts=3"} <= options
    assert "--rdzv_conf=is_host=true" in options and launch.read_min_nodes() == 1


@pytest.mark.parametrize(
    ("call", "variables", "name"),
    [
        (lambda: launch.main(["pipeline.export"]), {}, "pipeline.export"),
        (lambda: launch.main(["pipeline.train", "--params", "none.yaml"]), {}, "none.yaml"),
        (launch.count_processes_per_node, {"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE"),
        (launch.count_processes_per_node, {"NPROC_PER_NODE": "5"}, "NPROC_PER_NODE"),  # of 4 GPUs
        (launch.read_min_nodes, {"NNODES": "1:2:3"}, "NNODES"),
        (make_options, {"NNODES": "2", "RDZV_ENDPOINT": "head"}, "RDZV_ENDPOINT"),
        (make_options, {"MASTER_PORT": "in use"}, "MASTER_PORT"),
        (make_options, {"MASTER_ADDR": "203.0.113.7"}, "MASTER_ADDR"),  # nobody's
    ],
)
def test_a_wrong_request_is_named_before_any_process_starts(
    monkeypatch, capsys, call, variables, name
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(launch, "run_stage", None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        used_port = str(listener.getsockname()[1])
        for variable, value in variables.items():
            monkeypatch.setenv(variable, used_port if value == "in use" else value)
        assert errors.run(lambda _: call()) == 2
    assert name in read_error(capsys)
