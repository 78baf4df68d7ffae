"""benchmarks.dev.scenes: cameras against true ones."""

from benchmarks.dev import scenes as bench
from superglue_sift import system


def test_a_camera_file_that_is_wrong_is_named(tmp_path, capsys):
    (tmp_path / "cameras.txt").write_text("a.jpg 1 2 3\n")
    assert (
        system.exit_code(bench.main, [str(tmp_path), "--cameras", str(tmp_path / "cameras.txt")])
        == 2
    )
    assert "cameras.txt line 1" in capsys.readouterr().err
