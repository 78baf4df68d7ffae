"""Launch files for a cluster, against what the schedulers accept."""

import os
import subprocess
from pathlib import Path

import pytest
from reading import read_yaml

ROOT = Path(__file__).resolve().parents[2]
KUBEFLOW = ROOT / "deploy/kubeflow"
SBATCH = ROOT / "deploy/slurm/train.sbatch"


def read(name):
    return read_yaml(KUBEFLOW / f"{name}.yaml")


def pod_of(job):
    spec = job["spec"]
    owner = spec if job["kind"] == "Job" else spec["pytorchReplicaSpecs"]["Worker"]
    return owner["template"]["spec"]


@pytest.mark.parametrize("name", ["prepare", "train", "finish"])
def test_kubernetes_accepts_the_pods(name):
    """Keys of the training operator have no schema here."""
    job = read(name)
    pod = pod_of(job)
    mounts = {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    if name == "train":
        job = {"apiVersion": "v1", "kind": "Pod", "metadata": job["metadata"], "spec": pod}
    kubernetes = pytest.importorskip("kubernetes_validate")
    kubernetes.validate(job, "1.30", strict=True)


SLURM = """#!/bin/sh
# a fake srun, scontrol and scancel: logs its arguments, and answers as SLURM 22.05
echo "$(basename "$0") $*" >>"$TRY/asked"
echo "$(basename "$0")-environment cpus-per-gpu=$SLURM_CPUS_PER_GPU" >>"$TRY/asked"
case "$(basename "$0") $1" in
    "scontrol show") [ "$2" = hostnames ] && echo node1 || echo "JobId=7 JobState=$STATE" ;;
    "scancel "*) kill -TERM "$(cat "$TRY/step")" ;;
    "srun "*)
        if [ -n "$SIGNAL" ]; then
            trap 'kill $!; exit 143' TERM
            echo $$ >"$TRY/step"
            sleep 300 >/dev/null &
            kill -"$SIGNAL" "$PPID"
            wait
        fi ;;
esac
exit "${CODE:-0}"
"""


def submit(tmp_path, **environment):
    """Run the job script with these commands in place of SLURM's. Also what it asked them for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "scontrol", "scancel"):
        (folder / name).write_text(SLURM)
        (folder / name).chmod(0o755)
    job = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "3",
        "SLURM_CPUS_PER_GPU": "4",
        "TRY": str(tmp_path),
        "SIGNAL": "",
    }
    (tmp_path / "asked").touch()
    done = subprocess.run(
        ["bash", str(SBATCH)],
        cwd=tmp_path,
        text=True,
        timeout=60,
        env={**job, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done, (tmp_path / "asked").read_text().splitlines()


def test_the_slurm_job_sets_the_preset_before_any_stage_and_hands_its_cores_on(tmp_path):
    done, asked = submit(tmp_path, PRESET="coco2017", SLURM_NNODES="2", SLURM_CPUS_PER_TASK="32")
    assert done.returncode == 0, done.stdout
    steps = [line for line in asked if line.startswith("srun ")]
    assert all(" --cpus-per-task=32 " in line for line in steps)
    prepare, train, commit, rest = steps
    assert prepare.endswith("entrypoint.py repro --preset coco2017 keypoints")
    assert (
        " --nodes=2 " in train
        and "RDZV_ENDPOINT=node1:29400 " in train
        and "pipeline.launch" in train
    )
    assert commit.endswith("dvc commit --force train") and rest.endswith("entrypoint.py repro")


@pytest.mark.parametrize(
    ("signal", "state", "queued"),
    [
        ("USR1", "RUNNING Reason=None Restarts=0 PreemptTime=None", True),
        ("TERM", "RUNNING Reason=None Restarts=0 PreemptTime=2026-11-22T14:43:17", True),
        ("TERM", "COMPLETING Reason=TimeLimit Restarts=0 PreemptTime=None", True),
        ("TERM", "COMPLETING Reason=None Restarts=0 PreemptTime=None", False),
        ("TERM", "COMPLETING Reason=None Restarts=1 ExitCode=0:0", False),
    ],
    ids=["end of the time", "preempted", "time is over", "scancel", "requeued by SLURM"],
)
def test_the_slurm_job_goes_back_into_the_queue_unless_a_person_cancelled_it(
    tmp_path, signal, state, queued
):
    done, asked = submit(tmp_path, SIGNAL=signal, STATE=state)
    assert done.returncode == 143, done.stdout
    assert ("scontrol requeue 7" in asked) == queued


def test_the_slurm_job_without_a_gpu_says_how_to_ask_for_some(tmp_path):
    if Path("/dev/nvidia0").exists():
        pytest.skip("a GPU that SLURM does not count is one")
    done, asked = submit(tmp_path, SLURM_GPUS_ON_NODE="")
    assert done.returncode == 2 and not asked
    assert done.stdout.startswith("error: this job has no GPU: sbatch --gpus-per-node=N ")
    assert len(done.stdout.splitlines()) == 1
