"""One person trains, others have the same bytes: in another clone, from a remote, from the run
cache.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from reading import read_yaml
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.executable)
STAGES = ["fetch", "keypoints", "train", "evaluate", "export"]

pytestmark = pytest.mark.slow


class Clone:
    """A clone with a separate MLflow store and cache, as on another machine."""

    def __init__(self, folder):
        self.folder = folder

    @classmethod
    def of(cls, other, folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "-q", str(other.folder), str(folder)], check=True)
        return cls(folder)

    def run(self, *command, **environment):
        """Output of a command that must not fail."""
        path = f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"
        store = f"sqlite:///{self.folder.parent / (self.folder.name + '.db')}"
        own = {
            "PATH": path,
            "MLFLOW_TRACKING_URI": store,
            "NPROC_PER_NODE": "1",
            "DVC_NO_ANALYTICS": "1",
        }
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **own, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said = done.stdout.decode("utf-8", "replace")
        assert done.returncode == 0, f"{' '.join(command)}\n{said[-5000:]}"
        return said

    def dvc(self, *words, **environment):
        return self.run(str(PYTHON), "-m", "dvc", *words, **environment)

    def commit(self, message):
        self.run("git", "add", "-A")
        who = "-c user.name=tests -c user.email=tests@example.org -c commit.gpgsign=false"
        self.run("git", *who.split(), "commit", "-q", "-m", message)

    def changed(self):
        return self.run("git", "status", "--porcelain")

    def lock(self):
        return read_yaml(self.folder / "dvc.lock")


def stages_run(said):
    return [name for name in STAGES if f"Running stage '{name}'" in said]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A clone of the working tree with preset `ci`, run and committed."""
    folder = tmp_path_factory.mktemp("first") / "clone"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    clone = Clone(folder)
    clone.run("git", "init", "-q")
    clone.run(str(PYTHON), "-m", "pipeline.presets", "use", "ci")
    assert stages_run(clone.dvc("repro")) == STAGES
    clone.commit("preset ci, and what it gives")
    return clone


def test_two_clones_at_different_places_end_with_the_same_bytes(first, tmp_path):
    other = Clone.of(first, tmp_path / "elsewhere/another name")
    said = other.dvc(
        "repro", "--no-run-cache", TZ="Asia/Tokyo", LANG="C", DVC_EXP_NAME="named-otherwise"
    )
    assert stages_run(said) == STAGES  # nothing was at hand: every byte was computed again
    assert other.lock() == first.lock()
    assert other.changed() == ""


def test_another_clone_pulls_what_was_pushed_and_has_nothing_to_run(first, tmp_path):
    other = Clone.of(first, tmp_path / "other")
    for clone in (first, other):
        clone.dvc("remote", "add", "--local", "-d", "store", str(tmp_path / "store"))
    first.dvc("push", "--run-cache")
    other.dvc("pull", "--run-cache")
    assert (other.folder / "models/superglue.safetensors").is_file()
    assert stages_run(other.dvc("repro")) == []
    assert other.changed() == ""

    # An export that this clone's lock does not know: another has run it already.
    lock = other.lock()
    del lock["stages"]["export"]
    with open(other.folder / "dvc.lock", "w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(lock, file)
    said = other.dvc("repro")
    assert stages_run(said) == [] and "Stage 'export' is cached - skipping run" in said
    assert other.lock() == first.lock()
