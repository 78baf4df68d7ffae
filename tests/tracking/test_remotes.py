"""One person trains, others have the same bytes: in another clone, from a remote, from the run
cache.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from reading import read_yaml
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
STAGES = ["fetch", "keypoints", "train", "evaluate", "export"]

pytestmark = pytest.mark.slow


def run(clone, command, **environment):
    """Output of a command in a clone that has an MLflow store of its own. It must not fail."""
    variables = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{clone}.db",
        "NPROC_PER_NODE": "1",
        "DVC_NO_ANALYTICS": "1",
    }
    done = subprocess.run(
        shlex.split(command),
        cwd=clone,
        env={**os.environ, **variables, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-5000:]}"
    return done.stdout


def list_stages_run(output):
    return [name for name in STAGES if f"Running stage '{name}'" in output]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A clone of the working tree with preset `ci`, run and committed."""
    clone = tmp_path_factory.mktemp("first")
    copy = (
        f"git ls-files -zco --exclude-standard | xargs -0 cp --parents -t {shlex.quote(str(clone))}"
    )
    subprocess.run(copy, shell=True, cwd=ROOT)  # a file that git lists may be deleted
    run(clone, "git init -q")
    run(clone, "python -m pipeline.presets use ci")
    assert list_stages_run(run(clone, "dvc repro")) == STAGES
    run(clone, "git add -A")
    settings = "-c user.name=tests -c user.email=tests@example.org -c commit.gpgsign=false"
    run(clone, f"git {settings} commit -q -m 'preset ci, and what it gives'")
    return clone


def test_two_clones_at_different_places_end_with_the_same_bytes(first, tmp_path):
    second = tmp_path / "another name"
    run(first, f"git clone -q . {shlex.quote(str(second))}")
    environment = {"TZ": "Asia/Tokyo", "LANG": "C", "DVC_EXP_NAME": "named-otherwise"}
    output = run(second, "dvc repro --no-run-cache", **environment)
    assert list_stages_run(output) == STAGES  # every byte was computed again
    assert run(second, "git status --porcelain") == ""


def test_another_clone_pulls_what_was_pushed_and_has_nothing_to_run(first, tmp_path):
    second = tmp_path / "second"
    run(first, f"git clone -q . {shlex.quote(str(second))}")
    for clone in (first, second):
        run(clone, f"dvc remote add --local -d store {shlex.quote(str(tmp_path / 'store'))}")
    run(first, "dvc push --run-cache")
    run(second, "dvc pull --run-cache")
    assert (second / "models/superglue.safetensors").is_file()
    assert list_stages_run(run(second, "dvc repro")) == []
    assert run(second, "git status --porcelain") == ""

    # An export that this clone's lock does not know: another clone has run it already.
    lock = read_yaml(second / "dvc.lock")
    del lock["stages"]["export"]
    with open(second / "dvc.lock", "w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(lock, file)
    assert list_stages_run(run(second, "dvc repro")) == []
    assert read_yaml(second / "dvc.lock") == read_yaml(first / "dvc.lock")
