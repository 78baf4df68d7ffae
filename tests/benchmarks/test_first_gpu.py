"""The first half hour on a GPU: its parts in order; a failed part stops no other; each result is
written at once.
"""

import sys

import pytest
from reading import read_json

from benchmarks import first_gpu
from benchmarks.first_gpu import Part


def python(code):
    return [sys.executable, "-c", code]


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_costs_its_own_line_and_is_tried_again(
    tmp_path, monkeypatch, capsys
):
    saving = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print('on',"
        " flush=True)"
    )
    seen = tmp_path / "seen"
    chosen = [
        Part("fails", 60, python("print('why'); raise SystemExit(3)")),
        Part("hangs", 1, python(f"{saving}; time.sleep(60)"), expected=(0, 143)),
        Part(
            "stopped",
            60,
            python(f"{saving}; open({str(seen)!r}, 'w'); time.sleep(60)"),
            "seen",
            (143,),
        ),
        Part("works", 60, python("print('the last word')")),
    ]
    monkeypatch.setattr(first_gpu, "list_parts", lambda *_: chosen)
    words = ["--device", "cpu", "--out", str(tmp_path)]
    assert first_gpu.main(words) == 1
    rows = read_json(tmp_path / "done.json")
    assert rows["fails"].startswith("FAILED with exit code 3") and rows["fails"].endswith("why")
    assert rows["hangs"].startswith("ok, time is over") and rows["stopped"].startswith(
        "ok, stopped"
    )
    assert rows["works"].endswith("the last word")
    assert (tmp_path / "03-works.log").read_text() == "the last word\n"
    capsys.readouterr()
    assert first_gpu.main(words) == 1
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["fails"]
