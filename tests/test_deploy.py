"""Launch files for a cluster and for an editor, against what the schedulers accept."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pipeline.errors import STOPPED

ROOT = Path(__file__).resolve().parents[1]
KUBEFLOW = ROOT / "deploy" / "kubeflow"
SBATCH = (ROOT / "deploy" / "slurm" / "train.sbatch").read_text()


JOBS = ("prepare", "train", "finish")


def deployed(name: str) -> dict:
    return YAML(typ="safe").load((KUBEFLOW / f"{name}.yaml").read_text())


def pod_of(job: dict) -> dict:
    spec = job["spec"]
    return (
        spec["template"]
        if job["kind"] == "Job"
        else spec["pytorchReplicaSpecs"]["Worker"]["template"]
    )["spec"]


@pytest.mark.parametrize("name", JOBS)
def test_kubernetes_knows_every_key(name):
    """Keys of the training operator have no schema here; the next tests read them."""
    kubernetes = pytest.importorskip("kubernetes_validate")
    job = deployed(name)
    if name == "train":
        job = {"apiVersion": "v1", "kind": "Pod", "metadata": job["metadata"], "spec": pod_of(job)}
    kubernetes.validate(job, "1.30", strict=True)


@pytest.mark.parametrize("name", JOBS)
def test_a_pod_may_save_and_mounts_what_it_names(name):
    pod = pod_of(deployed(name))
    assert (
        pod["terminationGracePeriodSeconds"] >= 60
        and pod["securityContext"]["runAsNonRoot"] is True
    )
    mounts = {
        mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]
    }
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert all(":latest" not in container["image"] for container in pod["containers"])


def test_the_training_job_fits_the_operator():
    train = deployed("train")
    spec = train["spec"]
    elastic = train["spec"]["elasticPolicy"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    pod = pod_of(train)
    assert (train["apiVersion"], train["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(train) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(spec) == {"elasticPolicy", "runPolicy", "pytorchReplicaSpecs"}
    assert set(elastic) == {"rdzvBackend", "minReplicas", "maxReplicas", "maxRestarts"}
    assert set(spec["runPolicy"]) == {"cleanPodPolicy", "backoffLimit"}
    assert set(worker) == {"replicas", "restartPolicy", "template"} and set(worker["template"]) == {
        "spec"
    }
    assert elastic["rdzvBackend"] == "c10d" and spec["runPolicy"]["cleanPodPolicy"] in (
        "None",
        "Running",
        "All",
    )
    assert pod["containers"][0]["name"] == "pytorch"  # the operator looks for this name
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    assert {volume["name"]: volume for volume in pod["volumes"]}["shm"]["emptyDir"][
        "medium"
    ] == "Memory"


def test_the_training_job_starts_again_after_a_stop_and_a_kill_and_not_after_a_wrong_request():
    assert deployed("train")["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"
    assert STOPPED >= 128 > 2  # from 128 on the operator calls an exit code retryable


def test_the_training_job_and_the_launcher_agree_how_often_to_start_again(tmp_path):
    """The command of the pod, with the operator's variables and a launcher that prints its
    arguments.
    """
    train = deployed("train")
    shown = "from pipeline.launch import command, max_restarts; print(*command('m', [], 1))"
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{shown}"\n')
    (tmp_path / "python").chmod(0o755)
    policy = train["spec"]["elasticPolicy"]
    operator = {
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_RDZV_ENDPOINT": "superglue-train-worker-0:23456",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    script = pod_of(train)["containers"][0]["args"][0]
    environment = {**os.environ, **operator}
    done = subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert f"--max_restarts={policy['maxRestarts']}" in done.stdout.split()
    assert "--rdzv_endpoint=superglue-train-worker-0:23456" in done.stdout.split()


@pytest.mark.parametrize("name", ["prepare", "finish"])
def test_a_job_is_tried_again_after_a_stop_and_not_after_a_wrong_request(name):
    job = deployed(name)
    assert pod_of(job)["restartPolicy"] == "Never"  # podFailurePolicy needs it
    rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {
        pod_of(job)["containers"][0]["name"]
    }
    actions = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
    assert actions == {2: "FailJob", STOPPED: "Ignore"}


def options(text):
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))


def test_the_slurm_job_saves_requeues_and_appends():
    found = options(SBATCH)
    assert len(found) == SBATCH.count("\n#SBATCH ")
    assert found["signal"] == "B:USR1@120" and "requeue" in found
    assert found["open-mode"] == "append"
    assert found["ntasks-per-node"] == "1"  # torchrun makes the ranks
    assert "cpus-per-gpu" in found and not [
        name for name in found if name.startswith(("gpus", "gres", "cpus-per-t"))
    ]


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


def submitted(tmp_path, **environment):
    """The job script with these commands in place of SLURM's; its output, exit code and what it
    asked SLURM for.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "scontrol", "scancel"):
        (folder / name).write_text(SLURM)
        (folder / name).chmod(0o755)
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "3",
        "SLURM_CPUS_PER_GPU": "4",
    }
    job = {**job, "TRY": str(tmp_path), "SIGNAL": "", **environment}
    (tmp_path / "asked").touch()
    done = subprocess.run(
        ["bash", str(ROOT / "deploy" / "slurm" / "train.sbatch")],
        cwd=tmp_path,
        text=True,
        timeout=60,
        env={"PATH": f"{folder}:{os.environ['PATH']}", **job},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done, (tmp_path / "asked").read_text().splitlines()


def test_the_slurm_job_sets_the_preset_before_any_stage_and_hands_its_cores_on(tmp_path):
    done, asked = submitted(tmp_path, PRESET="coco2017", SLURM_NNODES="2", SLURM_CPUS_PER_TASK="32")
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
    ids=[
        "end of the time",
        "preempted, to be cancelled",
        "time is over",
        "scancel",
        "preempted, requeued by SLURM",
    ],
)
def test_the_slurm_job_goes_back_into_the_queue_unless_a_person_cancelled_it(
    tmp_path, signal, state, queued
):
    done, asked = submitted(tmp_path, SIGNAL=signal, STATE=state)
    assert done.returncode == 143, done.stdout
    assert ("scontrol requeue 7" in asked) == queued


def test_the_slurm_job_without_a_gpu_says_how_to_ask_for_some(tmp_path):
    if Path("/dev/nvidia0").exists():
        pytest.skip("a GPU that SLURM does not count is one")
    done, asked = submitted(tmp_path, SLURM_GPUS_ON_NODE="")
    assert done.returncode == 2 and not asked
    assert done.stdout.startswith("error: this job has no GPU: sbatch --gpus-per-node=N ")
    assert len(done.stdout.splitlines()) == 1


def test_the_slurm_job_may_train_without_a_gpu(tmp_path):
    """`--cpus-per-gpu`, which the job has, makes every srun of a job without GPUs fail (SLURM
    22.05).
    """
    done, asked = submitted(tmp_path, SLURM_GPUS_ON_NODE="", GPUS="none")
    assert done.returncode == 0 and any(line.endswith("entrypoint.py repro") for line in asked), (
        done.stdout
    )
    assert (
        "srun-environment cpus-per-gpu=" in asked and "srun-environment cpus-per-gpu=4" not in asked
    )


def test_the_slurm_job_that_fails_is_not_tried_again(tmp_path):
    done, asked = submitted(tmp_path, CODE="2")
    assert done.returncode == 2 and "scontrol requeue 7" not in asked


def test_the_slurm_job_is_a_valid_script():
    subprocess.run(["bash", "-n", str(ROOT / "deploy" / "slurm" / "train.sbatch")], check=True)
    if shutil.which("shellcheck"):
        script = str(ROOT / "deploy" / "slurm" / "train.sbatch")
        subprocess.run(["shellcheck", "--severity=warning", script], check=True)


@pytest.mark.parametrize("text", [SBATCH, (KUBEFLOW / "train.yaml").read_text()])
def test_the_clusters_start_training_as_dvc_does(text):
    stage = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]["train"]["cmd"]
    arguments = re.findall(r"--\S+ \S+", stage.split("pipeline.train")[1])
    assert arguments and all(argument in text for argument in arguments)
    assert "pipeline.launch pipeline.train" in text


def test_the_devcontainer_takes_a_gpu_if_there_is_one_and_is_not_root():
    found = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert found["hostRequirements"]["gpu"] == "optional"
    assert found["remoteUser"] == "pipeline"
    assert any(argument.startswith("--shm-size") for argument in found["runArgs"])
    assert (ROOT / ".devcontainer" / found["build"]["dockerfile"]).is_file()
    assert f" AS {found['build']['target']}\n" in (ROOT / "Dockerfile").read_text()
