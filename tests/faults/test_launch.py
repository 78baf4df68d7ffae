"""Kills through the launcher, torchrun and DVC: which processes end, and what goes on."""

import itertools
import json
import os
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from reading import read_yaml
from waiting import has_ended, wait_until

from faults.cells import Workbench
from faults.group import digest
from pipeline.distributed import find_free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STAGES = read_yaml(ROOT / "dvc.yaml")["stages"]
# Seconds: a guard against a test that never ends; starts alone take minutes on a busy machine
PATIENCE = 900
LAUNCH = [sys.executable, "-m", "pipeline.launch", "pipeline.train"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NPROC_PER_NODE": "2"}


def launcher(arguments, **environment):
    faults = {"PYTHONPATH": str(ROOT / "tests/faults/start")}
    return subprocess.Popen(
        [*LAUNCH, *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **faults, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture
def bench(tmp_path, mlflow_store):
    bench = Workbench(tmp_path)
    bench.store = sqlite3.connect(tmp_path / "mlflow.db")
    return bench


def end(process):
    """The exit code of a launcher that ends by itself, and its output."""
    out, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, out


def count_points(bench):
    """Return how many points of the loss MLflow has."""
    query = "SELECT count(*) FROM metrics WHERE key = 'train/loss'"
    return bench.store.execute(query).fetchone()[0]


def wait_for_a_step(bench, process):
    """Wait until MLflow has a point of the training. Fails if the process ends before."""
    wait_until(lambda: count_points(bench) or process.poll() is not None, PATIENCE)
    assert count_points(bench), process.communicate()[0]


LONG = (("steps", 100000), ("val_every", 1000), ("save_every", 1000))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_a_checkpoint_and_143(bench, number):
    """A closed terminal sends SIGHUP, also twice, and the end of DVC sends SIGTERM."""
    process = launcher(bench.training("run", LONG))
    wait_for_a_step(bench, process)
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)
    code, out = end(process)
    assert code == 143 and "Traceback" not in out, out
    assert len(list((bench.folder / "run").glob("*/step-*.safetensors"))) == 1


def test_nohup_keeps_a_training_when_the_terminal_is_closed(bench):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # As `nohup` does
    try:
        process = launcher(bench.training("run", LONG))
    finally:
        signal.signal(signal.SIGHUP, previous)
    wait_for_a_step(bench, process)
    ranks = [child.pid for child in psutil.Process(process.pid).children()]
    for pid in (process.pid, *ranks):
        os.kill(pid, signal.SIGHUP)
    points = count_points(bench)
    wait_until(lambda: count_points(bench) > points + 5, PATIENCE)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143


def test_a_killed_rank_is_started_again(bench):
    expected = bench.clean(2)
    fault = "kill:rank=1,step=3,phase=backward;kill:rank=0,step=5,phase=ckpt_replace"
    marks = bench.folder / "marks"
    marks.mkdir()
    code, out = end(launcher(bench.training("run"), SG_FAULT=fault, SG_FAULT_ONCE=str(marks)))
    assert code == 0, out
    assert "SIGKILL" in out and "resuming at step 2 of 8" in out
    # Torchrun's own
    assert "Traceback" not in out and "exitcode" not in out
    assert digest(bench.folder / "run") == expected


def test_an_error_of_a_rank_shows_where_it_happened(bench):
    code, out = end(launcher(bench.training("run"), SG_FAULT="bomb"))
    assert code == 1, out
    assert "KeyError: 'SIGBOMB'" in out and "in at\n" in out and out.count("Traceback") <= 4
    assert "ChildFailedError" not in out and "starting again" not in out


def test_after_a_killed_dvc_the_next_repro_goes_on(bench, monkeypatch):
    """The launcher stops with a checkpoint, so that two trainings never write into one
    folder.
    """
    keys = (("steps", 200), ("save_every", 1000), ("val_every", 200))
    expected = bench.clean(2, keys)
    # DVC runs commands with SHELL
    for name, value in {**ENVIRONMENT, "SHELL": "/bin/sh", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    line = f"exec {shlex.join([*LAUNCH, *bench.training('run', keys)])}"  # as in dvc.yaml
    out = {str(bench.folder / "run"): {"persist": True, "cache": False}}
    stages = {"train": {"cmd": line, "outs": [out]}}
    workspace = bench.folder / "workspace"
    workspace.mkdir()
    (workspace / "dvc.yaml").write_text(json.dumps({"stages": stages}))  # JSON is YAML
    command = [sys.executable, "-m", "dvc"]
    subprocess.run([*command, "init", "-q", "--no-scm"], cwd=workspace, check=True)
    dvc = subprocess.Popen([*command, "repro"], cwd=workspace)
    wait_for_a_step(bench, dvc)
    dvc.kill()
    dvc.wait()
    wait_until(lambda: not ranks_of(bench.folder), PATIENCE)  # they save, and hand on their log
    saved = [int(file.stem[5:]) for file in (bench.folder / "run").glob("*/step-*.safetensors")]
    assert len(saved) == 1 and 0 < saved[0] < 200
    subprocess.run([*command, "repro"], cwd=workspace, check=True, timeout=PATIENCE)
    assert digest(bench.folder / "run") == expected


def test_a_rank_that_hangs_ends_the_run_after_the_timeout(bench):
    faults = {"SG_FAULT": "stop:rank=1,step=3", "SG_TIMEOUT": "10"}
    code, out = end(launcher(bench.training("run"), TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5", **faults))
    assert code == 1, out
    assert "rank 0: another rank died or hangs" in out and "starting again" not in out


def test_no_rank_outlives_a_killed_launcher(bench):
    process = launcher(bench.training("run", (("steps", 100000),)))
    wait_for_a_step(bench, process)
    process.kill()
    process.wait()
    wait_until(lambda: not ranks_of(bench.folder), 10)


def test_slurm_names_the_ranks(bench):
    """As `srun --ntasks=2 python -m pipeline.train` starts them: no launcher, no torchrun."""
    arguments = [sys.executable, "-m", "pipeline.train", *bench.training("run")]
    job = {
        "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": str(find_free_port()),
    }  # fmt: skip
    tasks = []
    for i in "01":
        values = {**os.environ, **job, "SLURM_PROCID": i, "SLURM_LOCALID": i}
        tasks.append(subprocess.Popen(arguments, cwd=ROOT, env=values))
    assert [task.wait(timeout=PATIENCE) for task in tasks] == [0, 0]
    assert digest(bench.folder / "run") == bench.clean(2)


def ranks_of(folder):
    command = ["pgrep", "-f", f"pipeline.train.*{folder}"]
    return subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout.split()


def test_an_elastic_job_goes_on_with_three_processes_two_and_three_again(bench):
    """Two processes of one node and one of the other share a batch of 8, evenly or not."""
    # Long enough to join in
    keys = (("steps", 600), ("layers", 4), ("val_every", 200), ("save_every", 10))
    arguments = bench.training("run", keys)
    checkpoints = bench.folder / "run"
    port = find_free_port()
    job = {"NNODES": "1:2", "RDZV_ENDPOINT": f"127.0.0.1:{port}", "SG_TIMEOUT": "20"}
    first = launcher(arguments, NPROC_PER_NODE="2", **job)
    # the node that listens first has the endpoint, and it must not be the one that is lost
    wait_until(lambda: listens(port), PATIENCE)
    second = launcher(arguments, NPROC_PER_NODE="1", **job)
    wait_until(lambda: find_newest_step(checkpoints) >= 20, PATIENCE)
    second.send_signal(signal.SIGKILL)
    step = find_newest_step(checkpoints)
    wait_until(lambda: find_newest_step(checkpoints) > step + 20, PATIENCE)
    second = launcher(arguments, NPROC_PER_NODE="1", **job)
    code, out = end(first)
    end(second)
    assert code == 0, out
    # of each start; groups, because one is tried again while the lost node counts as there
    record = (bench.folder / "run-r/mlflow.json").read_text()
    sizes = re.findall(r'"superglue.world_size": "(\d)"', record)
    assert [size for size, _ in itertools.groupby(sizes)] == ["3", "2", "3"]
    assert find_newest_step(checkpoints) == 600


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def find_newest_step(checkpoints):
    return max((int(file.stem[5:]) for file in checkpoints.glob("*/step-*.safetensors")), default=0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_ends_with_the_dvc_that_started_it(stage, tmp_path):
    """DVC is killed while the stage waits for its parameters, which come through a pipe."""
    pipe = tmp_path / "params.yaml"
    os.mkfifo(pipe)
    words = STAGES[stage]["cmd"].split()
    assert words[:3] == ["exec", "python", "-m"]
    module = " ".join(word for word in words[3:5] if word.startswith("pipeline."))
    shell = f"exec {shlex.quote(sys.executable)} -m {module} --params params.yaml"
    dvc = f"import subprocess, time; print(subprocess.Popen({shell!r}, shell=True).pid, flush=True)"
    environment = {**os.environ, "DVC_STAGE": stage, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"{dvc}; time.sleep(1000)"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as parent:
        number = int(parent.stdout.readline())
        with pipe.open("w"):  # the stage reads now
            parent.kill()
            wait_until(lambda: has_ended(number), 60)
