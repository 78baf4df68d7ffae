"""Results that fit what they would be made from again are found, and no others."""

from __future__ import annotations

import pytest

from pipeline import evaluate
from pipeline.runtime import made_from

INPUTS = {"code": "abc", "section": {"seed": 1}}


@pytest.fixture
def results(tmp_path):
    (tmp_path / "curves").mkdir()
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "curves" / "error.csv").write_text("1")
    made_from.write(tmp_path, INPUTS)
    return tmp_path


def test_what_is_as_it_was_written_fits(results):
    (results / "attached.jsonl").write_text("a log of tracking is no result")
    assert made_from.fits(results, INPUTS)


@pytest.mark.parametrize("name", ["metrics.json", "curves/error.csv", "made_from.json"])
def test_a_changed_or_missing_file_does_not(results, name):
    (results / name).write_text("[]")
    assert not made_from.fits(results, INPUTS)
    (results / name).unlink()
    assert not made_from.fits(results, INPUTS)


def test_other_inputs_and_further_files_do_not(results):
    assert not made_from.fits(results, {**INPUTS, "code": "abd"})
    (results / "curves" / "another.csv").write_text("1")
    assert not made_from.fits(results, INPUTS)


def test_what_the_record_names_is_removed_and_nothing_else(results):
    (results / "mine.txt").write_text("x")
    made_from.clear(results)
    assert {path.name for path in results.rglob("*") if path.is_file()} == {"mine.txt", "made_from.json"}


def test_the_stage_evaluate_does_not_evaluate_again(tmp_path, monkeypatch, capsys, root):
    """The real inputs of the stage, with a model and a manifest of any content."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_STAGE", "evaluate")
    for name in ("model", "images/manifest.csv", "out/metrics.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    arguments = [
        "--model",
        "model",
        "--images",
        "images",
        "--out",
        "out",
        "--params",
        str(root / "params.yaml"),
    ]
    made_from.write(tmp_path / "out", evaluate.made_from_inputs(evaluate.parse(arguments)))
    assert evaluate.main(arguments) == 0 and "nothing to do" in capsys.readouterr().out
    (tmp_path / "model").write_text("another")
    with pytest.raises(evaluate.RequestError, match="model"):  # it goes on, to find that this is none
        evaluate.main(arguments)
