"""benchmarks.dev.learning: the last validation of each training, after how many pairs."""

from benchmarks.dev import learning
from superglue_sift import system


def test_a_row_for_each_run(tmp_path, capsys):
    curves = tmp_path / "reports" / "train" / "curves"
    curves.mkdir(parents=True)
    rows = "step,loss,precision,recall,f1\n0,0.9,0.1,0.1,0.1\n20,0.5,0.6,0.7,0.65\n"
    (curves / "validation.csv").write_text(rows)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.json").write_text('{"train": {"batch": 4}}')
    picture = tmp_path / "x.png"
    assert learning.main([f"one={tmp_path}", str(tmp_path), "--out", str(picture)]) == 0
    _, one, unnamed = map(str.split, capsys.readouterr().out.splitlines())
    assert one == ["one", "80", "0.500", "0.600", "0.700", "0.650"]
    assert unnamed == [str(tmp_path), *one[1:]]
    assert picture.is_file()
    assert system.exit_code(learning.main, [f"none={tmp_path / 'none'}"]) == 2
