"""The shared MLflow server as docker/mlflow starts it: who may call it, and that artifacts go through it."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest
from made_scenes import write_model

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(start_server):
    """Port of a running server."""
    mlflow = pytest.importorskip("mlflow")
    if tuple(map(int, mlflow.__version__.split(".")[:2])) < (3, 5):
        pytest.skip(f"mlflow {mlflow.__version__} has no --allowed-hosts; the server image has a later one")
    return start_server(
        [str(ROOT / "docker" / "mlflow" / "serve.py")],
        "/health",
        MLFLOW_PORT="{port}",
        MLFLOW_BACKEND_STORE_URI="sqlite:///{folder}/mlflow.db",
        MLFLOW_ARTIFACTS="{folder}/artifacts",
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
    )


def answer(port, path, host):
    """Status and body of a GET with a Host header of our choice."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": host})
    reply = connection.getresponse()
    return reply.status, reply.read()


@pytest.mark.parametrize(
    ("host", "status"),
    [("mlflow:5000", 200), ("localhost:8080", 200), ("127.0.0.1:5000", 200), ("evil.example", 403), ("mlflow:80", 403)],
)
def test_only_the_names_of_the_compose_file_are_served(server, host, status):
    assert answer(server, "/api/2.0/mlflow/experiments/get?experiment_id=0", host)[0] == status


@pytest.mark.parametrize(
    "path",
    ["../../etc/passwd", "..%2F..%2Fetc%2Fpasswd", "%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "a/../../../etc/passwd"],
)
def test_artifacts_cannot_be_read_from_elsewhere(server, path):
    status, body = answer(server, f"/api/2.0/mlflow-artifacts/artifacts/{path}", "localhost")
    assert 400 <= status < 500 and b"root:" not in body


def test_a_run_and_its_pictures_go_through_the_server(server, tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    from pipeline import tracking

    uri = f"http://127.0.0.1:{server}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    (tmp_path / "picture.png").write_bytes(b"png")
    write_model(tmp_path / "model.safetensors", dim=16, heads=2)
    with tracking.open_run(tmp_path / "reports", {"train": {"lr": 1}}, system_metrics=False) as run:
        run.log({"train/loss": 1.0}, 0)
        run.artifact(tmp_path / "picture.png", "pictures")
        run.model(tmp_path / "model.safetensors")
    client = MlflowClient(uri)
    stored = client.get_run(run.run_id)
    assert stored.info.status == "FINISHED" and stored.info.artifact_uri.startswith("mlflow-artifacts:/")
    assert [file.path for file in client.list_artifacts(run.run_id, "pictures")] == ["pictures/picture.png"]
    assert client.get_model_version_by_alias("superglue-sift", "champion").run_id == run.run_id
