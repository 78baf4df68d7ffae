"""Learning curves of several runs in one picture, from the files of their trainings."""

from __future__ import annotations

import json

import pytest

from benchmarks.dev import learning


def made_run(folder, batch, speed, f1s):
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "reports" / "curves").mkdir(parents=True)
    (folder / "checkpoints" / "best.json").write_text(json.dumps({"train": {"batch": batch}}))
    steps = [10 * (i + 1) for i in range(len(f1s))]
    rows = ["step,loss,precision,recall,f1"] + [
        f"{s},1.0,0.5,0.5,{f1}" for s, f1 in zip(steps, f1s)
    ]
    (folder / "reports" / "curves" / "validation.csv").write_text("\n".join(rows) + "\n")
    (folder / "reports" / "timing.csv").write_text(
        "step,pairs_per_s\n" + "".join(f"{s},{speed}\n" for s in range(5, steps[-1] + 1, 5))
    )
    return folder


def test_pairs_and_minutes_go_on_from_one_folder_to_the_next(tmp_path, capsys):
    first = made_run(tmp_path / "a", batch=6, speed=1.0, f1s=[0.1, 0.2])
    then = made_run(tmp_path / "b", batch=12, speed=2.0, f1s=[0.3])
    picture = tmp_path / "learning.png"
    words = [f"ab={first}+{then}", "--ratio-test", "0.15", "--out", str(picture)]
    assert learning.main(words) == 0 and picture.stat().st_size > 10_000
    line = capsys.readouterr().out.splitlines()[1]
    expected = "ab 240 3 1.000 0.500 0.500 0.300 120 pairs, 2 min"
    assert " ".join(line.split()) == expected
    points = learning.read_curve([first, then])
    assert [point.pairs for point in points] == [60, 120, 240]
    assert [point.minutes for point in points] == pytest.approx([1.0, 2.0, 3.0])
