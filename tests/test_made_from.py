"""Kept results are restored if they have the same inputs, and only then."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import metadata

import pytest

from pipeline.evaluate import __main__ as evaluate
from pipeline.provenance import made_from

INPUTS = {"code": "abc", "section": {"seed": 1}}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of kept results of a stage of `dvc repro`; DVC has removed the results since."""
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.setenv("DVC_STAGE", "evaluate")
    folder = tmp_path / "results"
    (folder / "curves").mkdir(parents=True)
    (folder / "metrics.json").write_text("{}")
    (folder / "curves" / "error.csv").write_text("1")
    (folder / "attached.jsonl").write_text("a log of tracking is no result")
    made_from.keep(folder, INPUTS)
    shutil.rmtree(folder)
    return folder


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_was_made_from_the_same_is_put_back(results):
    assert made_from.restore(results, INPUTS)
    assert files(results) == {"metrics.json", "curves/error.csv"}
    assert (results / "curves" / "error.csv").read_text() == "1"


def test_what_was_made_from_anything_else_is_not(results):
    assert not made_from.restore(results, {**INPUTS, "code": "abd"})
    assert not results.exists()


@pytest.mark.parametrize("name", ["metrics.json", "curves/error.csv", "made_from.json"])
def test_a_copy_that_was_changed_or_lost_a_file_is_not_put_back(results, name):
    kept = results.parent / ".dvc" / "tmp" / "made_from" / "evaluate"
    (kept / name).write_text("[]")
    assert not made_from.restore(results, INPUTS)
    (kept / name).unlink()
    assert not made_from.restore(results, INPUTS)


def test_by_hand_a_command_does_its_work(results, monkeypatch):
    monkeypatch.delenv("DVC_STAGE")
    assert not made_from.restore(results, INPUTS)


def test_a_forced_stage_computes(results, monkeypatch):
    """The processes above are real ones in `test_dvc_says_force`."""
    above = [["bash", "-c", "python -m pipeline.evaluate"], ["python", "/venv/bin/dvc", "repro", "-f", "evaluate"]]
    monkeypatch.setattr(made_from, "_commands_above", lambda: iter(above))
    assert not made_from.restore(results, INPUTS)
    above[1][3:4] = []
    assert made_from.restore(results, INPUTS)


@pytest.mark.parametrize(
    ("command", "forced"),
    [
        ("dvc repro", False),
        ("dvc repro evaluate", False),
        ("dvc repro -f", True),
        ("dvc repro -sf evaluate", True),
        ("dvc repro --force", True),
        ("dvc exp run -S fetch.limit=3", False),
        ("dvc exp run -f", True),
        ("make -f Makefile repro", False),
    ],
)
def test_a_stage_knows_whether_dvc_was_forced(monkeypatch, command, forced):
    above = [["/bin/sh", "-c", "rm -f x"], command.split(), ["bash", "-f"]]
    monkeypatch.setattr(made_from, "_commands_above", lambda: iter(above))
    assert made_from.forced() is forced


@pytest.mark.slow
def test_dvc_says_force(tmp_path, monkeypatch, root):
    """A real `dvc repro` of a stage that asks."""
    pytest.importorskip("dvc")
    script = f"import sys; sys.path.insert(0, {str(root)!r}); from pipeline.provenance import made_from as m"
    command = f'{sys.executable} -c "{script}; open({str(tmp_path / "said")!r}, {"w"!r}).write(str(m.forced()))"'
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": {"ask": {"cmd": command}}}))
    monkeypatch.setenv("DVC_NO_ANALYTICS", "true")
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "init", "-q", "--no-scm"], cwd=tmp_path, check=True)
    for words, said in ((["repro"], "False"), (["repro", "-f"], "True"), (["repro", "--force"], "True")):
        subprocess.run([*dvc, *words], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
        assert (tmp_path / "said").read_text() == said


@pytest.mark.parametrize("package", ["torch", "numpy", "scipy", "opencv-python", "poselib"])
def test_evaluate_takes_no_result_of_other_versions(tmp_path, monkeypatch, root, package):
    """The packages that compute the metrics are part of what they were made from."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").write_text("{}")
    arguments = evaluate.parse(["--model", "model", "--params", str(root / "params.yaml")])
    before = evaluate.made_from_inputs(arguments)
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1" if name == package else real(name))
    changed = evaluate.made_from_inputs(arguments)
    assert changed != before and {**changed, "versions": before["versions"]} == before


def test_the_stage_evaluate_does_not_evaluate_again(results, tmp_path, monkeypatch, capsys, root):
    """The real inputs of the stage, with a model and a manifest of any content."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "images/manifest.csv", "out/metrics.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    words = {"model": "model", "images": "images", "out": "out", "params": str(root / "params.yaml")}
    arguments = [word for name, value in words.items() for word in (f"--{name}", value)]
    made_from.keep(tmp_path / "out", evaluate.made_from_inputs(evaluate.parse(arguments)))
    shutil.rmtree(tmp_path / "out")
    assert evaluate.main(arguments) == 0 and "nothing to do" in capsys.readouterr().out
    assert files(tmp_path / "out") == {"metrics.json"}
    (tmp_path / "model").write_text("another")
    with pytest.raises(evaluate.RequestError, match=r"source\.json"):  # it runs, and finds no images
        evaluate.main(arguments)
