"""Files that are written whole or not at all, on every system."""

import os
import threading
from pathlib import Path

import pytest

from superglue_sift import files


def test_an_error_of_writing_names_the_file_and_not_a_temporary_one(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        files.write_atomically(tmp_path / "folder", b"")
    assert error.value.filename == str(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_file_is_written_where_folders_cannot_be_opened(tmp_path, monkeypatch):
    opened = os.open

    def refuse_folders(path, *rest):  # as Windows does
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refuse_folders)
    files.write_atomically(tmp_path / "new/a.txt", "text")
    assert (tmp_path / "new/a.txt").read_text() == "text"


def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/file").write_text("old")
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to("disk/file")
    files.write_atomically(tmp_path / "first", "new")
    assert (tmp_path / "disk/file").read_text() == "new"
    assert (tmp_path / "first").is_symlink() and (tmp_path / "second").is_symlink()
    # A link whose target does not exist yet, nor its folder
    (tmp_path / "later").symlink_to(tmp_path / "other/file")
    files.check_writable(tmp_path / "later")
    files.write_atomically(tmp_path / "later", "new")
    assert (tmp_path / "other/file").read_text() == "new"
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]


def test_a_link_to_a_write_protected_file_is_replaced(tmp_path):
    """DVC links its results to files of its cache, where another commit needs the old content."""
    (tmp_path / "cached").write_text("old")
    (tmp_path / "cached").chmod(0o444)
    for name, link in (("soft", os.symlink), ("hard", os.link)):
        link(tmp_path / "cached", tmp_path / name)
        files.write_atomically(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new"
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "cached").read_text() == "old"


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_an_earlier_file_keeps_its_mode_and_is_never_open_to_more(tmp_path, mode, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(mode)
    modes = []
    replace_file = files.replace_file

    def look_first(new, target):
        modes.append(new.stat().st_mode & 0o777)
        replace_file(new, target)

    monkeypatch.setattr(files, "replace_file", look_first)
    files.write_atomically(path, "new")
    assert modes == [mode] and path.stat().st_mode & 0o777 == mode
    assert path.read_text() == "new"


def test_a_pipe_is_written_into(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    contents = []
    reader = threading.Thread(target=lambda: contents.append(pipe.read_text()), daemon=True)
    reader.start()
    files.write_atomically(pipe, "new")
    reader.join(10)
    assert contents == ["new"] and pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
