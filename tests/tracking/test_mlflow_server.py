"""The shared MLflow server as docker/mlflow starts it: who may call it, and that artifacts go
through it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_server import SlowProxy
from made_scenes import write_model

from pipeline import tracking
from pipeline.tracking import __main__ as command
from pipeline.tracking import sender

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
PATIENCE = 120


@pytest.fixture(scope="module")
def server(start_server):
    """Port of a running server."""
    mlflow = pytest.importorskip("mlflow")
    if tuple(map(int, mlflow.__version__.split(".")[:2])) < (3, 5):
        pytest.skip(
            f"mlflow {mlflow.__version__} has no --allowed-hosts; the server image has a later one"
        )
    return start_server(
        [str(ROOT / "docker" / "mlflow" / "serve.py")],
        "/health",
        MLFLOW_PORT="{port}",
        MLFLOW_BACKEND_STORE_URI="sqlite:///{folder}/mlflow.db",
        MLFLOW_ARTIFACTS="{folder}/artifacts",
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
    )


@pytest.fixture
def network(server, monkeypatch):
    """A slow network in front of the tracking server."""
    made = SlowProxy(server)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", made.url)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", f"through {made.url}")
    monkeypatch.setattr(sender, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(sender, "LONGEST_PAUSE_SECONDS", 0.5)
    yield made
    made.close()


def close_run(folder, server, **close):
    """Close a run with a model of 3 MB. Whether all arrived, a client, the run there."""
    from mlflow.tracking import MlflowClient

    weights = write_model(folder / "model.safetensors", layers=2)
    run = tracking.open_run(folder / "reports", {"train": {"lr": 1}}, system_metrics=False)
    run.model(weights)
    (folder / "after.txt").write_text("a file behind the model")
    run.artifact(folder / "after.txt")
    run.log({"train/loss": 0.5}, 1)
    arrived = run.close(**close)
    client = MlflowClient(f"http://127.0.0.1:{server}", f"http://127.0.0.1:{server}")
    experiments = [each.experiment_id for each in client.search_experiments()]
    (found,) = client.search_runs(experiments, f"tags.`mlflow.superglue.run_key` = '{run.key}'")
    assert found.data.metrics["train/loss"] == 0.5 and found.info.status == "FINISHED"
    return arrived, client, found


def count_versions(client, run):
    return len(client.search_model_versions(f"run_id = '{run.info.run_id}'"))


def test_a_model_arrives_over_a_network_that_needs_longer_than_a_small_request_may(
    server, network, tmp_path
):
    """Closing waits for uploads: by default 20 seconds, and one more for each 50 kB."""
    size = write_model(tmp_path / "model.safetensors", layers=2).stat().st_size
    network.pace = size / 12.0  # seconds; a small request has 5
    arrived, client, run = close_run(tmp_path, server)
    assert arrived and count_versions(client, run) == 1
    assert run.info.artifact_uri.startswith("mlflow-artifacts:/")


@pytest.mark.parametrize("status", [413, 500])
def test_a_file_that_is_refused_holds_up_nothing_and_is_named(
    server, network, tmp_path, capfd, status
):
    """413: too large for a proxy; 500: a broken store of artifacts, for this file alone."""
    network.status = status
    arrived, client, run = close_run(tmp_path, server, wait=PATIENCE)
    assert not arrived and count_versions(client, run) == 0
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["after.txt"]
    said = capfd.readouterr().err
    assert "does not have the model model.safetensors (" in said and "after.txt" not in said
    network.status = None
    assert command.main(["resend", "--reports", str(tmp_path)]) == 0
    assert count_versions(client, run) == 1
