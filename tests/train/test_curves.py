"""Curves on disk: appended point by point, replaced by those of the checkpoint that is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.train.curves import Curve


def write(path: Path, first: int, last: int, text: str = "") -> str:
    """Append the points of steps first to last; returns the file."""
    curve = Curve(path, text)
    for step in range(first, last + 1):
        curve.append(step, {"loss": 1 / step, "lr": step / 1000})
    curve.close()
    assert path.read_text() == curve.text
    return curve.text


@pytest.fixture
def whole(tmp_path: Path) -> str:
    return write(tmp_path / "whole.csv", 1, 30)


def test_a_curve_is_a_table_of_steps_and_metrics(whole: str) -> None:
    lines = whole.splitlines()
    assert lines[0] == "step,loss,lr" and lines[3] == "3,0.333333,0.003" and len(lines) == 31


@pytest.mark.parametrize("checkpoint, killed_at", [(7, 7), (7, 12), (1, 30), (29, 30)])
def test_the_points_of_the_checkpoint_replace_the_file(
    tmp_path, whole, checkpoint, killed_at
) -> None:
    path = tmp_path / "parts.csv"
    saved = write(tmp_path / "saved.csv", 1, checkpoint)
    write(path, 1, killed_at)
    assert write(path, checkpoint + 1, 30, saved) == whole


def test_a_file_begins_with_its_first_point(tmp_path, whole) -> None:
    write(tmp_path / "reports" / "curve.csv", 3, 9)
    curve = Curve(tmp_path / "reports" / "curve.csv")
    assert not curve._path.exists()  # `dvc plots` cannot read an empty one
    curve.append(1, {"loss": 0.5})
    curve.close()
    assert curve._path.read_text() == "step,loss\n1,0.5\n"
