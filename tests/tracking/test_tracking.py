"""Tracking: the log comes first, every point arrives, and no server can hold up or end the work."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from faults.cells import Workbench
from faults.group import digest
from made_scenes import write_model
from made_trainings import leave_records_out
from mlflow_gate import Gate
from reading import read_files
from waiting import wait_until

from pipeline import mlflow_store as stores
from pipeline import tracking
from pipeline.errors import RequestError
from pipeline.provenance import main_root
from pipeline.tracking import EventLog
from pipeline.train import __main__ as train

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"  # seconds
PATIENCE = 120  # seconds: a guard, for a busy machine on which all takes long


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short pauses, and nothing inherited from the shell of the person who tests."""
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_NAME", "DVC_EXP_NAME", "DVC_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv(SAMPLING, "3600")
    monkeypatch.setattr(tracking, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(tracking, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(tracking, "RESEND_PATIENCE_SECONDS", 0.5)


@pytest.fixture
def gate(mlflow_store, monkeypatch):
    """A server in front of the mlflow_store, not yet started."""
    made = Gate(mlflow_store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", made.uri)
    yield made
    made.stop()


def open_run(folder, training="identity", **options):
    return tracking.open_run(folder, {}, training, name=training, **options)


def client_of(store):
    from mlflow.tracking import MlflowClient

    return MlflowClient(store, store)


def stored_run(store, name="identity"):
    """The only run of a store with this name."""
    client = client_of(store)
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = client.search_runs(experiments, f"run_name LIKE '{name}%'")
    assert len(runs) == 1
    return runs[0]


def steps(store, metric, name="identity"):
    """Steps of a metric of the run, as often as they arrived."""
    run_id = stored_run(store, name).info.run_id
    return [point.step for point in client_of(store).get_metric_history(run_id, metric)]


def write_weights(path, name="trained"):
    """A small model file; `name` decides its bytes."""
    return write_model(path, {"name": name}, dim=16, heads=2)


def resend(folder, *more):
    """The exit code of the command on the reports in a folder, as in a process of its own."""
    for each in threading.enumerate():
        # a sender that was given up may still be in a request
        if isinstance(each, tracking.Sender) and each._given_up.is_set():
            each.join(PATIENCE)
    return tracking.main(["resend", "--reports", str(folder), *more])


def log_steps(run, start, stop):
    for step in range(start, stop):
        run.log({"train/loss": 1.0 / (step + 1)}, step)


def test_a_run_has_params_curves_tags_files_and_model(mlflow_store, tmp_path, monkeypatch):
    (tmp_path / "matches.png").write_bytes(b"png")
    monkeypatch.setenv(SAMPLING, "0.2")
    views, own = {"tilt_deg": 0.0}, {"tilt_deg": 9.0}
    sections = {"views": views, "keypoints": {"views": views}, "evaluate": {"views": own}}
    with tracking.open_run(tmp_path / "reports", sections, "identity", name="identity") as run:
        log_steps(run, 0, 50)
        run.log({"val/loss": float("nan")}, 10)
        run.artifact(tmp_path / "matches.png", "pictures")
        run.tags({"data": "ab" * 32})
        run.model(write_weights(tmp_path / "best.safetensors"), step=50)
        log = tmp_path / "reports/log.jsonl"
        wait_until(lambda: log.read_text().count("system/cpu") >= 2)
    stored = stored_run(mlflow_store)
    assert stored.info.status == "FINISHED"
    params = stored.data.params
    assert {"version.torch", "host", "platform", "processor"} <= set(params)
    tilts = {name: value for name, value in params.items() if "tilt" in name}
    assert tilts == {"views.tilt_deg": "0.0", "evaluate.views.tilt_deg": "9.0"}  # each once
    assert steps(mlflow_store, "train/loss") == list(range(50))
    assert steps(mlflow_store, "val/loss") == [10]
    assert len(steps(mlflow_store, "system/cpu_utilization_percentage")) >= 2
    tags = stored.data.tags
    assert tags["superglue.data"] == "ab" * 32 and len(tags["superglue.params"]) == 16
    assert tags["superglue.world_size"] == "1" and len(tags["mlflow.source.git.commit"]) == 40
    version = client_of(mlflow_store).get_model_version_by_alias("superglue-sift", "champion")
    assert version.run_id == stored.info.run_id
    files = {path.name: path for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()}
    assert {"MLmodel", "best.safetensors", "matches.png"} <= {*files}
    assert files["matches.png"].parent.name == "pictures"
    assert not [name for name in files if name.endswith((".pkl", ".pickle", ".pyc"))]


def pairs_csv(path, errors, keypoints):
    """A pairs.csv of pairs in eight photographs with these errors of ours."""
    lines = ["pair,scene,matcher,keypoints0,error_ransac"]
    for number, error in enumerate(errors):
        pair = f"{number},{number % 8}"
        lines += [f"{pair},superglue,{keypoints},{error}", f"{pair},nn,{keypoints},9"]
    path.parent.mkdir()
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_champion_moves_only_to_a_model_that_is_surely_better_on_the_same_pairs(
    mlflow_store, tmp_path
):
    client = client_of(mlflow_store)
    folder = tmp_path / "reports"

    def champion_after(name, errors, keypoints=9):
        with open_run(folder, name) as run:
            run.model(write_weights(tmp_path / "best.safetensors", name), step=1)
        pairs = pairs_csv(tmp_path / name / "pairs.csv", errors, keypoints)
        with tracking.attach(folder / "log.jsonl", name) as run:
            run.artifact(pairs, "test")
            run.describe("AUC@5 60.0", "| a table |")
            run.compare_with_champion(pairs)
        return int(client.get_model_version_by_alias("superglue-sift", "champion").version)

    some = [1 + n % 3 for n in range(24)]
    assert champion_after("first", some) == 1
    assert champion_after("as good", some[1:] + some[:1]) == 1
    assert champion_after("other pairs", [0.1] * 24, keypoints=10) == 1
    assert champion_after("worse", [4.0] * 24) == 1
    assert champion_after("better", [e / 2 for e in some]) == 5
    versions = [client.get_model_version("superglue-sift", str(n)) for n in range(1, 6)]
    said = [version.tags["champion"] for version in versions]
    assert said[0] == "no: version 5 is better"
    assert said[2] == "no: evaluated on other pairs; compared with version 1"
    assert said[4].startswith("yes: AUC@5 +") and "95 % interval" in said[4]
    assert versions[4].description == "AUC@5 60.0, run better"
    assert stored_run(mlflow_store, "better").data.tags["mlflow.note.content"] == "| a table |"


def test_metrics_find_the_run_of_their_training_also_after_another_one(mlflow_store, tmp_path):
    for training in ("old", "new"):
        assert open_run(tmp_path, training).close("KILLED", patience=PATIENCE)
    for training in ("old", "unknown", None):
        with tracking.attach(tmp_path / "log.jsonl", training) as run:
            run.log({f"test/{training}": 1.0}, 0)
    old = stored_run(mlflow_store, "old")
    assert old.data.metrics == {"test/old": 1.0} and old.info.status == "KILLED"
    assert stored_run(mlflow_store, "new").data.metrics == {}
    with open_run(tmp_path, "old", resume=True) as run:  # the newest run of this training
        run.log({"train/loss": 1.0}, 1)
    assert stored_run(mlflow_store, "old").data.metrics == {"test/old": 1.0, "train/loss": 1.0}


def test_a_dead_server_gets_nothing_and_resend_sends_all(
    gate, mlflow_store, tmp_path, capfd, monkeypatch
):
    (tmp_path / "page.html").write_text("a report")
    run = open_run(tmp_path / "train")
    log_steps(run, 0, 1000)
    run.artifact(tmp_path / "page.html", "test")
    wait_until(lambda: run._sender.error)
    assert run.close() is False
    said = capfd.readouterr().err
    assert "does not have 1003 entries" in said and "log.jsonl does" in said
    assert "python -m pipeline.tracking resend" in said
    assert resend(tmp_path) == 1
    gate.start()
    monkeypatch.setattr(tracking, "RESEND_PATIENCE_SECONDS", PATIENCE)  # a busy server answers late
    assert resend(tmp_path) == 0
    assert steps(mlflow_store, "train/loss") == list(range(1000))
    stored = stored_run(mlflow_store)
    (file,) = client_of(mlflow_store).list_artifacts(stored.info.run_id, "test")
    assert stored.info.status == "FINISHED" and file.path == "test/page.html"
    assert "1 of 1 runs" in capfd.readouterr().out
    before = gate.requests
    assert resend(tmp_path) == 0
    assert gate.requests == before  # nothing is left


@pytest.mark.parametrize("fault", ["error", "hang", "deaf"])
def test_a_server_that_fails_in_the_middle_gets_every_point_once(
    gate, mlflow_store, tmp_path, fault
):
    gate.start()
    run = open_run(tmp_path)
    log_steps(run, 0, 100)
    wait_until(lambda: gate.posts > 3)
    gate.mode = fault
    before = gate.requests
    log_steps(run, 100, 200)
    assert gate.requests - before < 100  # no point waits for an answer of its own
    wait_until(lambda: run._sender.error)
    gate.mode = "up"
    log_steps(run, 200, 300)
    assert run.close(patience=PATIENCE)
    assert steps(mlflow_store, "train/loss") == list(range(300))


@pytest.mark.slow
def test_the_weights_are_the_same_without_mlflow_and_while_it_hangs(
    gate, mlflow_store, tmp_path, monkeypatch
):
    bench = Workbench(tmp_path)
    with monkeypatch.context() as patch:
        leave_records_out(patch)
        assert train.main(bench.training("without")) == 0
    gate.start("hang")
    # MLflow's handlers, which run in this process, put their own store into the environment
    monkeypatch.setenv("MLFLOW_TRACKING_URI", gate.uri)
    assert train.main(bench.training("hanging")) == 0
    assert digest(tmp_path / "hanging") == digest(tmp_path / "without") and gate.requests
    gate.mode = "up"
    assert resend(tmp_path / "hanging-r") == 0
    assert steps(mlflow_store, "val/f1", "") == [0, 2, 4, 6, 8]  # the initial weights first


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("localhost:5999", "write http://localhost:5999"),
        ("htp://localhost:5999", "unsupported URI 'htp://localhost:5999'"),
        ("", "import of mlflow halted"),
    ],
    ids=["no scheme", "unknown scheme", "no MLflow"],
)
def test_what_can_send_nothing_ends_at_once_and_resend_sends_to_another_address(
    mlflow_store, tmp_path, monkeypatch, capfd, uri, said
):
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        if not uri:
            patch.setitem(sys.modules, "mlflow", None)  # importing it raises ImportError
        run = open_run(tmp_path)
        log_steps(run, 0, 3)
        run._sender.join(PATIENCE)
        assert not run._sender.is_alive() and run.close() is False
        assert resend(tmp_path) == 1
    text = capfd.readouterr().err
    assert said in text and "5 entries" in text and "--to URI" in text
    assert resend(tmp_path, "--to", mlflow_store) == 0
    assert steps(mlflow_store, "train/loss") == [0, 1, 2]


def test_a_resumed_run_continues_without_doubling_the_steps_since_the_checkpoint(
    mlflow_store, tmp_path
):
    run = open_run(tmp_path)
    log_steps(run, 0, 57)
    run.close("KILLED")
    with open(tmp_path / "log.jsonl", "ab") as stream:
        stream.write(b'{"metrics": {"tra')  # as a kill leaves it
    again = open_run(tmp_path, resume=True)
    log_steps(again, 50, 80)
    again.close()
    assert steps(mlflow_store, "train/loss") == list(range(80))
    assert stored_run(mlflow_store).info.status == "FINISHED"


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "FAILED"), (SystemExit, "KILLED"), (None, "KILLED")]
)
def test_no_run_stays_running(mlflow_store, tmp_path, capsys, error, status):
    run = open_run(tmp_path)
    wait_until(lambda: run._sender._offset)
    assert stored_run(mlflow_store).info.status == "RUNNING"
    if error:
        with pytest.raises(error), run:
            raise error
    else:
        assert resend(tmp_path) == 0 and "is writing it" in capsys.readouterr().out
        # as SIGKILL leaves it: nobody ends the run
        run._sender._given_up.set()
        run._log.close()
        assert stored_run(mlflow_store).info.status == "RUNNING"
        assert resend(tmp_path) == 0
    assert stored_run(mlflow_store).info.status == status


def test_what_no_server_takes_holds_up_nothing_and_is_named(
    mlflow_store, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(tracking, "EVENTS_AT_ONCE", 1)
    (tmp_path / "torn.safetensors").write_bytes(b"weights")
    run = open_run(tmp_path / "reports")
    run.artifact(tmp_path / "missing.png")
    run.model(tmp_path / "torn.safetensors")
    run.log({"a bad name!": 1.0, "train/loss": 2.0}, 1)
    log_steps(run, 2, 3)
    run.model(write_weights(tmp_path / "best.safetensors"))
    assert run.close() is False
    stored = stored_run(mlflow_store)
    assert stored.info.status == "FINISHED" and steps(mlflow_store, "train/loss")[-1] == 2
    assert (
        client_of(mlflow_store).get_model_version("superglue-sift", "1").run_id
        == stored.info.run_id
    )
    said = capfd.readouterr().err
    assert "1 entries (Invalid value" in said
    assert "missing.png'" in said and "torn.safetensors: " in said
    assert "best.safetensors" not in said


def test_the_password_of_a_server_is_neither_printed_nor_stored(gate, tmp_path, monkeypatch, capfd):
    uri = f"http://me:hunter/22@127.0.0.1:{gate.port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    database = "postgresql+psycopg2://me:hunter/22@db/x?sslmode=require"
    run = open_run(tmp_path, tags={"remote": uri, "database": database})
    wait_until(lambda: run._sender.error)
    run.close()
    said = capfd.readouterr()
    assert said.err.count("127.0.0.1") >= 2 and "hunter" not in said.err + said.out
    log = (tmp_path / "log.jsonl").read_text()
    assert '"postgresql+psycopg2://db/x?sslmode=require"' in log and "hunter" not in log
    assert stores.redact("sqlite:////a@b/mlflow.db") == "sqlite:////a@b/mlflow.db"


def test_a_run_stays_where_it_arrived_else_the_current_address_counts(tmp_path, monkeypatch):
    here = f"sqlite:///{tmp_path / 'here.db'}"
    log = EventLog(tmp_path / "log.jsonl")
    log.append({"run": "1"})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", here)
    assert tracking.tracking_uri() == tracking.tracking_uri(log) == here
    # the store of another container is not there
    log.append({"sent": 0, "place": "sqlite:////of/another/container.db"})
    assert tracking.tracking_uri(log) == here
    log.append({"sent": 0, "place": "http://mlflow:5000"})
    assert tracking.tracking_uri(log) == "http://mlflow:5000"
    # the password, which is stored nowhere, is the environment's
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@mlflow:5000")
    assert tracking.tracking_uri(log) == "http://me:secret@mlflow:5000"
    # without an address, the store is that of the clone, also in a copy that DVC makes
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    copy = tmp_path / "clone/.dvc/tmp/exps/tmpabc"
    copy.mkdir(parents=True)
    (copy / "dvc.yaml").touch()
    monkeypatch.chdir(copy)
    assert main_root() == tmp_path / "clone"
    assert tracking.tracking_uri() == f"sqlite:///{tmp_path}/clone/mlflow.db"


@pytest.mark.slow
def test_a_copied_clone_has_its_own_store_and_files(empty_mlflow_store, tmp_path, monkeypatch):
    """The first clone stays as it is, and the copy shows its old files too."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    first, copy = tmp_path / "first", tmp_path / "copy"
    first.mkdir()
    (first / "dvc.yaml").touch()
    shutil.copy(empty_mlflow_store, first)
    write_weights(first / "best.safetensors")
    script = """if True:
        from pathlib import Path
        from pipeline import tracking
        with tracking.open_run(Path("reports"), {}, "identity", name="identity") as run:
            run.artifact(Path("dvc.yaml"), "old")
            run.model(Path("best.safetensors"))"""
    # in a process of its own, because MLflow remembers the folder of a run
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], cwd=first, env=environment, check=True)
    shutil.copytree(first, copy)
    before = read_files(first)
    monkeypatch.chdir(copy)
    with tracking.attach(copy / "reports/log.jsonl", "identity") as run:
        run.artifact(copy / "dvc.yaml", "new")
    assert {path.parent.name for path in copy.glob("mlartifacts/**/dvc.yaml")} == {"new", "old"}
    place = client_of(f"sqlite:///{copy / 'mlflow.db'}").get_model_version_download_uri(
        "superglue-sift", "1"
    )
    assert f"{copy}/mlartifacts/superglue-sift/" in place
    assert read_files(first) == before


def test_ui_prints_the_address_of_the_table_or_one_line_why_not(
    gate, mlflow_store, monkeypatch, capsys
):
    started = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words))
    with pytest.raises(RequestError, match=f"^{gate.uri}: .* failed"):
        tracking.main(["ui"])
    gate.start()
    table = "/#/experiments/1/runs?viewStateShareKey=results&workflowType=machine_learning\n"
    assert tracking.main(["ui"]) == 0 and not started  # a server has pages of its own
    assert capsys.readouterr().out == f"table of runs: {gate.uri}{table}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    tracking.main(["ui", "--port", "5099"])
    assert capsys.readouterr().out.startswith(f"table of runs: http://127.0.0.1:5099{table}")
    assert "5099" in started[0]
