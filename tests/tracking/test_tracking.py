"""Tracking: every point arrives once, and no server can hold up or end a training."""

import math
import time

import pytest
from faults.cells import Workbench
from faults.group import digest
from made_scenes import write_model
from made_trainings import leave_records_out
from mlflow_gate import Gate
from waiting import wait_until

from pipeline import tracking
from pipeline.train import __main__ as train


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Wait shortly, and inherit nothing from the shell of the person who tests."""
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_NAME", "DVC_EXP_NAME", "DVC_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    monkeypatch.setattr(tracking, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(tracking, "SEND_SECONDS", 0.1)


@pytest.fixture
def gate(mlflow_store, monkeypatch):
    """A server in front of the mlflow_store, not yet started."""
    gate = Gate(mlflow_store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", gate.uri)
    yield gate
    gate.stop()


def make_rows(stop):
    return [{"step": float(step), "loss": 1.0 / (step + 1)} for step in range(stop)]


def write_curve(reports, stop):
    """Write the curve of the training as a stage does."""
    (reports / "curves").mkdir(parents=True, exist_ok=True)
    lines = [f"{row['step']:.0f},{row['loss']:.6g}\n" for row in make_rows(stop)]
    (reports / "curves/train.csv").write_text("step,loss\n" + "".join(lines))


def open_run(reports, training="identity", **options):
    return tracking.open_run(reports, {}, training, name=training, **options)


def make_client(store):
    from mlflow.tracking import MlflowClient

    return MlflowClient(store, store)


def get_run(store, name="identity"):
    """The only run of a store with this name."""
    client = make_client(store)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"run_name LIKE '{name}%'")
    return run


def get_steps(store, metric, name="identity"):
    """Steps of a metric of the run, as often as they arrived."""
    run_id = get_run(store, name).info.run_id
    return [point.step for point in make_client(store).get_metric_history(run_id, metric)]


def write_weights(path):
    return write_model(path, {}, dim=16, heads=2)


def send(reports, *options):
    """The exit code of the command."""
    return tracking.main(["send", "--reports", str(reports), *options])


def test_a_run_has_params_curves_tags_files_and_model(mlflow_store, tmp_path):
    (tmp_path / "matches.png").write_bytes(b"png")
    weights = write_weights(tmp_path / "best.safetensors")
    params = {"train": {"lr": 0.1}}
    with tracking.open_run(tmp_path / "reports", params, "identity", name="identity") as run:
        run.log_points("train", make_rows(50))
        run.log_points("val", [*make_rows(3), {"step": 3.0, "loss": math.nan}])
        run.add_artifact(tmp_path / "matches.png", "pictures")
        run.set_tags({"data": "ab" * 32})
        run.register_model(weights, weights, 50)
        wait_until(lambda: run._run_id)
        wait_until(lambda: len(get_steps(mlflow_store, "system/cpu_utilization_percentage")) > 1)
    stored = get_run(mlflow_store)
    assert stored.info.status == "FINISHED"
    assert stored.data.params["train.lr"] == "0.1"
    assert {"version.torch", "platform", "processor"} <= set(stored.data.params)
    assert get_steps(mlflow_store, "train/loss") == list(range(50))
    assert get_steps(mlflow_store, "val/loss") == [0, 1, 2]
    tags = stored.data.tags
    assert tags["superglue.data"] == "ab" * 32 and tags["superglue.world_size"] == "1"
    (version,) = make_client(mlflow_store).search_model_versions("name = 'superglue-sift'")
    assert version.run_id == stored.info.run_id and version.tags["step"] == "50"
    files = {path.name: path for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()}
    assert {"MLmodel", "best.safetensors", "matches.png"} <= {*files}
    assert files["matches.png"].parent.name == "pictures"
    assert not [name for name in files if name.endswith((".pkl", ".pickle"))]


def test_an_evaluation_adds_to_the_run_of_its_training_alone(mlflow_store, tmp_path):
    assert open_run(tmp_path, "trained").close("KILLED")
    for training in ("trained", "another", None):
        with tracking.attach(tmp_path / tracking.RECORD, training) as run:
            run.log_metrics({f"test/{training}": 1.0}, 0)
    stored = get_run(mlflow_store, "trained")
    assert stored.data.metrics["test/trained"] == 1.0 and stored.info.status == "KILLED"
    assert not [name for name in stored.data.metrics if name in ("test/another", "test/None")]


def test_without_a_record_and_on_other_ranks_a_run_does_nothing(tmp_path):
    for run in (
        tracking.attach(tmp_path / tracking.RECORD, "identity"),
        open_run(tmp_path, enabled=False),
    ):
        run.log_points("train", make_rows(2))
        assert run.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("start", ["dead", "hang", "error"])
def test_what_a_server_missed_is_sent_once(gate, mlflow_store, tmp_path, capfd, start):
    (tmp_path / "page.html").write_text("a report")
    reports = tmp_path / "train"
    if start != "dead":
        gate.start(start)
    run = open_run(reports)
    begin = time.monotonic()
    run.log_points("train", make_rows(1000))
    assert time.monotonic() - begin < 1  # The training does not wait
    run.add_artifact(tmp_path / "page.html", "test")
    write_curve(reports, 1000)
    assert run.close() is False
    assert "python -m pipeline.tracking send" in capfd.readouterr().err
    assert send(reports) == 1
    gate.mode = "up"
    if start == "dead":
        gate.start()
    for _ in range(2):
        assert send(reports) == 0
    assert get_steps(mlflow_store, "train/loss") == list(range(1000))
    stored = get_run(mlflow_store)
    (file,) = make_client(mlflow_store).list_artifacts(stored.info.run_id, "test")
    assert stored.info.status == "FINISHED" and file.path == "test/page.html"


@pytest.mark.parametrize("fault", ["error", "hang", "deaf"])
def test_a_server_that_fails_in_the_middle_gets_every_step(gate, mlflow_store, tmp_path, fault):
    gate.start()
    run = open_run(tmp_path)
    run.log_points("train", make_rows(100))
    wait_until(lambda: run._run_id)
    wait_until(lambda: get_steps(mlflow_store, "train/loss") == list(range(100)))
    gate.mode = fault
    run.log_points("train", make_rows(200)[100:])
    wait_until(lambda: run._error)
    gate.mode = "up"
    run.log_points("train", make_rows(300)[200:])
    assert run.close()
    steps = get_steps(mlflow_store, "train/loss")
    assert sorted(set(steps)) == list(range(300))
    # Points whose arrival the server did not confirm are looked up before they are sent again.
    assert len(steps) == 300


def test_parameters_arrive_after_a_server_failed_at_the_start(mlflow_store, tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    log_batch = MlflowClient.log_batch
    failures = iter([OSError("lost")])

    def fail_once(*arguments, **options):
        for error in failures:
            raise error
        return log_batch(*arguments, **options)

    monkeypatch.setattr(MlflowClient, "log_batch", fail_once)
    run = tracking.open_run(tmp_path, {"train": {"lr": 0.1}}, "identity", name="identity")
    wait_until(lambda: run._error)
    assert run.close()
    assert get_run(mlflow_store).data.params["train.lr"] == "0.1"


def test_runs_that_end_at_once_end(mlflow_store, tmp_path):
    for number in range(20):
        assert open_run(tmp_path, str(number)).close()


def test_a_resumed_training_repeats_no_point(mlflow_store, tmp_path):
    run = open_run(tmp_path)
    run.log_points("train", make_rows(8))
    assert run.close("KILLED")
    with open_run(tmp_path, resume=True) as run:
        run.log_points("train", make_rows(6))  # The checkpoint is of step 5
        run.log_points("train", make_rows(12)[6:])
    assert get_steps(mlflow_store, "train/loss") == list(range(12))
    assert get_run(mlflow_store).info.status == "FINISHED"


def test_a_run_whose_process_was_killed_is_closed_by_send(mlflow_store, tmp_path):
    run = open_run(tmp_path)
    write_curve(tmp_path, 5)
    wait_until(lambda: run._run_id)
    run._closing.set = lambda: None  # The process is gone
    assert get_run(mlflow_store).info.status == "RUNNING"
    assert send(tmp_path) == 0
    assert get_run(mlflow_store).info.status == "KILLED"
    assert get_steps(mlflow_store, "train/loss") == list(range(5))


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "KILLED"), (ValueError, "FAILED")]
)
def test_an_error_gives_the_run_its_state(mlflow_store, tmp_path, error, status):
    with pytest.raises(error), open_run(tmp_path):
        raise error
    assert get_run(mlflow_store).info.status == status


def test_a_run_can_be_sent_to_another_address(mlflow_store, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    write_curve(tmp_path, 4)
    assert not open_run(tmp_path).close()
    assert send(tmp_path, "--to", mlflow_store) == 0
    assert get_steps(mlflow_store, "train/loss") == [0, 1, 2, 3]


def test_the_password_of_a_server_is_neither_printed_nor_stored(gate, tmp_path, monkeypatch, capfd):
    gate.start("error")
    uri = gate.uri.replace("://", "://user:pa55w0rd@")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert not open_run(tmp_path).close()
    gate.mode = "up"
    assert send(tmp_path) == 0
    texts = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in (*texts, *capfd.readouterr()) if "pa55w0rd" in text]


@pytest.mark.slow
def test_the_weights_are_the_same_without_mlflow_and_while_it_hangs(
    gate, mlflow_store, tmp_path, monkeypatch
):
    bench = Workbench(tmp_path)
    with monkeypatch.context() as patch:
        leave_records_out(patch)
        assert train.main(bench.training("without")) == 0
    gate.start("hang")
    # MLflow's handlers, which run in this process, put their own store into the environment.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", gate.uri)
    assert train.main(bench.training("hanging")) == 0
    assert digest(tmp_path / "hanging") == digest(tmp_path / "without") and gate.requests
    gate.mode = "up"
    assert send(tmp_path / "hanging-r") == 0
    assert get_steps(mlflow_store, "val/f1", "") == [0, 2, 4, 6, 8]  # First the initial weights
