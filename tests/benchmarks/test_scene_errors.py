"""benchmarks.dev.scenes: cameras against true ones."""

import json
import shutil

import pytest

from benchmarks.dev import scene_errors
from benchmarks.dev import scenes as bench
from superglue_sift import errors


@pytest.fixture(scope="module")
def strecha(shared_data):
    folder = shared_data / "poses" / "strecha"
    return folder, scene_errors.read_cameras(folder / "cameras_gt.txt")


@pytest.mark.slow
def test_scenes_are_measured_by_one_command(strecha, tmp_path, capsys):
    pytest.importorskip("pycolmap")
    folder, _ = strecha
    for number in (4, 5, 6, 7):
        shutil.copy(folder / f"Herz-Jesus-P25_000{number}.jpg", tmp_path)
    words = [str(tmp_path), "--cameras", str(folder / "cameras_gt.txt"), "--width", "768"]
    words += ["--ways", "ours", "held", "--seeds", "2"]
    assert errors.exit_code(bench.main, [*words, "--work", str(tmp_path / "work")]) == 0
    rows = json.loads((tmp_path / "work" / "rows.json").read_text())
    assert [row["way"] for row in rows] == ["ours", "held"]
    for row in rows:
        assert row["registered"] == row["of"] == 4 and row["false"] == 0 and row["pairs"] == 6
        assert (
            row["percent"] < 1
            and row["rotation"] < {"ours": 0.6, "held": 1.5}[row["way"]]
            and row["px"] < 1
        )
        least, most = row["centre_range"]
        assert 0 < least <= row["centre"] <= most < 1.5 * least and row["cpu"] > 0
    assert rows[0]["points"] > rows[1]["points"]
    heads, *lines = map(str.split, capsys.readouterr().out.splitlines())
    assert heads[:3] == ["scene", "way", "registered"]
    assert [line[:3] for line in lines] == [
        ["Herz-Jesus-P25", way, "4/4"] for way in ("ours", "held")
    ]


def test_a_camera_file_that_is_wrong_is_named(tmp_path, capsys):
    (tmp_path / "cameras.txt").write_text("a.jpg 1 2 3\n")
    assert (
        errors.exit_code(bench.main, [str(tmp_path), "--cameras", str(tmp_path / "cameras.txt")])
        == 2
    )
    assert "cameras.txt line 1" in capsys.readouterr().err
