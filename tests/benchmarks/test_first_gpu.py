"""The first half hour on a GPU: its parts in order; a failed part stops no other; each result is
written at once.
"""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.dev import first_gpu
from benchmarks.dev.first_gpu import Part


def python(code: str) -> list:
    return [sys.executable, "-c", code]


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
    assert first_gpu.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "done.json").read_text())
    assert rows["fails"].startswith("FAILED with exit code 3") and rows["fails"].endswith("why")
    assert rows["hangs"].startswith("ok, time is over") and rows["stopped"].startswith(
        "ok, stopped"
    )
    assert rows["works"].endswith("the last word")
    assert (tmp_path / "03-works.log").read_text() == "the last word\n"
    capsys.readouterr()
    assert first_gpu.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["fails"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_same_parts_in_the_same_order_fit_into_half_an_hour(tmp_path, device):
    first_gpu.write_params(tmp_path, "", device == "cpu")
    found = first_gpu.list_parts(tmp_path, device)
    names = [part.name for part in found]
    assert (
        names.index("tests")
        < names.index("train-killed")
        < names.index("train-resumed")
        < names.index("compare")
    )
    assert len(set(names)) == len(names) == 14 and names[-1] == "real"
    assert sum(part.seconds for part in found) <= 28 * 60


def test_losses_of_both_devices_stand_side_by_side(tmp_path, capsys):
    for name, losses in (("cpu", ["1.0", "0.5"]), ("curve", ["1.0", "0.25", "0.1"])):
        folder = tmp_path / name / "reports" / "train" / "curves"
        folder.mkdir(parents=True)
        rows = "".join(f"{step},{loss}\n" for step, loss in enumerate(losses, 1))
        (folder / "train.csv").write_text(f"step,loss\n{rows}")
    for name in ("curve", "whole"):
        weights = tmp_path / name / "checkpoints" / "training" / "step-00000003.safetensors"
        weights.parent.mkdir(parents=True)
        weights.write_bytes(b"weights")
    command = ["--compare", "--out", str(tmp_path)]
    assert first_gpu.main(command) == 0
    said = capsys.readouterr().out
    assert "step 2: 0.50000 on the CPU, 0.25000 on the device" in said
    assert "2 steps, losses differ by 1.00e+00 at most; resumed, the bytes of" in said
    weights.write_bytes(b"others")
    assert first_gpu.main(command) == 1
    assert "OTHER BYTES" in capsys.readouterr().out
