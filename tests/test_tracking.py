"""Tracking: the log comes first, every point arrives once, and no server can hold up or end the work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from faults.cells import Workbench
from faults.group import digest
from faults.telemetry import Gate, Silent
from made_scenes import write_model

from pipeline import tracking
from pipeline.provenance.repro import main_root, provenance
from pipeline.tracking import run as run_module
from pipeline.tracking.mlflow_store import MlflowStore
from pipeline.tracking.run_log import EventLog, recall_run, remember_run
from pipeline.train import __main__ as train

ROOT = Path(__file__).resolve().parents[1]
PARAMS = {"train": {"lr": 1e-4, "layers": 5}}
PATIENCE = 120  # seconds: a guard, for a busy machine on which a request outlasts its second again and again


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short pauses, long patience, and nothing inherited from the shell of the person who tests."""
    monkeypatch.setattr(run_module, "wait_limit", lambda _: PATIENCE)
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_NAME", "DVC_EXP_NAME", "DVC_ROOT", "DVC_STAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    monkeypatch.setattr("pipeline.tracking.shipper.POLL_SECONDS", 0.1)
    monkeypatch.setattr("pipeline.tracking.shipper.LONGEST_PAUSE_SECONDS", 0.2)


@pytest.fixture
def store(mlflow_store) -> str:
    return mlflow_store


@pytest.fixture
def gate(store, monkeypatch):
    made = Gate(store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", made.uri)
    yield made
    made.stop()


def stored_run(store):
    """The only run of the store, and its client."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store, store)
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert len(runs) == 1
    return client, runs[0]


def steps(store, name):
    client, run = stored_run(store)
    return [metric.step for metric in client.get_metric_history(run.info.run_id, name)]


def samples(reports):
    """Number of system samples in the log."""
    return (reports / "log.jsonl").read_text().count("system/cpu")


def write_weights(path, name="trained"):
    """A small model file; `name` decides its bytes."""
    return write_model(path, {"name": name}, dim=16, heads=2)


def log_steps(run, start, stop):
    for step in range(start, stop):
        run.log({"train/loss": 1.0 / (step + 1)}, step)


def test_a_run_has_params_curves_tags_data_files_and_model(store, tmp_path):
    picture = tmp_path / "matches.png"
    picture.write_bytes(b"png")
    model = write_weights(tmp_path / "best.safetensors")
    with tracking.open_run(tmp_path / "reports", PARAMS, {"world_size": 2}, name="sample") as run:
        log_steps(run, 0, 50)
        run.log({"val/loss": float("nan")}, 10)
        run.artifact(picture, "pictures")
        run.dataset("keypoints", "sha256:" + "ab" * 32, "data/keypoints")
        run.model(model, step=50)
        wait_for(lambda: samples(tmp_path / "reports") >= 2)
    client, stored = stored_run(store)
    assert stored.info.status == "FINISHED"
    assert {"train.lr", "train.layers", "version.torch", "host", "platform"} <= set(stored.data.params)
    assert stored.data.params["train.lr"] == "0.0001"
    assert steps(store, "train/loss") == list(range(50))
    assert len(steps(store, "system/cpu_utilization_percentage")) >= 2
    hidden = {f"mlflow.superglue.{name}" for name in ("git.commit", "git.dirty", "weights.sha256")}
    assert hidden < set(stored.data.tags)
    assert stored.inputs.dataset_inputs[0].dataset.digest == ("ab" * 32)[:36]
    assert [f.path for f in client.list_artifacts(stored.info.run_id, "pictures")] == ["pictures/matches.png"]
    version = client.get_model_version_by_alias("superglue-sift", "champion")
    files = {path.name for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()}
    assert {"MLmodel", "best.safetensors", "matcher_model.py", "input_example.json"} <= files
    assert not [name for name in files if name.endswith((".pkl", ".pickle", ".pyc"))]
    shown = [tag for tag in stored.data.tags if not tag.startswith("mlflow.")]  # the page hides the others
    assert stored.info.run_name == "sample" and set(shown) <= {"world_size", "git.dirty"}  # more push down the rest
    assert version.run_id == stored.info.run_id
    assert recall_run(tmp_path / "reports/run.json")["run_id"] == stored.info.run_id


def test_the_first_metric_of_a_run_is_not_of_the_machine(store, tmp_path):
    """MLflow compares runs by their first metric, which was the use of the CPU."""
    with tracking.open_run(tmp_path / "reports", PARAMS) as run:
        time.sleep(1.0)  # several samples
        assert samples(tmp_path / "reports") == 0
        run.log({"val/loss": 1.0}, 0)
        wait_for(lambda: samples(tmp_path / "reports") >= 2)
    logged = list(stored_run(store)[1].data.metrics)
    assert logged[0] == "val/loss" and logged[1].startswith("system/")


def test_evaluate_adds_to_the_same_run_and_leaves_its_state(store, tmp_path):
    tracking.open_run(tmp_path, PARAMS, system_metrics=False).close("KILLED")
    with tracking.attach(tmp_path / "run.json", tmp_path / "evaluate") as run:
        run.log({"test/auc_5px": 0.5}, 7)
    _, stored = stored_run(store)
    assert stored.data.metrics == {"test/auc_5px": 0.5}
    assert stored.info.status == "KILLED"


def test_a_run_with_the_weights_of_an_earlier_one_names_it(store, tmp_path):
    """DVC evaluates equal weights once: the later run has no metrics of its own."""
    from mlflow.tracking import MlflowClient

    ids = []
    for weights in ("same", "other", "same"):
        model = write_weights(tmp_path / "best.safetensors", weights)
        with tracking.open_run(tmp_path / "reports", PARAMS, system_metrics=False) as run:
            run.model(model, step=50)
        ids.append(run.run_id)
    first, other, again = (MlflowClient(store).get_run(run_id).data.tags for run_id in ids)
    digests = [tags["mlflow.superglue.weights.sha256"] for tags in (first, other, again)]
    assert digests[0] == digests[2] != digests[1]
    assert again["weights.same_as"] == ids[0]
    assert "weights.same_as" not in {**first, **other}


def test_a_retraining_to_the_same_weights_has_the_evaluation_in_its_own_run(store, tmp_path):
    """The newest metrics and the report; a later evaluation replaces them."""
    from mlflow.tracking import MlflowClient

    client, noted = MlflowClient(store), tmp_path / "reports" / "run.json"
    report = tmp_path / "index.html"

    def trained(identity, weights):
        write_weights(tmp_path / "best.safetensors", weights)
        with tracking.open_run(tmp_path / "reports", PARAMS, system_metrics=False, training=identity) as run:
            run.model(tmp_path / "best.safetensors", step=50)
        return run.run_id

    def evaluated(auc, identity):
        report.write_text(f"auc {auc}")
        with tracking.attach(noted, tmp_path / "evaluate", training=identity) as run:
            run.log({"verdict/recall": auc, "auc_5": auc}, 50)
            run.artifact(report, "test")
            run.describe(f"AUC {auc}", f"AUC {auc} of {tracking.RUN_ID}")

    first = trained("a", "same")
    evaluated(0.25, "a")
    evaluated(0.5, "a")
    other = trained("b", "other")
    again = trained("a", "same")
    assert again != first
    assert client.get_run(again).data.metrics == {"verdict/recall": 0.5, "auc_5": 0.5}
    note = client.get_run(again).data.tags["mlflow.note.content"]
    assert client.get_run(again).info.run_name.endswith(" · AUC 0.5") and note == f"AUC 0.5 of {again}"
    assert client.get_run(again).data.tags["evaluation.taken_from"] == first
    assert Path(client.download_artifacts(again, "test/index.html", str(tmp_path))).read_text() == "auc 0.5"
    assert client.get_run(other).data.metrics == {}
    evaluated(0.75, "a")
    assert [client.get_run(r).data.metrics["auc_5"] for r in (first, again)] == [0.5, 0.75]


def pairs_csv(path, errors, keypoints=9):
    """A pairs.csv of pairs in eight photographs with these errors of ours."""
    lines = ["pair,scene,matcher,keypoints0,error_ransac"]
    for number, error in enumerate(errors):
        lines += [f"{number},{number % 8},superglue,{keypoints},{error}", f"{number},{number % 8},nn,{keypoints},9"]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_champion_moves_only_to_a_model_that_is_surely_better_on_the_same_pairs(store, tmp_path):
    from mlflow.tracking import MlflowClient

    noted, client = tmp_path / "reports" / "run.json", MlflowClient(store, store)

    def champion_after(name, errors, keypoints=9):
        model = write_weights(tmp_path / "best.safetensors", name)
        with tracking.open_run(tmp_path / "reports", PARAMS, system_metrics=False, training=name) as run:
            run.model(model, step=1)
        folder = tmp_path / name
        folder.mkdir()
        with tracking.attach(noted, tmp_path / "evaluate", training=name) as run:
            run.artifact(pairs_csv(folder / "pairs.csv", errors, keypoints), "test")
            run.describe("AUC@5", f"Verdict on {name}.\n\n| a table |")
            run.compare_with_champion(folder / "pairs.csv")
        return int(client.get_model_version_by_alias("superglue-sift", "champion").version)

    some = [1 + n % 3 for n in range(24)]
    assert champion_after("first", some) == 1
    opening = "Version 1 is `champion`. Verdict on first.\n\nTwo images in, matches out."
    assert client.get_registered_model("superglue-sift").description.startswith(opening)
    assert champion_after("as good", some[1:] + some[:1]) == 1
    assert champion_after("other pairs", [0.1] * 24, keypoints=10) == 1
    assert champion_after("worse", [4.0] * 24) == 1
    assert client.get_registered_model("superglue-sift").description.startswith(opening)
    assert champion_after("better", [e / 2 for e in some]) == 5
    said = [client.get_model_version("superglue-sift", str(n)).tags.get("champion", "") for n in range(1, 6)]
    assert said[0] == "" and "other pairs" in said[2] and "95 % interval" in said[4]
    assert client.get_registered_model("superglue-sift").description.startswith("Version 5 is `champion`. Verdict on b")
    assert client.get_model_version("superglue-sift", "4").description.startswith("Verdict on worse.")


def test_the_columns_of_the_table_of_runs_show_whole_names(store, tmp_path):
    """MLflow shows some 14 letters of them."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store)
    with tracking.open_run(tmp_path / "reports", PARAMS, system_metrics=False) as run:
        run.log({"train/loss": 1.0, "val/f1": 0.5}, 1)
        run.log(dict.fromkeys((*tracking.LEADING, f"{tracking.HEADLINE}/recall"), 0.5), 1)
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    columns = json.loads(experiment.tags["mlflow.sharedViewState.results"])["selectedColumns"]
    names = [name[len("metrics.`") : -1] for name in columns if name.startswith("metrics.")]
    logged = client.get_run(run.run_id).data.metrics
    assert set(names) <= set(logged) and max(map(len, names)) <= 14
    # a view of an earlier version is replaced
    client.set_experiment_tag(experiment.experiment_id, "mlflow.sharedViewState.results", "{}")
    tracking.open_run(tmp_path / "again", PARAMS, system_metrics=False).close()
    tags = client.get_experiment_by_name(tracking.EXPERIMENT).tags
    assert json.loads(tags["mlflow.sharedViewState.results"])["selectedColumns"] == columns


def test_metrics_find_the_run_of_their_training_also_after_another_one(store, tmp_path):
    from mlflow.tracking import MlflowClient

    ids = {}
    for training in ("old", "new"):
        with tracking.open_run(tmp_path / training, PARAMS, system_metrics=False, training=training,
                               noted_in=tmp_path / "run.json") as run:  # fmt: skip
            pass
        ids[training] = run.run_id
    for training in ("old", "unknown"):
        with tracking.attach(tmp_path / "run.json", tmp_path, training=training) as run:
            run.log({f"test/{training}": 1.0}, 0)
    client = MlflowClient(store)
    assert client.get_run(ids["old"]).data.metrics == {"test/old": 1.0}
    assert client.get_run(ids["new"]).data.metrics == {}
    assert tracking.known_run(tmp_path / "run.json", "old") == ids["old"]
    assert tracking.known_run(tmp_path / "run.json", "unknown") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"runs": 1}', '{"latest": "a", "runs": {"a": {}}}'])
def test_a_damaged_run_json_names_no_run(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    assert recall_run(tmp_path / "run.json") is None
    remember_run(tmp_path / "run.json", "b", {"key": "k", "run_id": None, "experiment": "e"})
    assert recall_run(tmp_path / "run.json", "b")["key"] == "k"


def test_attach_without_a_run_and_other_ranks_do_nothing(tmp_path):
    with tracking.attach(tmp_path / "none.json") as run:
        run.log({"a": 1}, 0)
    other = tracking.open_run(tmp_path, PARAMS, enabled=False)
    other.log({"a": 1}, 0)
    other.close()
    assert other.run_id is None
    assert list(tmp_path.iterdir()) == []


def test_a_dead_server_holds_up_nothing_and_gets_all_points_after_it_is_back(gate, store, tmp_path, capfd, monkeypatch):
    tried, connect = [], MlflowStore.open
    monkeypatch.setattr(MlflowStore, "open", lambda *given: tried.append(1) or connect(*given))
    run = tracking.open_run(tmp_path / "reports", PARAMS, system_metrics=False)
    log_steps(run, 0, 1000)
    assert len(tried) < 100  # no point waits until the server has been tried
    assert run.close(wait=2) is False
    said = capfd.readouterr().err
    assert "1002 entries have not reached" in said and "log.jsonl keeps them" in said
    gate.start()
    assert tracking.open_run(tmp_path / "reports", PARAMS, resume_run_id=run.run_id, system_metrics=False).close()
    assert steps(store, "train/loss") == list(range(1000))


def test_without_mlflow_one_line_is_said_and_nothing_waited_for(store, tmp_path, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mlflow", None)  # importing it raises ImportError
        run = tracking.open_run(tmp_path, PARAMS, system_metrics=False)
        log_steps(run, 0, 20)
        run._uploader.join(PATIENCE)
        assert not run._uploader.is_alive()  # whom closing would wait for
        assert run.close() is False
    said = capfd.readouterr().err
    assert said.count("tracking: ") == 1 and "mlflow" in said and "keeps all" in said
    assert tracking.open_run(tmp_path, PARAMS, resume_run_id=run.run_id, system_metrics=False).close()
    assert steps(store, "train/loss") == list(range(20))


def test_the_next_run_ships_what_the_last_one_could_not(gate, tmp_path, store):
    first = tracking.open_run(tmp_path / "reports", PARAMS, system_metrics=False)
    log_steps(first, 0, 20)
    first.close(wait=0.1)
    gate.start()
    tracking.open_run(tmp_path / "reports", PARAMS, system_metrics=False).close()
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store)
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert sorted(len(client.get_metric_history(r.info.run_id, "train/loss")) for r in runs) == [0, 20]
    assert not list((tmp_path / "reports" / "unshipped").glob("*"))


def test_evaluate_ships_what_training_could_not(gate, store, tmp_path):
    run = tracking.open_run(tmp_path, PARAMS, system_metrics=False)
    log_steps(run, 0, 20)
    run.close(wait=0.1)
    assert recall_run(tmp_path / "run.json")["run_id"] is None
    gate.start()
    with tracking.attach(tmp_path / "run.json") as again:
        again.log({"test/auc_5px": 0.5}, 20)
    assert steps(store, "train/loss") == list(range(20))
    _, stored = stored_run(store)
    assert (stored.info.status, stored.data.metrics["test/auc_5px"]) == ("FINISHED", 0.5)


@pytest.mark.parametrize("fault", ["error", "hang", "deaf"])
def test_a_server_that_fails_in_the_middle_gets_every_point_once(gate, store, tmp_path, fault, capfd):
    gate.start()
    run = tracking.open_run(tmp_path, PARAMS, system_metrics=False)
    log_steps(run, 0, 100)
    wait_for(lambda: gate.posts > 3)
    gate.mode = fault
    before = gate.requests
    log_steps(run, 100, 200)
    assert gate.requests - before < 100  # no point waits for an answer of its own
    wait_for(lambda: run._uploader.error)
    gate.mode = "up"
    log_steps(run, 200, 300)
    assert run.close(wait=PATIENCE)
    assert steps(store, "train/loss") == list(range(300))
    said = capfd.readouterr().err
    assert said.count("does not answer") == said.count("answers again") == 1


def curves_of_runs(store) -> list:
    """For each run, oldest first: {name: steps, as often as they arrived}, without samples of the machine."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store)
    experiments = [e.experiment_id for e in client.search_experiments()]
    runs = client.search_runs(experiments, order_by=["attributes.start_time ASC"])
    names = [[n for n in run.data.metrics if not n.startswith("system/")] for run in runs]
    return [
        {n: [m.step for m in client.get_metric_history(run.info.run_id, n)] for n in own}
        for run, own in zip(runs, names)
    ]


def test_the_weights_are_the_same_without_mlflow_with_it_and_while_it_hangs(gate, store, tmp_path, monkeypatch):
    bench = Workbench(tmp_path)

    def trained(name: str) -> str:
        # MLflow's handlers, which run in this process, put their own store into the environment
        monkeypatch.setenv("MLFLOW_TRACKING_URI", gate.uri)
        folders = ["--out", str(tmp_path / name), "--reports", str(tmp_path / f"{name}-r")]
        assert train.main([*bench.arguments(), *folders]) == 0
        return digest(tmp_path / name)

    with monkeypatch.context() as patch:
        patch.setattr(tracking, "open_run", lambda *_, **__: tracking.NullRun())
        without = trained("without")
    gate.start()
    assert trained("with") == without
    gate.stop()
    silent = Silent(gate.port)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "wait_limit", lambda _: 5.0)
        assert trained("hanging") == without
    assert silent.taken
    silent.close()
    assert len(curves_of_runs(store)) == 1
    gate.start()
    assert trained("hanging") == without  # it is done: only what waits is shipped
    first, second = curves_of_runs(store)
    assert first == second
    assert first["train/loss"] == [2, 4, 6, 8] and first["val/f1"] == [2, 4, 6, 8]


def test_a_flapping_server_gets_every_point_once(gate, store, tmp_path):
    gate.start()
    run = tracking.open_run(tmp_path, PARAMS, system_metrics=False)
    for step in range(200):
        gate.mode = ("up", "deaf", "error")[step // 7 % 3]
        run.log({"train/loss": step / 7}, step)
        time.sleep(0.01)
    gate.mode = "up"
    assert run.close(wait=PATIENCE)
    assert steps(store, "train/loss") == list(range(200))


def test_closing_does_not_wait_for_the_answer_of_a_server_that_hangs(gate, tmp_path):
    gate.start()
    gate.mode = "hang"
    run = tracking.open_run(tmp_path, PARAMS, system_metrics=False)
    arrived: list = []
    closing = threading.Thread(target=lambda: arrived.append(run.close(wait=1)), daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert arrived == [False] and gate.mode == "hang"


def test_a_resumed_run_goes_on_without_doubling_the_steps_since_the_checkpoint(store, tmp_path):
    run = tracking.open_run(tmp_path, PARAMS)
    log_steps(run, 0, 57)
    wait_for(lambda: samples(tmp_path) >= 1)
    run.close("KILLED")
    again = tracking.open_run(tmp_path, PARAMS, resume_run_id=run.run_id)
    log_steps(again, 50, 80)
    wait_for(lambda: samples(tmp_path) >= 2)
    again.close()
    _, stored = stored_run(store)
    assert steps(store, "train/loss") == list(range(80))
    assert stored.info.status == "FINISHED"
    taken = steps(store, "system/cpu_utilization_percentage")
    assert len(set(taken)) == len(taken) >= 2


def test_a_resumed_run_whose_log_is_lost_asks_the_server_what_it_has(store, tmp_path):
    run = tracking.open_run(tmp_path / "one", PARAMS, system_metrics=False)
    log_steps(run, 0, 57)
    run.close("KILLED")
    again = tracking.open_run(tmp_path / "two", PARAMS, resume_run_id=run.run_id, system_metrics=False)
    log_steps(again, 50, 80)
    again.close()
    assert steps(store, "train/loss") == list(range(80))


def test_a_new_store_gets_the_whole_log(store, empty_mlflow_store, tmp_path, monkeypatch):
    run = tracking.open_run(tmp_path / "reports", PARAMS, system_metrics=False)
    log_steps(run, 0, 30)
    run.close("KILLED")
    (tmp_path / "other.db").write_bytes(empty_mlflow_store.read_bytes())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'other.db'}")
    again = tracking.open_run(tmp_path / "reports", PARAMS, resume_run_id=run.run_id, system_metrics=False)
    log_steps(again, 30, 40)
    again.close()
    assert steps(f"sqlite:///{tmp_path / 'other.db'}", "train/loss") == list(range(40))


SCRIPT = """
    import os, signal, sys, time
    from pipeline import tracking
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tracking.open_run(sys.argv[1], {"train": {"lr": 1}}, system_metrics=False) as run:
        run.log({"train/loss": 1.0}, 0)
        while not os.path.exists(os.path.join(sys.argv[1], "log.cursor.json")):
            time.sleep(0.05)
        time.sleep(0.3)
        {end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)", "KILLED"),
        ("raise ValueError('broken')", "FAILED"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "RUNNING"),
    ],
)
def test_no_run_stays_running(store, tmp_path, end, status):
    script = textwrap.dedent(SCRIPT).replace("{end}", end)
    command = [sys.executable, "-c", script, str(tmp_path / "reports")]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    subprocess.run(command, cwd=ROOT, env=environment, timeout=5 * PATIENCE, check=False, stderr=subprocess.PIPE)
    client, stored = stored_run(store)
    assert stored.info.status == status
    elsewhere = tracking.open_run(tmp_path / "elsewhere", PARAMS, system_metrics=False)
    elsewhere.close()
    state = client.get_run(stored.info.run_id).info.status
    assert state == ("KILLED" if status == "RUNNING" else status)


def test_the_dead_run_of_another_container_is_closed_by_the_next_in_its_place(store, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "_process_space", lambda: "boot pid:[1]")
    run = tracking.open_run(tmp_path, PARAMS, system_metrics=False)
    run.log({"train/loss": 1.0}, 0)
    wait_for(lambda: run._queue.run_id and not run._queue.pending())
    run._closed = True  # as SIGKILL leaves it
    monkeypatch.setattr(run_module, "_process_space", lambda: "boot pid:[2]")
    tracking.open_run(tmp_path, PARAMS, system_metrics=False).close()
    from mlflow.tracking import MlflowClient

    assert MlflowClient(store).get_run(run.run_id).info.status == "KILLED"


def test_a_metric_that_is_not_a_number_and_a_missing_file_stop_nothing(store, tmp_path, capfd):
    run = tracking.open_run(tmp_path / "reports", PARAMS, system_metrics=False)
    run.log({"train/loss": "high"}, 0)
    run.artifact(tmp_path / "missing.png")
    run.log({"a bad name!": 1.0, "train/loss": 2.0}, 1)
    run.log({"train/loss": 3.0}, 2)
    assert run.close()
    assert steps(store, "train/loss")[-1] == 2
    assert "not a number" in capfd.readouterr().err


def test_a_file_that_cannot_be_read_holds_up_nothing_behind_it(store, tmp_path, capfd):
    (tmp_path / "torn.safetensors").write_bytes(b"weights")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "gone.png").symlink_to(tmp_path / "nowhere")
    run = tracking.open_run(tmp_path / "reports", PARAMS, system_metrics=False)
    run.model(tmp_path / "torn.safetensors")
    run.model(tmp_path)  # a folder
    run.artifact(tmp_path / "pictures")
    run.log({"train/loss": 1.0}, 0)
    run.model(write_weights(tmp_path / "best.safetensors"))
    assert run.close()
    client, stored = stored_run(store)
    assert stored.info.status == "FINISHED" and steps(store, "train/loss") == [0]
    assert len(client.search_model_versions(f"run_id = '{run.run_id}'")) == 1
    said = capfd.readouterr().err
    assert said.count("tracking: ") == 1 and "torn.safetensors" in said


def test_a_torn_last_line_is_cut_off(tmp_path):
    log = EventLog(tmp_path / "log.jsonl")
    log.append({"run": "local-1"})
    log.close()
    with open(log.path, "ab") as stream:
        stream.write(b'{"metrics": {"tra')
    log.append({"end": "KILLED"})
    assert list(log.events()) == [{"run": "local-1"}, {"end": "KILLED"}]


def test_passwords_stay_out_of_files_that_are_kept():
    assert run_module.redacted("https://me:secret@host:5000/x") == "https://host:5000/x"
    assert run_module.redacted("sqlite:////a@b/mlflow.db") == "sqlite:////a@b/mlflow.db"


def test_the_store_of_a_dvc_experiment_is_the_clones(tmp_path):
    copy = tmp_path / "clone" / ".dvc" / "tmp" / "exps" / "tmpabc"
    copy.mkdir(parents=True)
    (copy / "dvc.yaml").touch()
    assert main_root(copy) == tmp_path / "clone"


def test_provenance_names_commit_and_versions(monkeypatch):
    monkeypatch.setenv("IMAGE_DIGEST", "sha256:1234")
    tags = provenance(ROOT)
    assert tags["image.digest"] == "sha256:1234"
    assert {"git.commit", "git.dirty", "host", "version.torch"} <= set(tags)
    assert all(isinstance(value, str) for value in tags.values())


def wait_for(condition, seconds=PATIENCE):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def test_a_file_has_time_by_its_size(monkeypatch):
    """A second for each 50 kB, in addition to the five of any request, twice as long in the next try."""
    from pipeline.tracking import uploads

    monkeypatch.setenv(uploads.TIMEOUT, "5")
    monkeypatch.delenv(uploads.RETRIES, raising=False)
    for tries, seconds in ((0, "25"), (1, "45"), (2, "85")):
        with uploads.patience(1_000_000, tries):
            assert os.environ[uploads.TIMEOUT] == seconds and os.environ[uploads.RETRIES] == "0"
    assert os.environ[uploads.TIMEOUT] == "5" and uploads.RETRIES not in os.environ


class Store:
    """A store that accepts metrics, and uploads only when `open`."""

    def __init__(self):
        self.taken, self.open_for_files = [], False

    def open(self, header, run_id):
        return run_id or "abc", not run_id

    def send(self, run_id, events):
        if any("artifact" in event for event in events) and not self.open_for_files:
            raise ConnectionError("the network is down for files")
        self.taken += [event.get("step", event.get("artifact")) for event in events]


def test_metrics_and_files_have_a_cursor_each(tmp_path):
    from pipeline.tracking.run_log import EventLog
    from pipeline.tracking.shipper import LogQueue, Uploader

    log, store = EventLog(tmp_path / "log.jsonl"), Store()
    log.append({"run": "local-1"})
    for event in ({"metrics": {"a": 1}, "step": 1}, {"artifact": "x"}, {"metrics": {"a": 2}, "step": 2}):
        log.append(event)
    uploader = Uploader([LogQueue(log, "uri")], lambda: store, "place")
    assert not uploader._round() and store.taken[1:] == [1, 2]
    assert uploader.queues[0].unsent() == [{"artifact": "x"}]
    log.append({"metrics": {"a": 3}, "step": 3})
    again = Uploader([LogQueue(log, "uri")], lambda: store, "place")  # another process
    assert not again._round() and store.taken[1:] == [1, 2, 3]
    store.open_for_files = True
    assert again._round() and store.taken[1:] == [1, 2, 3, "x"] and not again.queues[0].pending()
    assert not LogQueue(log, "uri").pending() and LogQueue(log, "another").pending()


def test_a_cursor_of_one_lane_is_that_of_both(tmp_path):
    """As written before there were two."""
    from pipeline.tracking.run_log import EventLog
    from pipeline.tracking.shipper import LogQueue

    log = EventLog(tmp_path / "log.jsonl")
    log.append({"run": "local-1"})
    (tmp_path / "log.cursor.json").write_text(
        json.dumps({"tracking_uri": "uri", "run_id": "abc", "offset": log.size()})
    )
    assert not LogQueue(log, "uri").pending()
    log.append({"artifact": "x"})
    assert LogQueue(log, "uri").unsent() == [{"artifact": "x"}]
