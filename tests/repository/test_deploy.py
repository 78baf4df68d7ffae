"""Launch files for a cluster, against what Kubernetes accepts."""

from pathlib import Path

import pytest
from reading import read_yaml

ROOT = Path(__file__).resolve().parents[2]
KUBEFLOW = ROOT / "deploy/kubeflow"


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
