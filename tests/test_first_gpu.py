"""The first half hour on a GPU: its parts in order; a failed part stops no other; each result is written at once."""

from __future__ import annotations

import argparse
import sys

import pytest

from benchmarks.dev import first_gpu
from benchmarks.dev.first_gpu import Part


def python(code: str) -> list:
    return [sys.executable, "-c", code]


def test_a_part_that_fails_hangs_or_raises_costs_its_own_line(tmp_path, monkeypatch, capsys):
    saving = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print('on', flush=True)"
    file = tmp_path / "seen"
    chosen = [
        Part("fails", 60, python("print('why'); raise SystemExit(3)")),
        Part("raises", 60, lambda: 1 / 0),
        Part("hangs", 4, python(f"{saving}; time.sleep(60)"), expected=(0, 143)),
        Part("stopped", 60, python(f"{saving}; open({str(file)!r}, 'w'); time.sleep(60)"), "seen", (143,)),
        Part("works", 60, python("print('the last word')")),
        Part("skips", 60, python("print('no such card'); raise SystemExit(2)"), skipped=(2,)),
    ]
    monkeypatch.setattr(first_gpu, "parts", lambda *_: chosen)
    assert first_gpu.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "summary.md").read_text().splitlines()[2:]
    assert capsys.readouterr().out.splitlines() == lines
    said = [line.split("|")[3].strip() for line in lines]
    assert said[0] == "FAILED (ended, exit code 3): why"
    assert said[1].startswith("failed: ZeroDivisionError")
    assert said[2] == "ok (time is over, exit code 143): on"
    assert said[3] == "ok (stopped, exit code 143): on"
    assert said[4] == "ok (ended, exit code 0): the last word"
    assert said[5] == "SKIP (ended, exit code 2): no such card"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_same_parts_in_the_same_order_on_both(tmp_path, device):
    args = argparse.Namespace(device=device, images="", out=tmp_path, minutes=None)
    found = first_gpu.parts(tmp_path, device, first_gpu._sizes(args))
    names = [part.name for part in found]
    assert names.index("tests") < names.index("train-killed") < names.index("train-resumed") < names.index("real")
    assert len(set(names)) == len(names) == 18 and names[-2:] == ["real", "figures"]
    assert sum(part.seconds for part in found) <= 28 * 60 * (1 if device == "cuda" else first_gpu.PATIENCE)
    assert [part.name for part in found if part.grows] == (["real"] if device == "cuda" else [])


def test_a_smaller_budget_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    """What has ended well is not done again; what failed, ran out of the budget or was not begun is."""
    monkeypatch.setattr(first_gpu, "MIN_LEFT", 2.5)
    count = tmp_path / "count"
    add = f"open({str(count)!r}, 'a').write('x')"
    monkeypatch.setattr(first_gpu, "parts", lambda *_: [
        Part("quick", 60, python(f"{add}; print('done')")),
        Part("slow", 60, python("import os, time; time.sleep(0 if os.environ.get('FAST') else 60)"), expected=(0, -15)),
        Part("last", 60, python("print('the end')")),
    ])  # fmt: skip
    command = ["--device", "cpu", "--out", str(tmp_path / "out"), "--budget"]
    assert first_gpu.main([*command, "0.05"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in said] == ["quick", "slow", "last"]
    assert "time is over" in said[1] and "left for the next call" in said[2]
    monkeypatch.setenv("FAST", "1")
    assert first_gpu.main([*command, "1"]) == 0
    assert [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()] == ["slow", "last"]
    rows = (tmp_path / "out" / "summary.md").read_text().splitlines()[2:]
    assert len(rows) == 3 and all("| ok (ended" in row for row in rows) and count.read_text() == "x"
    assert first_gpu.main([*command, "1", "--only", "quick"]) == 0
    assert count.read_text() == "xx"
    with pytest.raises(SystemExit, match="2"):
        first_gpu.main([*command, "1", "--only", "nothing"])


def test_what_was_skipped_is_tried_again_and_the_training_takes_what_is_left(tmp_path, monkeypatch):
    needed, limits, inner = tmp_path / "needed", [], first_gpu.run
    monkeypatch.setattr(first_gpu, "run", lambda part, *rest: limits.append(part.seconds) or inner(part, *rest))
    monkeypatch.setattr(first_gpu, "parts", lambda *_: [
        Part("maker", 9, python(f"open({str(needed)!r}, 'w')") if limits else python("raise SystemExit(1)")),
        Part("user", 9, python(f"import os; raise SystemExit(0 if os.path.exists({str(needed)!r}) else 2)"),
             skipped=(2,)),
        Part("training", 20, python(""), grows=True),
        Part("after", 10, python("")),
    ])  # fmt: skip
    command = ["--device", "cpu", "--out", str(tmp_path / "out"), "--budget", "1"]
    outcomes = []
    for _ in range(2):
        assert first_gpu.main(command) == 0
        rows = (tmp_path / "out" / "summary.md").read_text().splitlines()[2:]
        outcomes.append([row.split("|")[3].split()[0] for row in rows])
    assert outcomes == [["FAILED", "SKIP", "ok", "ok"], ["ok"] * 4] and len(limits) == 6
    assert limits[:2] == limits[4:] == [9, 9] and 40 < limits[2] <= 50 and limits[3] == 10


def test_losses_of_both_devices_stand_side_by_side(tmp_path):
    for name, losses in (("cpu", ["1.0", "0.5"]), ("curve", ["1.0", "0.25", "0.1"])):
        folder = tmp_path / name / "reports" / "train" / "curves"
        folder.mkdir(parents=True)
        rows = "".join(f"{step},{loss}\n" for step, loss in enumerate(losses, 1))
        (folder / "train.csv").write_text(f"step,loss\n{rows}")
    weights = {}
    for name in ("curve", "whole"):
        weights[name] = tmp_path / name / "checkpoints" / "step-00000003.safetensors"
        weights[name].parent.mkdir(parents=True)
        weights[name].write_bytes(b"weights")
    (weights["whole"].parent / "step-00000001.safetensors").write_bytes(b"older")
    far = "2 steps, largest relative difference of the loss 5.00e-01; resumed, "
    lines, same = first_gpu.compared(tmp_path)
    assert same and lines[-1] == f"{far}the bytes of the unbroken training at step-00000003"
    weights["curve"].write_bytes(b"others")
    lines, same = first_gpu.compared(tmp_path)
    assert not same and lines[-1] == f"{far}OTHER BYTES of the unbroken training at step-00000003"
    weights["whole"].unlink()
    lines, same = first_gpu.compared(tmp_path)
    assert not same and lines[-1].endswith("no bytes to compare: resumed step-00000003, unbroken step-00000001")
