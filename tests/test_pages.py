"""Pages of text and maps to fine-tune on: reproducible, full of keypoints, and apart in their text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from benchmarks.dev import pages
from pipeline import errors
from superglue_sift import sift


@pytest.mark.parametrize("kind", sorted(pages.KINDS))
def test_the_same_arguments_write_the_same_images_full_of_keypoints(tmp_path, kind):
    for name in "ab":
        assert pages.main([str(tmp_path / name), "--kind", kind, "--train", "2", "--held-out", "1"]) == 0
    written = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.jpg"))
    assert [path.parts[0] for path in written] == ["held-out", "train", "train"]
    for path in written:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()
        image = cv2.imread(str(tmp_path / "a" / path), cv2.IMREAD_UNCHANGED)
        assert image.shape == (pages.HEIGHT, pages.WIDTH)
        assert len(sift.extract(image, 1024)) == 1024


def test_no_two_pages_share_a_file(tmp_path, monkeypatch):
    read = []
    original = Path.read_text

    def recorded(path: Path, *args: Any, **kwargs: Any) -> str:
        read.append(path)
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", recorded)
    monkeypatch.setitem(pages.KINDS, "text", lambda text, rng: np.full((40, 60), 255, np.uint8))
    assert pages.main([str(tmp_path), "--train", "20", "--held-out", "10"]) == 0
    assert len(read) == len(set(read)) == 30


def test_a_folder_with_other_pages_is_refused(tmp_path, capsys):
    (tmp_path / "train").mkdir()
    assert errors.run(pages.main, [str(tmp_path), "--train", "2", "--held-out", "1"]) == 2
    assert "not empty" in capsys.readouterr().err and not list((tmp_path / "train").iterdir())


def test_more_pages_than_files_are_refused(tmp_path, capsys):
    assert errors.run(pages.main, [str(tmp_path), "--train", "100000"]) == 2
    assert "files of text" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
