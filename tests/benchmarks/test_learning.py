"""benchmarks.dev.learning: pairs and minutes of trainings, and when they passed the ratio test."""

import json

from benchmarks.dev import learning


def write_run(folder, f1):
    """Validations at steps 0, 10 and 20 of a training of 4 pairs a step, 0.02 pairs a second."""
    curves = folder / "reports" / "curves"
    curves.mkdir(parents=True)
    rows = [f"{step},0.5,0.6,0.7,{value}" for step, value in zip((0, 10, 20), f1)]
    (curves / "validation.csv").write_text("\n".join(["step,loss,precision,recall,f1", *rows]))
    points = [{"step": step, "metrics": {learning.SPEED: 0.02}} for step in (5, 20)]
    (folder / "reports" / "log.jsonl").write_text("\n".join(map(json.dumps, points)))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best.json").write_text('{"train": {"batch": 4}}')
    return folder


def test_a_row_for_each_run_and_for_one_that_continues_another(tmp_path, capsys):
    first = write_run(tmp_path / "a", (0.1, 0.6, 0.7))
    second = write_run(tmp_path / "b", (0.6, 0.4, 0.6))
    picture = tmp_path / "x.png"
    words = [f"one={first}", f"both={first}+{second}", "--ratio-test", "0.5", "--out", picture]
    assert learning.main(list(map(str, words))) == 0
    _, one, both = map(str.split, capsys.readouterr().out.splitlines())
    assert one[:3] == ["one", "80", "67"] and one[6:] == ["0.700", "40", "pairs,", "33", "min"]
    # it fell below in between
    assert both[:3] == ["both", "160", "133"] and both[7:] == ["160", "pairs,", "133", "min"]
    assert picture.is_file()
