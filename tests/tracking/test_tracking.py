"""Tracking: the log comes first, every point arrives, and no server can hold up or end the work."""

import os
import shlex
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
from pipeline.provenance import find_clone
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
        run.log_metrics({"train/loss": 1.0 / (step + 1)}, step)


def test_a_run_has_params_curves_tags_files_and_model(mlflow_store, tmp_path, monkeypatch):
    (tmp_path / "matches.png").write_bytes(b"png")
    monkeypatch.setenv(SAMPLING, "0.2")
    views, own = {"tilt_deg": 0.0}, {"tilt_deg": 9.0}
    sections = {"views": views, "keypoints": {"views": views}, "evaluate": {"views": own}}
    with tracking.open_run(tmp_path / "reports", sections, "identity", name="identity") as run:
        log_steps(run, 0, 50)
        run.log_metrics({"val/loss": float("nan")}, 10)
        run.add_artifact(tmp_path / "matches.png", "pictures")
        run.set_tags({"data": "ab" * 32})
        run.register_model(write_weights(tmp_path / "best.safetensors"), step=50)
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


SOME = [1 + n % 3 for n in range(24)]  # px, errors of a model


def pairs_csv(path, errors, keypoints, photographs, matcher="superglue"):
    """A pairs.csv of pairs of some photographs, with these errors of ours."""
    lines = ["pair,scene,matcher,keypoints0,error_ransac"]
    for number, error in enumerate(errors):
        pair = f"{number},{number % photographs}"
        lines += [f"{pair},{matcher},{keypoints},{error}", f"{pair},nn,{keypoints},9"]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def champion(mlflow_store, tmp_path):
    """`champion(name, errors)`: the number of the champion after this training is evaluated.

    Without errors, it is not evaluated. A training of a name that is known is continued.
    """
    folder = tmp_path / "reports"
    numbers = iter(range(1, 9))

    def train_and_evaluate(name, errors=(), keypoints=9, photographs=8, **columns):
        with open_run(folder, name, resume=True) as run:
            weights = write_weights(tmp_path / "best.safetensors", name)
            run.register_model(weights, step=next(numbers))
        if errors:
            path = tmp_path / name / "pairs.csv"
            pairs = pairs_csv(path, errors, keypoints, photographs, **columns)
            with tracking.attach(folder / "log.jsonl", name) as run:
                run.describe("AUC@5 60.0", "| a table |")
                run.compare_with_champion(pairs)
                run.add_artifact(pairs, "test")
        client = client_of(mlflow_store)
        return int(client.get_model_version_by_alias("superglue-sift", "champion").version)

    return train_and_evaluate


def verdict(store, number):
    """The tag `champion` of a version."""
    return client_of(store).get_model_version("superglue-sift", str(number)).tags["champion"]


def test_the_champion_stays_unless_another_model_is_surely_better(champion, mlflow_store, capfd):
    assert champion("first", SOME) == 1
    assert verdict(mlflow_store, 1) == "yes: no version was champion"
    better = [error / 2 for error in SOME]
    evaluations = {
        "as good": ({"errors": SOME[1:] + SOME[:1]}, "AUC@5 "),
        "worse": ({"errors": [4.0] * 24}, "AUC@5 -"),
        "other keypoints": ({"errors": better, "keypoints": 10}, "evaluated on other pairs"),
        "other photographs": ({"errors": better, "photographs": 7}, "evaluated on other pairs"),
        "old": ({"errors": better, "matcher": "ours"}, "evaluated by another version"),
        "not evaluated": ({}, "not yet evaluated"),
        # another version of the champion's run
        "first": ({"errors": SOME}, "AUC@5 +0.0 points"),
    }
    capfd.readouterr()
    for number, (name, (options, said)) in enumerate(evaluations.items(), 2):
        assert champion(name, **options) == 1, name
        assert verdict(mlflow_store, number).startswith(f"no: {said}"), name
        line = capfd.readouterr().err
        if options:
            replaces = f"version 1 stays champion; version {number} does not replace it: {said}"
            assert replaces in line and line.endswith("compared with version 1\n")
    assert verdict(mlflow_store, 1) == "yes: no version was champion"


def test_the_champion_moves_to_a_model_that_is_surely_better_on_the_same_pairs(
    champion, mlflow_store, capfd
):
    assert champion("first", SOME) == 1
    assert champion("better", [error / 2 for error in SOME]) == 2
    assert "version 2 is the new champion: AUC@5 +" in capfd.readouterr().err
    assert verdict(mlflow_store, 1) == "no: version 2 is better"
    assert verdict(mlflow_store, 2).startswith("yes: AUC@5 +")
    assert "95 % interval" in verdict(mlflow_store, 2)
    version = client_of(mlflow_store).get_model_version("superglue-sift", "2")
    assert version.description == "AUC@5 60.0, run better"
    stored = stored_run(mlflow_store, "better")
    assert stored.data.tags["mlflow.note.content"] == "| a table |"
    # the same model once more, on other photographs
    assert champion("worse", [4.0] * 24) == 2
    assert champion("better", [error / 4 for error in SOME]) == 4


def test_too_few_photographs_move_no_champion(champion, mlflow_store):
    assert champion("first", SOME, photographs=5) == 1
    assert champion("better", [error / 2 for error in SOME], photographs=5) == 1
    assert verdict(mlflow_store, 2).startswith("no: too few photographs to compare: 5 of 6")


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["never evaluated", "files", "run"])
def test_nothing_replaces_a_champion_that_cannot_be_compared(
    champion, mlflow_store, tmp_path, capfd, gone
):
    assert champion("first", () if gone == "never evaluated" else SOME) == 1
    run_id = stored_run(mlflow_store, "first").info.run_id
    if gone == "files":
        (file,) = tmp_path.glob("mlartifacts/**/test/pairs.csv")
        file.unlink()
    elif gone == "run":
        client_of(mlflow_store).delete_run(run_id)
        words = ["gc", "--backend-store-uri", mlflow_store, "--run-ids", run_id]
        subprocess.run([sys.executable, "-m", "mlflow", *words], check=True)
    assert champion("better", [0.1] * 24) == 1
    assert verdict(mlflow_store, 2) == "no: the run of version 1 has no test/pairs.csv"
    said = capfd.readouterr().err
    assert "version 2 does not replace it: the run of version 1 has no test/pairs.csv" in said


def test_a_version_is_champion_if_a_person_took_the_alias_away(champion, mlflow_store):
    assert champion("first", SOME) == 1
    client_of(mlflow_store).delete_registered_model_alias("superglue-sift", "champion")
    assert champion("second") == 2


def test_a_deleted_experiment_is_named_with_what_restores_it(
    mlflow_store, tmp_path, monkeypatch, capfd
):
    open_run(tmp_path / "first").close()
    client = client_of(mlflow_store)
    number = client.get_experiment_by_name("superglue-sift").experiment_id
    client.delete_experiment(number)
    folder = tmp_path / "second"
    assert open_run(folder, "second").close() is False
    said = capfd.readouterr().err
    store = f"MLFLOW_TRACKING_URI={shlex.quote(mlflow_store)}"
    advice = f"{store} mlflow experiments restore --experiment-id {number}"
    assert advice in said and "set MLFLOW_EXPERIMENT_NAME" in said and "..." not in said
    with pytest.raises(RequestError, match="restore --experiment-id"):
        tracking.main(["ui"])
    # both pieces of advice work, the other experiment first
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_EXPERIMENT_NAME", "another")
        assert resend(folder) == 0
    assert client.get_experiment_by_name("another").lifecycle_stage == "active"
    environment = {**os.environ, "MLFLOW_TRACKING_URI": mlflow_store}
    command = [sys.executable, "-m", *shlex.split(advice)[1:]]
    subprocess.run(command, env=environment, check=True)
    assert open_run(tmp_path / "third", "third").close()


def test_a_text_that_is_no_unicode_arrives_with_escapes(gate, mlflow_store, tmp_path, capfd):
    gate.start()
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / name).mkdir()
    params = {"fetch": {"path": f"/data/{name}"}}
    with tracking.open_run(tmp_path, params, "identity", name=name, tags={"data": name}) as run:
        log_steps(run, 0, 3)
        run.describe(name, name)
        run.add_artifact(tmp_path / name, "folder")
    stored = stored_run(mlflow_store, "caf")
    assert stored.data.params["fetch.path"] == "/data/caf\\udce9"
    assert stored.data.tags["superglue.data"] == "caf\\udce9"
    assert stored.info.status == "FINISHED"
    assert steps(mlflow_store, "train/loss", "caf") == [0, 1, 2]
    assert "does not answer" not in capfd.readouterr().err


def test_a_server_that_never_answers_is_named_once(gate, tmp_path, monkeypatch, capfd):
    """It can be opened each time, and refuses each batch."""
    monkeypatch.setattr(
        stores.MlflowRun, "send", lambda *_args: (_ for _ in ()).throw(OSError("disk is full"))
    )
    gate.start()
    run = open_run(tmp_path)
    log_steps(run, 0, 3)
    before = gate.requests
    wait_until(lambda: gate.requests > before + 30)
    run.close()
    said = capfd.readouterr().err
    assert said.count("does not answer") == 1 and "disk is full" in said


def test_metrics_find_the_run_of_their_training_also_after_another_one(mlflow_store, tmp_path):
    for training in ("old", "new"):
        assert open_run(tmp_path, training).close("KILLED", patience=PATIENCE)
    for training in ("old", "unknown", None):
        with tracking.attach(tmp_path / "log.jsonl", training) as run:
            run.log_metrics({f"test/{training}": 1.0}, 0)
    old = stored_run(mlflow_store, "old")
    assert old.data.metrics == {"test/old": 1.0} and old.info.status == "KILLED"
    assert stored_run(mlflow_store, "new").data.metrics == {}
    with open_run(tmp_path, "old", resume=True) as run:  # the newest run of this training
        run.log_metrics({"train/loss": 1.0}, 1)
    assert stored_run(mlflow_store, "old").data.metrics == {"test/old": 1.0, "train/loss": 1.0}


def test_a_dead_server_gets_nothing_and_resend_sends_all(
    gate, mlflow_store, tmp_path, capfd, monkeypatch
):
    (tmp_path / "page.html").write_text("a report")
    run = open_run(tmp_path / "train")
    log_steps(run, 0, 1000)
    run.add_artifact(tmp_path / "page.html", "test")
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


def test_attach_without_a_run_and_other_ranks_do_nothing(tmp_path):
    runs = tracking.attach(tmp_path / "log.jsonl", "identity"), open_run(tmp_path, enabled=False)
    for run in runs:
        log_steps(run, 0, 2)
        assert run.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_does_not_wait_for_the_answer_of_a_server_that_hangs(gate, tmp_path, monkeypatch):
    """Its answer may take as long as the request may: the thread stays in it, the run does not."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(PATIENCE))
    gate.start()
    run = open_run(tmp_path)
    wait_until(lambda: run._sender._offset)
    run._sender.error = "as after a request that was not answered"
    gate.mode = "hang"
    sender = run._sender
    assert run.close() is False and sender.is_alive()


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
    run.add_artifact(tmp_path / "missing.png")
    run.register_model(tmp_path / "torn.safetensors")
    run.log_metrics({"a bad name!": 1.0, "train/loss": 2.0}, 1)
    log_steps(run, 2, 3)
    run.register_model(write_weights(tmp_path / "best.safetensors"))
    assert run.close() is False
    stored = stored_run(mlflow_store)
    assert stored.info.status == "FINISHED" and steps(mlflow_store, "train/loss")[-1] == 2
    assert (
        client_of(mlflow_store).get_model_version("superglue-sift", "1").run_id
        == stored.info.run_id
    )
    said = capfd.readouterr().err
    assert "1 refused (Invalid value" in said
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
    assert tracking.choose_uri() == tracking.choose_uri(log) == here
    # the store of another container is not there
    log.append({"sent": 0, "place": "sqlite:////of/another/container.db"})
    assert tracking.choose_uri(log) == here
    log.append({"sent": 0, "place": "http://mlflow:5000"})
    assert tracking.choose_uri(log) == "http://mlflow:5000"
    # the password, which is stored nowhere, is the environment's
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@mlflow:5000")
    assert tracking.choose_uri(log) == "http://me:secret@mlflow:5000"
    # without an address, the store is that of the clone, also in a copy that DVC makes
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    copy = tmp_path / "clone/.dvc/tmp/exps/tmpabc"
    copy.mkdir(parents=True)
    (copy / "dvc.yaml").touch()
    monkeypatch.chdir(copy)
    assert find_clone() == tmp_path / "clone"
    assert tracking.choose_uri() == f"sqlite:///{tmp_path}/clone/mlflow.db"


@pytest.fixture
def clone(empty_mlflow_store, tmp_path, monkeypatch):
    """The folder of a clone that has tracked a run with a file and a model."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(os, "execv", lambda *_args: 0)  # starts no server
    folder = tmp_path / "first clone"
    folder.mkdir()
    (folder / "dvc.yaml").touch()
    shutil.copy(empty_mlflow_store, folder)
    write_weights(folder / "best.safetensors")
    script = """if True:
        from pathlib import Path
        from pipeline import tracking
        with tracking.open_run(Path("reports"), {}, "identity", name="identity") as run:
            run.add_artifact(Path("dvc.yaml"), "old")
            run.register_model(Path("best.safetensors"))"""
    # in a process of its own, because MLflow remembers the folder of a run
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, check=True)
    return folder


@pytest.mark.slow
def test_a_copied_clone_leaves_the_first_one_as_it_is(clone, tmp_path, monkeypatch, capfd):
    copy = tmp_path / "copy"
    shutil.copytree(clone, copy)
    before = read_files(clone)
    monkeypatch.chdir(copy)
    with tracking.attach(copy / "reports/log.jsonl", "identity") as run:
        run.add_artifact(copy / "dvc.yaml", "new")
    said = capfd.readouterr().err
    assert f"new runs are in the experiment superglue-sift in {copy}" in said
    assert f"made in {clone} are there" in said and "ln -s" not in said
    # the run is complete in the experiment of the copy
    client = client_of(f"sqlite:///{copy / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(f"superglue-sift in {copy}")
    (run,) = client.search_runs([experiment.experiment_id])
    files = [file.path for file in client.list_artifacts(run.info.run_id)]
    assert sorted(files) == ["new", "old"] and run.info.artifact_uri.startswith(copy.as_uri())
    assert read_files(clone) == before
    # the page of the copy lists both
    assert tracking.main(["ui"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "/experiments/2/runs" in lines[0] and "/experiments/1/runs" in lines[2]


@pytest.mark.slow
def test_a_moved_clone_opens_its_runs_and_says_how_to_open_their_files(
    clone, tmp_path, monkeypatch, capfd
):
    moved = tmp_path / "moved"
    clone.rename(moved)
    monkeypatch.chdir(moved)
    assert tracking.main(["ui"]) == 0
    table, curves, hint, *_ = capfd.readouterr().out.splitlines()
    assert "/experiments/1/runs" in table and "/experiments/1/runs" in curves
    store = f"sqlite:///{moved / 'mlflow.db'}"
    run_id = stored_run(store).info.run_id
    assert client_of(store).list_artifacts(run_id) == []
    # the line is a command, after which all is as before
    command = hint[hint.index("mkdir") :]
    subprocess.run(command, shell=True, check=True)
    assert [file.path for file in client_of(store).list_artifacts(run_id)] == ["old"]
    with open_run(moved / "reports", "another") as run:
        run.add_artifact(moved / "dvc.yaml", "new")
    assert (tmp_path / "first clone/mlartifacts").is_symlink()
    assert len(list(moved.glob("mlartifacts/superglue-sift/*/artifacts/new/dvc.yaml"))) == 1
    assert len(client_of(store).search_experiments()) == 2  # with MLflow's own
    assert tracking.main(["ui"]) == 0
    assert "ln -s" not in capfd.readouterr().out


def test_ui_prints_the_addresses_of_table_and_curves_or_one_line_why_not(
    gate, mlflow_store, monkeypatch, capsys
):
    started = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words))
    with pytest.raises(RequestError, match=f"^{gate.uri}: .* failed"):
        tracking.main(["ui"])
    gate.start()
    page = "/#/experiments/1/runs?workflowType=machine_learning"
    assert tracking.main(["ui"]) == 0 and not started  # a server has pages of its own
    table, curves = capsys.readouterr().out.splitlines()
    assert table == f"table of runs: {gate.uri}{page}"
    assert curves.endswith(f" {gate.uri}{page}&compareRunsMode=CHART")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    tracking.main(["ui", "--port", "5099"])
    assert capsys.readouterr().out.startswith(f"table of runs: http://127.0.0.1:5099{page}\n")
    assert "5099" in started[0]


def test_a_user_without_a_home_gets_one_for_mlflow(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    stores.set_missing_home()
    assert Path(os.environ["HOME"]).is_dir()
    monkeypatch.undo()
    home = os.environ.get("HOME")
    stores.set_missing_home()
    assert os.environ.get("HOME") == home
