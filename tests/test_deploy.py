"""Launch files for a cluster and for an editor, against what the schedulers accept."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Dict, List, Literal, Optional, Union

import pytest
from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
SBATCH = (ROOT / "deploy" / "slurm" / "train.sbatch").read_text()


class Strict(BaseModel):
    """A misspelt or misplaced key is an error, as it is for an API server that validates strictly."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Security(Strict):
    runAsNonRoot: Literal[True]
    runAsUser: int
    runAsGroup: int
    fsGroup: int


class Variable(Strict):
    name: str
    value: str


class Mount(Strict):
    name: str
    mountPath: str


class Resources(Strict):
    requests: Dict[str, str]
    limits: Dict[str, str]


class Container(Strict):
    name: str
    image: str
    command: Optional[List[str]] = None
    args: List[str]
    env: List[Variable] = []
    resources: Resources
    volumeMounts: List[Mount]


class Claim(Strict):
    claimName: str


class Memory(Strict):
    medium: Literal["Memory"]
    sizeLimit: str


class Volume(Strict):
    name: str
    persistentVolumeClaim: Optional[Claim] = None
    emptyDir: Optional[Memory] = None


class Pod(Strict):
    restartPolicy: Optional[Literal["Never", "OnFailure"]] = None
    terminationGracePeriodSeconds: Optional[int] = None
    securityContext: Security
    containers: List[Container]
    volumes: List[Volume]


class Template(Strict):
    spec: Pod


class Replica(Strict):
    replicas: int
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"]
    template: Template


class Elastic(Strict):
    rdzvBackend: Literal["c10d", "etcd", "etcd-v2"]
    minReplicas: int
    maxReplicas: int
    maxRestarts: int


class Policy(Strict):
    cleanPodPolicy: Literal["None", "Running", "All"]
    backoffLimit: int


class TrainSpec(Strict):
    elasticPolicy: Elastic
    runPolicy: Policy
    pytorchReplicaSpecs: Dict[Literal["Master", "Worker"], Replica]


class JobSpec(Strict):
    backoffLimit: int
    template: Template


class Meta(Strict):
    name: str


class Job(Strict):
    apiVersion: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Meta
    spec: JobSpec


class PyTorchJob(Strict):
    apiVersion: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: Meta
    spec: TrainSpec


def documents() -> List[Union[Job, PyTorchJob]]:
    text = (ROOT / "deploy" / "kubeflow" / "pytorchjob.yaml").read_text()
    kinds = {"Job": Job, "PyTorchJob": PyTorchJob}
    return [kinds[tree["kind"]](**tree) for tree in YAML(typ="safe").load_all(text)]


def test_the_kubeflow_jobs_fit_their_schema():
    prepare, train = documents()
    worker = train.spec.pytorchReplicaSpecs["Worker"]
    pod = worker.template.spec
    assert pod.containers[0].name == "pytorch"  # the operator looks for this name
    assert train.spec.elasticPolicy.minReplicas <= worker.replicas <= train.spec.elasticPolicy.maxReplicas
    assert pod.terminationGracePeriodSeconds >= 60
    shm = {volume.name: volume for volume in pod.volumes}["shm"]
    assert shm.emptyDir.medium == "Memory"
    for spec in (prepare.spec.template.spec, pod):
        mounts = {mount.name for container in spec.containers for mount in container.volumeMounts}
        assert mounts == {volume.name for volume in spec.volumes}
        assert all(":latest" not in container.image for container in spec.containers)


def options(text):
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))


def test_the_slurm_job_saves_requeues_and_appends():
    found = options(SBATCH)
    assert len(found) == SBATCH.count("\n#SBATCH ")
    assert found["signal"] == "B:USR1@120" and "requeue" in found
    assert found["open-mode"] == "append"
    assert found["ntasks-per-node"] == "1"  # torchrun makes the ranks
    assert "scontrol requeue" in SBATCH and "STOPPED=143" in SBATCH


def test_the_slurm_job_is_a_valid_script():
    subprocess.run(["bash", "-n", str(ROOT / "deploy" / "slurm" / "train.sbatch")], check=True)
    if shutil.which("shellcheck"):
        script = str(ROOT / "deploy" / "slurm" / "train.sbatch")
        subprocess.run(["shellcheck", "--severity=warning", script], check=True)


@pytest.mark.parametrize("text", [SBATCH, (ROOT / "deploy" / "kubeflow" / "pytorchjob.yaml").read_text()])
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
