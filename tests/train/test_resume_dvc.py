"""The same under DVC itself: what `dvc repro -f`, `dvc checkout` and `dvc exp run` do to a training
that was killed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_params import file_of, words_of
from made_trainings import SMALL, home, newest, read_weights
from made_views import made_keypoints
from ruamel.yaml import YAML

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STAGE = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"][
    "train"
]
KILL = "kill:rank=0,step=5,phase=forward"  # after the checkpoint of step 4


class Clone:
    """A clone with the stage `train` of dvc.yaml, on synthetic views."""

    def __init__(self, folder, make_params):
        self.folder = folder
        self.make_params = make_params
        made_keypoints(folder / "data" / "keypoints")
        stage = {
            **STAGE,
            "cmd": f"{sys.executable} -m pipeline.train",  # in one process: a kill is a kill
            "deps": ["data/keypoints"],
        }
        (folder / "dvc.yaml").write_text(json.dumps({"stages": {"train": stage}}))  # JSON is YAML
        (folder / ".gitignore").write_text(
            "/data\n/checkpoints\n/reports/*/curves\n*.log\n*.jsonl\nmlflow.db\nrun.json\n"
        )
        self.params()
        for command in (["git", "init", "-q"], self.dvc_command("init", "-q")):
            subprocess.run(command, cwd=folder, check=True, env=self.environment())
        self.commit()

    def environment(self, **more):
        names = {
            f"GIT_{who}_{what}": "t@t"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        store = {
            "MLFLOW_TRACKING_URI": f"sqlite:///{self.folder / 'mlflow.db'}",
            "DVC_NO_ANALYTICS": "true",
        }
        path = f"{ROOT}/tests/faults/start:{ROOT}"
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRAIN_OPTIONS": self.options}
        return {**os.environ, **names, **store, **own, **more}

    def params(self, **keys):
        """Write params.yaml with these keys of `train`."""
        sections = {
            "train": self.make_params("train", **{**SMALL, **keys}).model_dump(),
            "keypoints": self.make_params("keypoints").model_dump(),
        }
        (self.folder / "params.yaml").write_text(json.dumps(file_of(sections), indent=1))
        self.options = " ".join(words_of(sections["train"]))

    def commit(self):
        subprocess.run(["git", "add", "-A"], cwd=self.folder, check=True)
        subprocess.run(
            ["git", "commit", "-qm", "x"], cwd=self.folder, check=True, env=self.environment()
        )

    def dvc_command(self, *arguments):
        return [sys.executable, "-m", "dvc", *arguments]

    def dvc(self, *arguments, code=0, **environment):
        done = subprocess.run(
            self.dvc_command(*arguments),
            cwd=self.folder,
            env=self.environment(**environment),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert bool(done.returncode) == bool(code), done.stdout
        return done.stdout

    def killed(self):
        """A training killed at step 5; what its checkpoint holds."""
        self.dvc("repro", code=1, SG_FAULT=KILL)
        return read_weights(newest(self.folder / "checkpoints"))

    def best(self):
        return read_weights(self.folder / "checkpoints" / "best.safetensors")


@pytest.fixture
def clone(tmp_path, make_params):
    return Clone(tmp_path, make_params)


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_repro_with_force_goes_on_and_a_finished_training_stays_as_it_is(clone):
    clone.killed()
    assert "resuming at step 4 of 6" in clone.dvc("repro", "-f")
    before = files_of(clone.folder / "checkpoints")
    lock = (clone.folder / "dvc.lock").read_bytes()
    assert "nothing to do" in clone.dvc("repro", "-f")
    assert files_of(clone.folder / "checkpoints") == before
    assert (clone.folder / "dvc.lock").read_bytes() == lock


def test_checkout_leaves_the_checkpoints_of_a_killed_training(clone):
    clone.dvc("repro")
    clone.commit()
    first = clone.best()
    finished = home(clone.folder / "checkpoints")
    before = files_of(finished)
    clone.params(lr=0.002)
    clone.killed()
    assert clone.best() != first
    clone.dvc("checkout", "--force")
    assert clone.best() == first  # that of dvc.lock
    assert "resuming at step 4 of 6" in clone.dvc("repro")
    assert clone.best() != first and files_of(finished) == before


def test_an_experiment_leaves_a_killed_training_as_it_is(clone):
    clone.killed()
    killed = home(clone.folder / "checkpoints")
    before = files_of(killed)
    clone.dvc("exp", "run", "-S", "train.lr=0.002")
    assert files_of(killed) == before
    clone.params()  # as they were
    assert "resuming at step 4 of 6" in clone.dvc("repro")
