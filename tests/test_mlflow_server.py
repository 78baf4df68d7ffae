"""The shared MLflow server as docker/mlflow starts it: who may call it, and that artifacts go through it."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest
from faulty_server import SlowProxy
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


@pytest.fixture
def network(server, monkeypatch):
    """A slow network in front of the tracking server."""
    made = SlowProxy(server)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", made.url)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", f"through {made.url}")
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch):
    """Tries follow soon."""
    from pipeline.tracking import shipper

    monkeypatch.setattr(shipper, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(shipper, "LONGEST_PAUSE_SECONDS", 0.5)


def recorded(folder, **close):
    """A run with a model of 3 MB between two points, and its id."""
    from pipeline import tracking

    name = f"model-{folder.name}"
    weights = write_model(folder / "model.safetensors", layers=2)
    run = tracking.open_run(folder / "reports", {"train": {"lr": 1}}, system_metrics=False)
    run.log({"train/loss": 1.0}, 0)
    run.model(weights, name=name)
    (folder / "after.txt").write_text("a file behind the model")
    run.artifact(folder / "after.txt")
    run.log({"train/loss": 0.5}, 1)
    return run.close(**close), run, name


def logged_models(client, run_id):
    experiment = client.get_run(run_id).info.experiment_id
    return client.search_logged_models([experiment], f"source_run_id = '{run_id}'")


def client_of(server):
    from mlflow.tracking import MlflowClient

    uri = f"http://127.0.0.1:{server}"
    return MlflowClient(uri, uri)


def test_a_model_arrives_over_a_network_that_needs_longer_than_a_small_request_may(server, network, tmp_path, quick):
    """Closing waits for uploads: by default 20 seconds, and one more for each 50 kB."""
    size = write_model(tmp_path / "model.safetensors", layers=2).stat().st_size
    network.pace = size / 12.0  # seconds; a small request has 5
    arrived, run, name = recorded(tmp_path)
    client = client_of(server)
    assert arrived and [one.status for one in logged_models(client, run.run_id)] == ["READY"]
    assert client.get_model_version_by_alias(name, "champion").run_id == run.run_id


def test_a_try_after_a_broken_connection_takes_up_what_is_there(server, network, tmp_path, quick):
    network.faults = ["cut", "cut", 503]
    arrived, run, _ = recorded(tmp_path, wait=120)
    client = client_of(server)
    models = logged_models(client, run.run_id)
    assert arrived and [one.status for one in models] == ["READY"]
    assert not network.faults and len(network.sent) == len(set(network.sent))  # each file once
    assert any(path.endswith("model.safetensors") for path in network.sent)


@pytest.mark.parametrize("status", [413, 500])
def test_an_upload_that_is_refused_holds_up_nothing(server, network, tmp_path, quick, monkeypatch, capfd, status):
    """413: too large for a proxy; 500: a server whose store of artifacts is broken, for this file alone."""
    from pipeline.tracking import uploads

    monkeypatch.setattr(uploads, "MAX_TRIES", 3)
    network.always = status
    arrived, run, _ = recorded(tmp_path, wait=120)
    client = client_of(server)
    assert arrived and client.get_run(run.run_id).data.metrics["train/loss"] == 0.5
    assert [file.path for file in client.list_artifacts(run.run_id)] == ["after.txt"]
    assert [one.status for one in logged_models(client, run.run_id)] == ["PENDING"]
    said = capfd.readouterr().err
    assert "an entry is left out" in said and "model.safetensors (3.1 MB)" in said


def test_points_do_not_wait_for_a_file_that_does_not_get_through(server, network, tmp_path, quick):
    network.always = 503
    arrived, run, _ = recorded(tmp_path, wait=8)
    client = client_of(server)
    assert not arrived
    found = client.get_run(run.run_id)
    assert found.data.metrics["train/loss"] == 0.5 and found.info.status == "FINISHED"
    assert len(logged_models(client, run.run_id)) == 1
