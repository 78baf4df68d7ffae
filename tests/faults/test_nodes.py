"""Nodes with separate folders: whatever is on their disks, all resume from one state to the same
bytes.
"""

import shutil

import pytest

from faults.group import begin, digest, rendezvous, wait
from pipeline.train import __main__ as train


@pytest.fixture
def nodes(bench):
    """The disks of two nodes, empty."""
    folders = [bench.folder / name for name in "ab"]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return folders


def run(folders, fault="", *arguments):
    """Exit codes of a rank on each node, with these arguments of each."""
    group = {"WORLD_SIZE": str(len(folders)), "SG_FAULT": fault, **rendezvous()}
    ranks = []
    for rank, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        words = [*arguments[rank], "--out", "checkpoints", "--reports", "reports"]
        variables = {"RANK": str(rank), "LOCAL_RANK": "0", **group}
        ranks.append(begin(train.main, words, folder / "log", folder, **variables))
    return wait(ranks)


def read_log(folder):
    return (folder / "log").read_text()


@pytest.mark.slow
def test_a_node_whose_disk_is_empty_gets_the_state_of_the_other(bench, nodes):
    arguments = [bench.arguments()] * 2
    assert -9 in run(nodes, "kill:rank=1,step=5,phase=backward", *arguments)
    shutil.rmtree(nodes[1])
    assert run(nodes, "", *arguments) == [0, 0]
    assert "step 4 of 8" in read_log(nodes[0])
    assert "step 4 of 8" in read_log(nodes[1])  # Its user sees that it trains
    assert [digest(folder / "checkpoints") for folder in nodes] == [bench.clean(2)] * 2


@pytest.mark.slow
def test_an_elastic_restart_goes_on_from_the_node_that_went_furthest(bench, nodes):
    """The second node continues alone, then the first returns, as rank 0 again, with its old
    checkpoint.
    """
    arguments = [bench.arguments()] * 2
    assert -9 in run(nodes, "kill:rank=1,step=3,phase=backward", *arguments)
    assert run(nodes[1:], "term:rank=0,step=5,phase=forward", *arguments) == [143]
    assert run(nodes, "", *arguments) == [0, 0]
    assert "step 6 of 8" in read_log(nodes[0])
    assert "step 2 of 8" in read_log(nodes[1])
    assert digest(nodes[0] / "checkpoints") == digest(nodes[1] / "checkpoints")
    curve = (nodes[1] / "reports/curves/train.csv").read_bytes()
    assert curve.count(b"\n") == 5  # a point every other step


@pytest.mark.slow
def test_nodes_with_different_parameters_are_refused_in_one_line(bench, nodes):
    assert run(nodes, "", *(bench.arguments((("log_every", n),)) for n in (2, 4))) == [2, 2]
    lines = "".join(map(read_log, nodes)).splitlines()
    (line,) = [line for line in lines if line.startswith("error")]
    assert "log_every" in line
