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
    own = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{clone}.db",
        "NPROC_PER_NODE": "1",
        "DVC_NO_ANALYTICS": "1",
    }
    done = subprocess.run(
        shlex.split(command),
        cwd=clone,
        env={**os.environ, **own, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-5000:]}"
    return done.stdout


def stages_run(said):
    return [name for name in STAGES if f"Running stage '{name}'" in said]


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
    assert stages_run(run(clone, "dvc repro")) == STAGES
    run(clone, "git add -A")
    who = "-c user.name=tests -c user.email=tests@example.org -c commit.gpgsign=false"
    run(clone, f"git {who} commit -q -m 'preset ci, and what it gives'")
    return clone


def test_two_clones_at_different_places_end_with_the_same_bytes(first, tmp_path):
    other = tmp_path / "another name"
    run(first, f"git clone -q . {shlex.quote(str(other))}")
    environment = {"TZ": "Asia/Tokyo", "LANG": "C", "DVC_EXP_NAME": "named-otherwise"}
    said = run(other, "dvc repro --no-run-cache", **environment)
    assert stages_run(said) == STAGES  # nothing was at hand: every byte was computed again
    assert run(other, "git status --porcelain") == ""


def test_another_clone_pulls_what_was_pushed_and_has_nothing_to_run(first, tmp_path):
    other = tmp_path / "other"
    run(first, f"git clone -q . {shlex.quote(str(other))}")
    for clone in (first, other):
        run(clone, f"dvc remote add --local -d store {shlex.quote(str(tmp_path / 'store'))}")
    run(first, "dvc push --run-cache")
    run(other, "dvc pull --run-cache")
    assert (other / "models/superglue.safetensors").is_file()
    assert stages_run(run(other, "dvc repro")) == []
    assert run(other, "git status --porcelain") == ""

    # An export that this clone's lock does not know: another clone has run it already.
    lock = read_yaml(other / "dvc.lock")
    del lock["stages"]["export"]
    with open(other / "dvc.lock", "w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(lock, file)
    said = run(other, "dvc repro")
    assert stages_run(said) == [] and "Stage 'export' is cached - skipping run" in said
    assert read_yaml(other / "dvc.lock") == read_yaml(first / "dvc.lock")
