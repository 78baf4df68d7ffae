"""A stop and a kill of the entrypoint of the images."""

import os
import signal

import pytest
from made_containers import PATIENCE, make_workspace, run, start
from waiting import wait_until


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    return make_workspace(tmp_path, monkeypatch)


@pytest.fixture
def training(workspace):
    """An entrypoint whose trainer is at work."""
    process = start(workspace, "entrypoint")
    wait_until((workspace / "started").exists)
    yield process
    if process.poll() is None:
        process.terminate()
        process.communicate(timeout=PATIENCE)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_stop_reaches_the_trainer_although_dvc_may_be_killed(
    training, workspace, tmp_path, is_killed
):
    training.terminate()
    assert "SIGTERM" in training.stdout.readline()
    if is_killed:  # by a scheduler that signals every process
        os.kill(int((tmp_path / "dvc.pid").read_text()), signal.SIGKILL)
    out, _ = training.communicate(timeout=PATIENCE)
    assert training.returncode == 143 and "dvc got SIGTERM" not in out
    assert (workspace / "checkpoint").read_text() == "saved"


def test_a_second_run_is_refused_also_after_a_kill_of_the_entrypoint(training, workspace, tmp_path):
    for program, *words in (("entrypoint",), ("workspace", "touch", "written")):
        code, output = run(workspace, program, *words)
        assert code == 2 and f"process {training.pid}," in output
    assert not (workspace / "written").exists()
    # the trainer outlives the entrypoint, and so does the lock
    training.kill()
    training.wait(timeout=PATIENCE)
    try:
        assert run(workspace, "entrypoint")[0] == 2
    finally:
        os.killpg(int((tmp_path / "dvc.pid").read_text()), signal.SIGKILL)
