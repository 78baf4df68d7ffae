"""Results that fit what they would be made from again are put back, and no others."""

from __future__ import annotations

import shutil

import pytest

from pipeline import evaluate
from pipeline.runtime import made_from

INPUTS = {"code": "abc", "section": {"seed": 1}}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results that were kept, as a stage of `dvc repro` leaves them; DVC has removed them since."""
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
    with pytest.raises(evaluate.RequestError, match="model"):  # it goes on, to find that this is none
        evaluate.main(arguments)
