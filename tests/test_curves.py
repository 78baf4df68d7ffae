"""Curves on disk: appended point by point, cut at the checkpoint that a training resumes from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.train.logger import CurveFile

COLUMNS = ("loss", "lr")


def points(first: int, last: int) -> list:
    """(step, point) of steps first to last."""
    return [(step, {"loss": 1 / step, "lr": step / 1000}) for step in range(first, last + 1)]


def write(path: Path, resumed_at: int, first: int, last: int) -> bytes:
    curve = CurveFile(path, resumed_at)
    for step, point in points(first, last):
        curve.append(step, point)
    curve.sync()
    curve.close()
    return path.read_bytes()


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    return write(tmp_path / "whole.csv", 0, 1, 30)


def test_a_curve_is_a_table_of_steps_and_metrics(whole: bytes) -> None:
    lines = whole.decode().splitlines()
    assert lines[0] == "step,loss,lr" and lines[3] == "3,0.333333,0.003" and len(lines) == 31


@pytest.mark.parametrize("checkpoint, killed_at", [(7, 7), (7, 12), (1, 30), (29, 30)])
def test_resuming_cuts_the_points_after_the_checkpoint(tmp_path, whole, checkpoint, killed_at) -> None:
    write(tmp_path / "parts.csv", 0, 1, killed_at)
    assert write(tmp_path / "parts.csv", checkpoint, checkpoint + 1, 30) == whole


@pytest.mark.parametrize("torn", [b"13", b"13,0.0769", b"13,0.0769231,0.013", b"1", b"\xff\xfe"])
def test_half_a_line_of_a_killed_writer_is_cut(tmp_path, whole, torn) -> None:
    path = tmp_path / "parts.csv"
    path.write_bytes(write(path, 0, 1, 12) + torn)
    assert write(path, 12, 13, 30) == whole


def test_a_training_from_scratch_leaves_nothing_of_an_earlier_one(tmp_path, whole) -> None:
    write(tmp_path / "parts.csv", 0, 3, 9)
    assert write(tmp_path / "parts.csv", 0, 1, 30) == whole


def test_nothing_is_cut_before_there_is_a_new_point(tmp_path) -> None:
    path = tmp_path / "curve.csv"
    before = write(path, 0, 1, 9)
    CurveFile(path, 4).close()
    assert path.read_bytes() == before


def test_points_of_an_older_version_keep_the_columns_that_are_left(tmp_path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("step,loss,pairs_per_s\n1,1,5\n2,0.5,6\n3,9,9\n")
    assert write(path, 2, 3, 3).decode().splitlines() == ["step,loss,lr", "1,1,", "2,0.5,", "3,0.333333,0.003"]


def test_a_point_costs_as_many_bytes_written_at_the_end_as_at_the_start(tmp_path, monkeypatch) -> None:
    """Counts the bytes written: one appended line, whatever the length of the file."""
    curve = CurveFile(tmp_path / "curve.csv", 0)
    curve.append(0, {"loss": 0.5})
    sizes = []
    for step in range(10_000, 30_000):
        before = os.fstat(curve._stream.fileno())
        curve.append(step, {"loss": 0.5})
        after = os.fstat(curve._stream.fileno())
        assert after.st_ino == before.st_ino  # the same file, not a new one in its place
        sizes.append(after.st_size - before.st_size)
    assert set(sizes) == {len("10000,0.5\n")}
