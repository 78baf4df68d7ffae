"""The same under DVC itself: what `dvc repro -f`, `dvc checkout` and `dvc exp run` do to a training
that was killed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_params import file_of
from made_trainings import SMALL
from made_views import made_keypoints
from reading import read_files, read_yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STAGE = read_yaml(ROOT / "dvc.yaml")["stages"]["train"]
DVC = [sys.executable, "-m", "dvc"]
KILL = "kill:rank=0,step=5,phase=forward"  # after the checkpoint of step 4


class Clone:
    """A clone with the stage `train` of dvc.yaml, on synthetic views."""

    def __init__(self, folder, make_params):
        self.folder = folder
        self.make_params = make_params
        made_keypoints(folder / "data/keypoints")
        # in one process: a kill is a kill
        stage = {**STAGE, "cmd": f"{sys.executable} -m pipeline.train", "deps": ["data/keypoints"]}
        (folder / "dvc.yaml").write_text(json.dumps({"stages": {"train": stage}}))  # JSON is YAML
        ignored = "/data /checkpoints /reports/*/curves *.log *.jsonl mlflow.db run.json"
        (folder / ".gitignore").write_text("\n".join(ignored.split()))
        self.set_params()
        self.run("git", "init", "-q")
        self.run(*DVC, "init", "-q")
        self.commit()

    def set_params(self, **keys):
        """Write params.yaml with these keys of `train`."""
        values = {**SMALL, **keys}
        run = {name: values.pop(name) for name in ("log_every", "save_every")}
        sections = {
            "train": self.make_params("train", **values).model_dump(),
            "run": run,
            "keypoints": self.make_params("keypoints").model_dump(),
        }
        (self.folder / "params.yaml").write_text(json.dumps(file_of(sections), indent=1))

    def run(self, *command, code=0, **environment):
        own = {
            "MLFLOW_TRACKING_URI": f"sqlite:///{self.folder / 'mlflow.db'}",
            "DVC_NO_ANALYTICS": "true",
            "PYTHONPATH": f"{ROOT}/tests/faults/start:{ROOT}",
            "OMP_NUM_THREADS": "1",
        }
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        env = {**os.environ, **own, **environment}
        done = subprocess.run(command, cwd=self.folder, env=env, **streams)
        assert bool(done.returncode) == bool(code), done.stdout
        return done.stdout

    def commit(self):
        self.run("git", "add", "-A")
        who = ("-c", "user.name=t", "-c", "user.email=t@t")
        self.run("git", *who, "commit", "-qm", "x")

    def kill(self):
        """Kill a training at step 5; its folder."""
        before = self.trainings()
        self.run(*DVC, "repro", code=1, SG_FAULT=KILL)
        (folder,) = self.trainings() - before
        return folder

    def trainings(self):
        return {path for path in (self.folder / "checkpoints").glob("*") if path.is_dir()}

    def best(self):
        return (self.folder / "checkpoints/best.safetensors").read_bytes()


def test_force_checkout_and_experiments_leave_every_training_where_it_is(tmp_path, make_params):
    clone = Clone(tmp_path, make_params)
    clone.kill()
    assert "resuming at step 4 of 6" in clone.run(*DVC, "repro", "-f")
    finished = read_files(tmp_path / "checkpoints")
    lock = (tmp_path / "dvc.lock").read_bytes()
    assert "nothing to do" in clone.run(*DVC, "repro", "-f")
    assert read_files(tmp_path / "checkpoints") == finished
    assert (tmp_path / "dvc.lock").read_bytes() == lock
    clone.commit()
    first = clone.best()
    clone.set_params(lr=0.002)
    killed = clone.kill()
    before = read_files(killed)
    assert clone.best() != first
    clone.run(*DVC, "checkout", "--force")
    assert clone.best() == first  # that of dvc.lock
    clone.run(*DVC, "exp", "run", "-S", "train.lr=0.003")
    clone.set_params(lr=0.002)
    assert read_files(killed) == before
    assert "resuming at step 4 of 6" in clone.run(*DVC, "repro")
    assert clone.best() != first
    names = {name for name in finished if "/step-" in name}
    now = read_files(tmp_path / "checkpoints")
    assert names and all(now[name] == finished[name] for name in names)
