"""benchmarks.dev.scenes: cameras against true ones."""

import pytest

from benchmarks.dev import scenes as bench
from superglue_sift import errors


def test_a_camera_file_that_is_wrong_is_named(tmp_path, capsys):
    pytest.importorskip("pycolmap")
    (tmp_path / "cameras.txt").write_text("a.jpg 1 2 3\n")
    words = [str(tmp_path), "--cameras", str(tmp_path / "cameras.txt")]
    assert errors.exit_code(bench.main, words) == 2
    assert "cameras.txt line 1" in capsys.readouterr().err
