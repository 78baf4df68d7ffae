"""The first half hour on a GPU: its parts in order, each result written at once."""

import shlex

import pytest
from reading import read_json

from benchmarks.dev import first_gpu
from benchmarks.dev.first_gpu import Part
from pipeline import params

# a program that saves and ends with 143 when it is stopped
SAVING = """
import signal, sys, time
signal.signal(15, lambda *_: sys.exit(143))
print("on", flush=True)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def test_parts_run_in_the_clone_and_rehearse_preset_pretrained(tmp_path):
    assert (first_gpu.CLONE / "pyproject.toml").is_file()
    first_gpu.write_params(tmp_path, True, tmp_path, None)
    rehearsed = params.load(tmp_path / "weights" / "params.yaml")
    assert rehearsed.train.steps < 20 and rehearsed.train.rotary and rehearsed.train.layers == 9
    first_gpu.write_params(tmp_path, False, tmp_path, None)
    whole = params.load(tmp_path / "weights" / "params.yaml")
    assert whole.train.batch == 128 and whole.train.steps > 2000


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_costs_its_own_line_and_is_tried_again(
    tmp_path, monkeypatch, capsys
):
    for name, text in (
        ("saving", SAVING),
        ("failing", "print('why'); raise SystemExit(3)"),
        ("working", "print('the last word')"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = shlex.quote(str(tmp_path))
    parts = [
        Part("fails", 60, "failing"),
        Part("hangs", 1, f"saving {folder}/other", expected=(0, 143)),
        Part("resumes", 1, f"saving {folder}/other"),
        Part("stopped", 60, f"saving {folder}/seen", until="seen", expected=(143,)),
        Part("works", 60, "working"),
    ]
    monkeypatch.setattr(first_gpu, "PATIENCE", 1)
    monkeypatch.setattr(first_gpu, "list_parts", lambda *_: parts)
    words = ["--device", "cpu", "--out", str(tmp_path)]
    assert first_gpu.main(words) == 1
    rows = read_json(tmp_path / "done.json")
    assert rows["fails"].startswith("FAILED with exit code 3") and rows["fails"].endswith("why")
    assert rows["hangs"].startswith("ok, time is over")
    assert rows["resumes"].startswith("UNFINISHED, time is over")
    assert rows["stopped"].startswith("ok, stopped")
    assert rows["works"].endswith("the last word")
    assert (tmp_path / "back" / "04-works.log").read_text() == "the last word\n"
    capsys.readouterr()
    assert first_gpu.main(words) == 1
    again = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert again == ["fails", "resumes"]
