"""The programs of the images: a workspace has one owner, and no image runs the code of another.

docker/ci.sh builds and tries the images, and checks Dockerfiles and compose files.
"""

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from made_containers import PATIENCE, make_workspace, run, start

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"


@pytest.fixture
def import_file(monkeypatch):
    """Import a file of docker/ as the image does, with its folder on the path."""
    monkeypatch.syspath_prepend(str(DOCKER))
    return importlib.import_module


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    return make_workspace(tmp_path, monkeypatch)


def test_make_repro_on_the_host_keeps_containers_away(workspace):
    makefile = ["make", "-n", "-o", ".venv/.set-up", "repro", "PRESET=sample"]
    lines = subprocess.run(makefile, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(re.findall("^python docker/workspace.py .*(presets|dvc repro)", lines, re.M)) == 2
    host = start(workspace, "workspace", "sh", "-c", "echo $$; read end; exit 7")
    assert int(host.stdout.readline()) == host.pid  # no process between
    assert run(workspace, "entrypoint")[0] == 2
    host.communicate("\n", timeout=PATIENCE)
    assert host.returncode == 7
    (workspace / "pipeline/launch.py").write_text("")
    assert run(workspace, "entrypoint")[0] == 0, "the lock outlived its process"


@pytest.mark.parametrize(("command", "is_stale"), [("dvc repro", True), ("sleep 1000", False)])
def test_a_lock_of_dvc_is_removed_unless_that_dvc_is_running(workspace, command, is_stale):
    """Of a killed container: its process id may be alive here, as that of another program."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        entry = {"pid": process.pid, "cmd": command}
        tree = {"write": {"/workspace/checkpoints": entry}, "read": {"/workspace/data": [entry]}}
        rwlock = workspace / ".dvc/tmp/rwlock"
        rwlock.write_text(json.dumps(tree))
        assert run(workspace, "workspace", "true")[0] == 0
        assert rwlock.exists() != is_stale
        process.kill()


def test_an_empty_workspace_gets_the_project_and_no_image_runs_the_code_of_another(
    tmp_path, import_file
):
    workspace = import_file("workspace")
    workspace.copy_project(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*workspace.COPIED}
    assert "no_scm" in (tmp_path / ".dvc/config.local").read_text()
    workspace.require_same_code(tmp_path)
    (tmp_path / "params.yaml").write_text("a: 1\n")
    (tmp_path / "pipeline/gone.py").touch()
    for words in ([], ["match", "a.jpg", "b.jpg"], ["doctor"]):
        code, output = run(tmp_path, "entrypoint", *words)
        assert code == 2 and "pipeline" in output
    shutil.rmtree(tmp_path / "pipeline")
    workspace.copy_project(tmp_path)
    workspace.require_same_code(tmp_path)
    assert (tmp_path / "params.yaml").read_text() == "a: 1\n"
