"""Nodes with separate folders: whatever is on their disks, all resume from one state to the same
bytes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import List, Sequence

import pytest

from faults import cells, group
from faults.group import Outcome, digest, wait
from pipeline.train import __main__ as train
from superglue_sift.weights import load_model_file


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return cells.Workbench(tmp_path_factory.mktemp("nodes"))


@pytest.fixture
def nodes(bench) -> List[Path]:
    """The disks of two nodes, empty."""
    folders = [bench.folder / name for name in "ab"]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return folders


def run(
    folders: Sequence[Path],
    arguments: Sequence[str],
    fault: str = "",
    more: Sequence[Sequence[str]] = (),
):
    """A rank on each node, with separate folders; more: arguments of each rank."""
    where = {"WORLD_SIZE": str(len(folders)), "SG_FAULT": fault, **group.rendezvous()}
    pids = []
    for rank, folder in enumerate(folders):
        own = [
            *arguments,
            "--out",
            str(folder / "checkpoints"),
            "--reports",
            str(folder / "reports"),
        ]
        own += more[rank] if more else []
        folder.mkdir(parents=True, exist_ok=True)
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), **where}
        pids.append(
            group.fork(train.main, own, folder / "log", environment=list(environment.items()))
        )
    return wait(pids)


def killed(folders: Sequence[Path], arguments: Sequence[str], step: int) -> Outcome:
    """Training on both until one is killed at `step`."""
    outcome = run(folders, arguments, f"kill:rank=1,step={step},phase=backward")
    assert -9 in outcome.codes and not outcome.hung
    return outcome


def text(folder: Path) -> str:
    return (folder / "log").read_text()


def test_a_training_that_was_killed_goes_on_from_one_step_on_every_node(bench, nodes):
    killed(nodes, bench.arguments(), 5)
    assert run(nodes, bench.arguments()).codes == [0, 0]
    assert "resuming at step 4 of 8" in text(nodes[0])
    assert [digest(folder / "checkpoints") for folder in nodes] == [bench.clean(2)] * 2


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_node_that_returns_with_an_empty_disk_gets_the_state_of_the_other(bench, nodes, lost):
    killed(nodes, bench.arguments(), 5)
    shutil.rmtree(nodes[lost])
    assert run(nodes, bench.arguments()).codes == [0, 0]
    assert "resuming at step 4 of 8" in text(nodes[0])
    assert [digest(folder / "checkpoints") for folder in nodes] == [bench.clean(2)] * 2


@pytest.mark.slow
def test_an_elastic_restart_goes_on_from_the_node_that_went_furthest(bench, nodes):
    """The second node continues alone, then the first returns, as rank 0 again, with its old
    checkpoint.
    """
    arguments = bench.arguments()
    killed(nodes, arguments, 3)
    assert run(nodes[1:], arguments, "term:rank=0,step=5,phase=forward").codes == [143]
    assert run(nodes, arguments).codes == [0, 0]
    assert "resuming at step 6 of 8" in text(nodes[0]) and "resuming at step 2 of 8" in text(
        nodes[1]
    )
    assert digest(nodes[0] / "checkpoints") == digest(nodes[1] / "checkpoints")
    curves = [(folder / "reports" / "curves" / "train.csv").read_bytes() for folder in nodes]
    assert curves[1].count(b"\n") == 5  # a point every other step


@pytest.mark.slow
def test_another_training_on_one_of_the_disks_stays_there(bench, nodes):
    other = bench.arguments((("lr", 0.001),))
    killed(nodes, other, 5)
    (saved,) = (nodes[1] / "checkpoints").glob("*/step-00000004.safetensors")
    before = saved.read_bytes()
    shutil.rmtree(nodes[0])
    assert run(nodes, bench.arguments()).codes == [0, 0]
    assert digest(nodes[0] / "checkpoints") == bench.clean(2)
    assert saved.read_bytes() == before


def test_nodes_with_other_parameters_are_refused_in_one_line(bench, nodes):
    logged = [["--log-every", str(every)] for every in (2, 4)]
    assert run(nodes, bench.arguments(), more=logged).codes == [2, 2]
    (line,) = [
        line for folder in nodes for line in text(folder).splitlines() if line.startswith("error")
    ]
    assert "rank 1 has train.log_every: 4, rank 0 2" in line


def test_replicas_that_differ_end_the_run_before_anything_of_them_is_saved(
    bench, nodes, monkeypatch
):
    from pipeline.train.trainer import Training

    inner = Training._step

    def step(self, *arguments):
        inner(self, *arguments)
        if self.state.step == 5 and self.context.rank == 1:
            # As a flipped bit would
            next(self.state.model.parameters()).data.view(-1)[0] *= 1 + 2**-20

    monkeypatch.setattr(Training, "_step", step)
    assert run(nodes, bench.arguments()).codes == [1, 1]
    lines = [line for folder in nodes for line in text(folder).splitlines() if "differ" in line]
    assert len(lines) == 1 and lines[0].startswith(
        "failed: step 6: weights or optimiser of rank 1 differ"
    )
    assert "Traceback" not in text(nodes[0]) + text(nodes[1])
    monkeypatch.undo()
    assert (
        load_model_file(next((nodes[1] / "checkpoints").glob("*/step-00000004.safetensors")))[1][
            "step"
        ]
        == 4
    )
    assert run(nodes, bench.arguments()).codes == [0, 0]
    assert digest(nodes[0] / "checkpoints") == bench.clean(2)
