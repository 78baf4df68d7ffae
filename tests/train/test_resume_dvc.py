"""The same under DVC itself: what `dvc repro -f`, `dvc checkout` and `dvc exp run` do to a training
that was killed.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from made_trainings import make_request_function
from reading import read_files, read_yaml

ROOT = Path(__file__).resolve().parents[2]
DVC = f"{shlex.quote(sys.executable)} -m dvc"
GIT = "git -c user.name=t -c user.email=t@t"
KILL = "kill:rank=0,step=5,phase=forward"  # after the checkpoint of step 4


@pytest.mark.slow
def test_force_checkout_and_experiments_leave_every_training_where_it_is(tmp_path, make_params):
    checkpoints = tmp_path / "checkpoints"
    request_of = make_request_function(tmp_path / "data", make_params)
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "PYTHONPATH": f"{ROOT}/tests/faults/start:{ROOT}",
        "OMP_NUM_THREADS": "1",
    }

    def run(command, code=0, **more):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        env = {**environment, **more}
        done = subprocess.run(shlex.split(command), cwd=tmp_path, env=env, **streams)
        assert bool(done.returncode) == bool(code), done.stdout
        return done.stdout

    def set_rate(lr):
        file = Path(request_of("params", lr=lr)[-1])
        file.rename(tmp_path / "params.yaml")

    def kill():
        """Kill a training at step 5; its folder."""
        before = set(checkpoints.glob("*/"))
        run(f"{DVC} repro", code=1, SG_FAULT=KILL)
        (folder,) = set(checkpoints.glob("*/")) - before
        return folder

    def commit():
        run("git add -A")
        run(f"{GIT} commit -qm x")

    # a clone with the stage `train` of dvc.yaml, in one process: a kill is a kill
    stage = read_yaml(ROOT / "dvc.yaml")["stages"]["train"]
    stage.update(cmd=f"{shlex.quote(sys.executable)} -m pipeline.train", deps=["data/keypoints"])
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": {"train": stage}}))  # JSON is YAML
    ignored = "/data /checkpoints /reports/*/curves *.log *.jsonl mlflow.db"
    (tmp_path / ".gitignore").write_text("\n".join(ignored.split()))
    set_rate(0.001)
    for command in ("git init -q", f"{DVC} init -q"):
        run(command)
    commit()

    # force: a killed training is resumed, a finished one stays
    kill()
    assert "resuming at step 4 of 6" in run(f"{DVC} repro -f")
    finished = read_files(checkpoints)
    assert "nothing to do" in run(f"{DVC} repro -f")
    assert read_files(checkpoints) == finished
    commit()

    # checkout and an experiment while another training is interrupted
    best = checkpoints / "best.safetensors"
    first = best.read_bytes()
    set_rate(0.002)
    killed = kill()
    before = read_files(killed)
    assert best.read_bytes() != first
    run(f"{DVC} checkout --force")
    assert best.read_bytes() == first  # that of dvc.lock
    run(f"{DVC} exp run -S train.lr=0.003")
    set_rate(0.002)
    assert read_files(killed) == before
    assert "resuming at step 4 of 6" in run(f"{DVC} repro")
    now = read_files(checkpoints)
    assert all(now[name] == finished[name] for name in finished if "/step-" in name)
