"""Files that are written whole or not at all, on every system."""

import ntpath
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from superglue_sift import RequestError, files


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


def test_a_drive_that_is_missing_is_one_line(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda _: False)
    monkeypatch.setattr(files.tempfile, "TemporaryFile", lambda dir: os.stat("/nowhere"))
    with pytest.raises(RequestError, match=r"x/a\.txt: cannot be written: No such file"):
        files.check_writable("x/a.txt")


def test_names_below_a_folder_have_slashes_on_every_system(monkeypatch):
    assert files.name_below("photos/cats/a.jpg", "photos") == "cats/a.jpg"
    assert files.name_below("photos/a\\b.jpg", "photos") == "a\\b.jpg"  # a letter on Linux
    monkeypatch.setattr(files, "os", SimpleNamespace(path=ntpath, sep="\\"))
    assert files.name_below("C:\\photos\\cats\\a.jpg", "C:\\photos") == "cats/a.jpg"
    assert files.name_below("D:\\a.jpg", "C:\\photos") == "D:/a.jpg"
