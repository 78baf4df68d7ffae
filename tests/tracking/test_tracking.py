"""Tracking: the log comes first, every point arrives, and no server can hold up or end the work."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from faults.cells import Workbench
from faults.group import digest
from made_scenes import write_model
from made_trainings import leave_mlflow_out
from mlflow_gate import Gate
from reading import read_files
from waiting import wait_until

from pipeline import tracking
from pipeline.errors import RequestError
from pipeline.mlflow_store import redact
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
    monkeypatch.setattr(tracking, "LONGEST_PAUSE_SECONDS", 0.2)


@pytest.fixture
def store(mlflow_store):
    return mlflow_store


@pytest.fixture
def gate(store, monkeypatch):
    """A server in front of the store, not yet started."""
    made = Gate(store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", made.uri)
    yield made
    made.stop()


def open_run(folder, training="identity", **options):
    return tracking.open_run(folder, {"train": {"lr": 1e-4, "layers": 5}}, training, **options)


def client_of(store):
    from mlflow.tracking import MlflowClient

    return MlflowClient(store, store)


def stored_run(store, run=None):
    """The run of a store with this key, or its only one."""
    client = client_of(store)
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    if run is not None:
        runs = [each for each in runs if each.data.tags["superglue.run_key"] == run.key]
    assert len(runs) == 1
    return runs[0]


def steps(store, name, run=None):
    """Steps of a metric, as often as they arrived."""
    run_id = stored_run(store, run).info.run_id
    return [metric.step for metric in client_of(store).get_metric_history(run_id, name)]


def samples(reports):
    """Number of system samples in the log."""
    return (reports / "log.jsonl").read_text().count("system/cpu")


def write_weights(path, name="trained"):
    """A small model file; `name` decides its bytes."""
    return write_model(path, {"name": name}, dim=16, heads=2)


def resend(folder, *more):
    """The exit code of the command on the reports in a folder, as in a process of its own."""
    senders = [each for each in threading.enumerate() if isinstance(each, tracking.Sender)]
    for each in senders:
        if each._given_up.is_set():  # it may still be in a request
            each.join(PATIENCE)
    return tracking.main(["resend", "--reports", str(folder), *more])


def log_steps(run, start, stop):
    for step in range(start, stop):
        run.log({"train/loss": 1.0 / (step + 1)}, step)


def test_a_run_has_params_curves_tags_data_files_and_model(store, tmp_path, monkeypatch):
    (tmp_path / "matches.png").write_bytes(b"png")
    monkeypatch.setenv(SAMPLING, "0.2")
    views, own = {"tilt_deg": 0.0}, {"tilt_deg": 9.0}
    sections = {"views": views, "keypoints": {"views": views}, "evaluate": {"views": own}}
    with tracking.open_run(tmp_path / "reports", sections, "identity", name="sample") as run:
        log_steps(run, 0, 50)
        run.log({"val/loss": float("nan")}, 10)
        run.artifact(tmp_path / "matches.png", "pictures")
        run.tags({"data": "ab" * 32})
        run.model(write_weights(tmp_path / "best.safetensors"), step=50)
        wait_until(lambda: samples(tmp_path / "reports") >= 2)
    client = client_of(store)
    stored = stored_run(store)
    assert stored.info.status == "FINISHED" and stored.info.run_name == "sample"
    params = stored.data.params
    assert {"version.torch", "host", "platform", "processor"} <= set(params)
    tilts = {name: value for name, value in params.items() if "tilt" in name}
    assert tilts == {"views.tilt_deg": "0.0", "evaluate.views.tilt_deg": "9.0"}  # each once
    assert steps(store, "train/loss") == list(range(50))
    assert len(steps(store, "system/cpu_utilization_percentage")) >= 2
    tags = stored.data.tags
    assert tags["superglue.data"] == "ab" * 32 and len(tags["superglue.params"]) == 16
    assert tags["superglue.world_size"] == "1" and len(tags["mlflow.source.git.commit"]) == 40
    (file,) = client.list_artifacts(stored.info.run_id, "pictures")
    assert file.path == "pictures/matches.png"
    version = client.get_model_version_by_alias("superglue-sift", "champion")
    assert version.run_id == stored.info.run_id
    names = {path.name for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()}
    assert {"MLmodel", "best.safetensors"} <= names
    assert not [name for name in names if name.endswith((".pkl", ".pickle", ".pyc"))]


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
    store, tmp_path
):
    client = client_of(store)
    folder = tmp_path / "reports"

    def champion_after(name, errors, keypoints=9):
        model = write_weights(tmp_path / "best.safetensors", name)
        with open_run(folder, name, name=name, tags={"preset": "ci"}) as run:
            run.model(model, step=1)
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
    assert versions[4].description == "AUC@5 60.0, run better, preset ci"
    assert "`champion`" in client.get_registered_model("superglue-sift").description


def test_metrics_find_the_run_of_their_training_also_after_another_one(gate, store, tmp_path):
    gate.start()
    runs = {}
    for training in ("old", "new"):
        runs[training] = open_run(tmp_path, training=training)
        assert runs[training].close("KILLED", patience=PATIENCE)  # it has arrived
    with pytest.MonkeyPatch.context() as patch:  # as in the last job of a cluster
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'image.db'}")
        for training in ("old", "unknown", None):
            with tracking.attach(tmp_path / "log.jsonl", training) as run:
                run.log({f"test/{training}": 1.0}, 0)
    assert not (tmp_path / "image.db").exists()
    old = stored_run(store, runs["old"])
    assert old.data.metrics == {"test/old": 1.0} and old.info.status == "KILLED"
    assert stored_run(store, runs["new"]).data.metrics == {}
    # the old one is resumed: its log is log.jsonl again, and the other's stays
    with open_run(tmp_path, training="old", resume=True) as run:
        run.log({"train/loss": 1.0}, 1)
    assert stored_run(store, runs["old"]).data.metrics == {"test/old": 1.0, "train/loss": 1.0}
    assert EventLog(tmp_path / "log.jsonl").header()["run"] == runs["old"].key
    assert len(list(tmp_path.glob("log-*.jsonl"))) == 1


def test_a_dead_server_holds_up_nothing_and_resend_sends_all(
    gate, store, tmp_path, monkeypatch, capfd
):
    (tmp_path / "page.html").write_text("a report")
    began = time.monotonic()
    run = open_run(tmp_path / "train")
    log_steps(run, 0, 1000)
    run.artifact(tmp_path / "page.html", "test")
    assert time.monotonic() - began < 10  # no point waits until the server has been tried
    wait_until(lambda: run._sender.error)
    began = time.monotonic()
    assert run.close() is False
    assert time.monotonic() - began < 10  # by default
    said = capfd.readouterr().err
    assert "does not have 1002 entries, page.html" in said and "log.jsonl does" in said
    assert "python -m pipeline.tracking resend" in said
    with monkeypatch.context() as patch:
        patch.setattr(tracking, "RESEND_PATIENCE_SECONDS", 1.0)
        assert resend(tmp_path) == 1
    gate.start()
    assert resend(tmp_path) == 0
    assert steps(store, "train/loss") == list(range(1000))
    stored = stored_run(store)
    assert stored.info.status == "FINISHED"
    assert [file.path for file in client_of(store).list_artifacts(stored.info.run_id)] == ["test"]
    assert "1 of 1 runs" in capfd.readouterr().out
    before = gate.requests
    assert resend(tmp_path) == 0
    assert gate.requests == before  # nothing is left


def test_without_mlflow_one_line_is_said_and_nothing_waited_for(
    store, tmp_path, monkeypatch, capfd
):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mlflow", None)  # importing it raises ImportError
        run = open_run(tmp_path)
        log_steps(run, 0, 20)
        run._sender.join(PATIENCE)
        assert not run._sender.is_alive()  # whom closing would wait for
        assert run.close() is False
    said = capfd.readouterr().err
    assert said.count("tracking: ") == 1 and "mlflow" in said and "22 entries" in said
    assert tracking.attach(tmp_path / "log.jsonl", "identity").close()  # as `evaluate` does
    assert steps(store, "train/loss") == list(range(20))


@pytest.mark.parametrize("fault", ["error", "hang", "deaf"])
def test_a_server_that_fails_in_the_middle_gets_every_point_once(gate, store, tmp_path, fault):
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
    assert steps(store, "train/loss") == list(range(300))


def test_the_weights_are_the_same_without_mlflow_and_while_it_hangs(
    gate, store, tmp_path, monkeypatch
):
    bench = Workbench(tmp_path)

    def trained(name):
        # MLflow's handlers, which run in this process, put their own store into the environment
        monkeypatch.setenv("MLFLOW_TRACKING_URI", gate.uri)
        folders = ["--out", tmp_path / name, "--reports", tmp_path / f"{name}-r"]
        assert train.main([*bench.arguments(), *map(str, folders)]) == 0
        return digest(tmp_path / name)

    with monkeypatch.context() as patch:
        leave_mlflow_out(patch)
        without = trained("without")
    gate.start("hang")
    assert trained("hanging") == without and gate.requests
    gate.mode = "up"
    assert resend(tmp_path / "hanging-r") == 0
    assert steps(store, "train/loss") == [2, 4, 6, 8]
    assert steps(store, "val/f1") == [0, 2, 4, 6, 8]  # the initial weights first
    assert EventLog(tmp_path / "hanging-r/log.jsonl").sent()[gate.uri]


def test_a_resumed_run_continues_without_doubling_the_steps_since_the_checkpoint(store, tmp_path):
    run = open_run(tmp_path)
    log_steps(run, 0, 57)
    run.close("KILLED")
    again = open_run(tmp_path, resume=True)
    log_steps(again, 50, 80)
    again.close()
    assert steps(store, "train/loss") == list(range(80))
    assert stored_run(store).info.status == "FINISHED"


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "FAILED"), (SystemExit, "KILLED"), (None, "KILLED")]
)
def test_no_run_stays_running(store, tmp_path, error, status):
    run = open_run(tmp_path)
    wait_until(lambda: run._sender._offset)
    if error:
        with pytest.raises(error), run:
            raise error
    else:  # as SIGKILL leaves it: nobody ends the run
        run._sender._given_up.set()
        run._log.close()
        assert stored_run(store).info.status == "RUNNING"
        assert resend(tmp_path) == 0
    assert stored_run(store).info.status == status


def test_resend_leaves_alone_what_a_process_is_writing(store, tmp_path, capsys):
    run = open_run(tmp_path / "reports")
    assert resend(tmp_path) == 0
    assert "a process is writing it" in capsys.readouterr().out
    assert run.close() and stored_run(store).info.status == "FINISHED"
    with pytest.raises(RequestError, match="none: no such folder"):
        resend(tmp_path / "none")


def test_what_no_server_takes_holds_up_nothing_and_is_named(store, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tracking, "EVENTS_AT_ONCE", 1)
    (tmp_path / "torn.safetensors").write_bytes(b"weights")
    run = open_run(tmp_path / "reports")
    run.log({"train/loss": "high"}, 0)
    run.artifact(tmp_path / "missing.png")
    run.model(tmp_path / "torn.safetensors")
    run.log({"a bad name!": 1.0, "train/loss": 2.0}, 1)
    run.log({"train/loss": 3.0}, 2)
    run.model(write_weights(tmp_path / "best.safetensors"))
    assert run.close() is False
    stored = stored_run(store)
    assert stored.info.status == "FINISHED" and steps(store, "train/loss")[-1] == 2
    versions = client_of(store).search_model_versions(f"run_id = '{stored.info.run_id}'")
    assert len(versions) == 1
    said = capfd.readouterr().err
    assert "not a number" in said and "1 entries (Invalid value" in said
    assert "missing.png (" in said and "torn.safetensors (" in said
    assert "best.safetensors" not in said


def test_a_torn_line_is_left_out(tmp_path):
    log = EventLog(tmp_path / "log.jsonl")
    log.append({"run": "1"})
    log.close()
    with open(log.path, "ab") as stream:
        stream.write(b'{"metrics": {"tra')
    assert [event for event, _ in log.read()] == [{"run": "1"}]
    log.append({"end": "KILLED"})
    assert [event for event, _ in log.read() if event] == [{"run": "1"}, {"end": "KILLED"}]


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("https://me:secret@host:5000/x", "https://host:5000/x"),
        ("port 'x': http://me:sec/ret@host", "port 'x': http://host"),
        (
            "postgresql+psycopg2://me:s3cret@db/x?sslmode=require",
            "postgresql+psycopg2://db/x?sslmode=require",
        ),
        (
            "postgresql://db/x?user=me&password=s3cret&a=b",
            "postgresql://db/x?user=me&password=***&a=b",
        ),
        ("sqlite:////a@b/mlflow.db", "sqlite:////a@b/mlflow.db"),
        ("denied: tok3n", "denied: ***"),
    ],
)
def test_a_text_that_leaves_has_no_password(text, redacted, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "tok3n")
    assert redact(text) == redacted


def test_the_password_of_a_server_is_neither_printed_nor_stored(gate, tmp_path, monkeypatch, capfd):
    uri = f"http://me:hunter22@127.0.0.1:{gate.port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run = open_run(tmp_path, tags={"remote": uri})
    wait_until(lambda: run._sender.error)
    run.close(patience=0.1)
    said = capfd.readouterr()
    assert "does not answer" in said.err and "hunter22" not in said.err + said.out
    assert "hunter22" not in (tmp_path / "log.jsonl").read_text()


def test_a_run_stays_where_it_arrived_else_the_current_address_counts(tmp_path, monkeypatch):
    here = f"sqlite:///{tmp_path / 'here.db'}"
    log = EventLog(tmp_path / "log.jsonl")
    log.append({"run": "1", "tracking_uri": "http://mlflow:5000"})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", here)
    assert tracking.tracking_uri() == here
    assert tracking.tracking_uri(log) == here  # the first address never answered
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert tracking.tracking_uri(log) == "http://mlflow:5000"  # nobody names another one
    log.append({"sent": 0, "place": "sqlite:////of/another/container.db"})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", here)
    assert tracking.tracking_uri(log) == here
    log.append({"sent": 0, "place": "http://mlflow:5000"})
    assert tracking.tracking_uri(log) == "http://mlflow:5000"
    # the password, which is stored nowhere, is the environment's
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@mlflow:5000")
    assert tracking.tracking_uri(log) == "http://me:secret@mlflow:5000"


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("localhost:5999", "write http://localhost:5999"),
        ("htp://localhost:5999", "unsupported URI 'htp://localhost:5999'"),
    ],
)
def test_a_wrong_address_ends_at_once_and_the_corrected_one_counts(
    store, tmp_path, monkeypatch, capfd, uri, said
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run = open_run(tmp_path)
    log_steps(run, 0, 3)
    run._sender.join(PATIENCE)
    assert not run._sender.is_alive() and run.close() is False
    assert resend(tmp_path) == 1  # not after an hour
    text = capfd.readouterr().err
    assert said in text and "--to URI" in text
    assert resend(tmp_path, "--to", store) == 0
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    assert resend(tmp_path) == 0
    assert steps(store, "train/loss") == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 1.0])
def test_a_store_whose_creation_was_killed_is_created_by_the_next_run(tmp_path, monkeypatch, after):
    path = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
    script = "import sys; from pathlib import Path; from pipeline import mlflow_store as s; "
    script += "s.create_database(Path(sys.argv[1]))"
    words = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(words, cwd=ROOT) as process:
        beside = tmp_path / ".mlflow.db.new"
        wait_until(lambda: (beside.exists() and beside.stat().st_size > 0) or path.exists())
        time.sleep(after)
        process.kill()
    with open_run(tmp_path / "reports") as run:
        run.log({"train/loss": 1.0}, 1)
        assert run.close(patience=PATIENCE)
    assert [file.name for file in tmp_path.glob("*mlflow.db*")] == ["mlflow.db"]


def test_a_store_that_an_older_version_left_half_made_is_named(tmp_path, monkeypatch, capfd):
    with contextlib.closing(sqlite3.connect(tmp_path / "half.db")) as half:
        half.execute("CREATE TABLE _alembic_tmp_runs (a)")
        half.execute("CREATE TABLE experiments (a)")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'half.db'}")
    run = open_run(tmp_path / "reports")
    assert run.close(patience=PATIENCE) is False
    said = capfd.readouterr().err
    assert f"{tmp_path}/half.db refuses" in said and "rename or delete it" in said
    assert (tmp_path / "half.db").is_file()


def test_a_copied_clone_has_its_own_store_and_files(empty_mlflow_store, tmp_path, monkeypatch):
    """The first clone stays as it is, and the copy shows its old files too."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    first, copy = tmp_path / "first", tmp_path / "copy"
    first.mkdir()
    (first / "dvc.yaml").touch()
    (first / "mlflow.db").write_bytes(empty_mlflow_store.read_bytes())
    write_weights(first / "best.safetensors")
    script = """if True:
        from pathlib import Path
        from pipeline import tracking
        with tracking.open_run(Path("reports"), {}, "identity") as run:
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
    store = f"sqlite:///{copy / 'mlflow.db'}"
    stored = stored_run(store)
    client = client_of(store)
    assert stored.info.artifact_uri.startswith(f"file://{copy}/mlartifacts/superglue-sift/")
    files = client.list_artifacts(stored.info.run_id)
    assert [file.path for file in files if file.is_dir] == ["new", "old"]
    place = client.get_model_version_download_uri("superglue-sift", "1")
    assert f"{copy}/mlartifacts" in place
    assert read_files(first) == before


def test_ui_prints_the_address_of_the_table_or_one_line_why_not(gate, store, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words))
    with pytest.raises(RequestError, match=f"^{gate.uri}: .* failed"):
        tracking.main(["ui"])
    gate.start()
    table = "/#/experiments/1/runs?viewStateShareKey=results&workflowType=machine_learning\n"
    assert tracking.main(["ui"]) == 0 and not started  # a server has pages of its own
    assert capsys.readouterr().out == f"table of runs: {gate.uri}{table}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    tracking.main(["ui", "--port", "5099"])
    assert capsys.readouterr().out.startswith(f"table of runs: http://127.0.0.1:5099{table}")
    assert "5099" in started[0]


def test_the_store_of_a_dvc_experiment_is_the_clones(tmp_path, monkeypatch):
    copy = tmp_path / "clone/.dvc/tmp/exps/tmpabc"
    copy.mkdir(parents=True)
    (copy / "dvc.yaml").touch()
    monkeypatch.chdir(copy)
    assert main_root() == tmp_path / "clone"
