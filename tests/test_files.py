"""Files that are written whole or not at all, on every system."""

import os
from pathlib import Path

import pytest

from superglue_sift import files


def test_an_error_of_writing_names_the_file_and_not_a_temporary_one(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        files.write_atomic(tmp_path / "folder", b"")
    assert error.value.filename == str(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_file_is_written_where_folders_cannot_be_opened(tmp_path, monkeypatch):
    opened = os.open

    def refuse_folders(path, *rest):  # as Windows does
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refuse_folders)
    files.write_atomic(tmp_path / "new/a.txt", "text")
    assert (tmp_path / "new/a.txt").read_text() == "text"


def test_a_file_that_a_reader_has_open_is_replaced_when_it_is_closed(tmp_path, monkeypatch):
    replace = os.replace
    refused = iter([True, True, False])

    def refuse_open_files(source, target):  # as Windows does
        if next(refused):
            raise PermissionError(13, "Permission denied", str(source))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse_open_files)
    files.write_atomic(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "new"
