"""The doctor's checks, of machines that are made up."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline import doctor
from pipeline.doctor import FAIL, NOTE, OK, WARN
from superglue_sift.files import GIB, MIB


def test_no_gpu_is_a_note_and_one_that_torch_cannot_use_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "GPU_FILE", tmp_path / "nvidia0")
    assert [level for level, _, _ in doctor.check_gpus()] == [NOTE]
    (tmp_path / "nvidia0").touch()
    assert [level for level, _, _ in doctor.check_gpus()] == [FAIL]


@pytest.mark.parametrize("processes, level", [("auto", OK), ("2", FAIL)])
def test_each_gpu_is_used_once(monkeypatch, processes, level):
    monkeypatch.setenv("NPROC_PER_NODE", processes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    assert next(iter(doctor.check_gpus()))[0] == level

    def ones(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution")

    monkeypatch.setattr(torch, "ones", ones)
    level, _, text = [*doctor.check_gpus()][-1]
    assert level == FAIL and "H100" in text and "no kernel image" in text


@pytest.mark.parametrize(
    "gpus, free, level",
    [(0, 64 * MIB, OK), (1, 64 * MIB, WARN), (2, 64 * MIB, FAIL), (2, 2 * GIB, OK)],
)
def test_too_little_shared_memory_names_the_flag_of_docker(monkeypatch, gpus, free, level):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    ((actual_level, _, text),) = doctor.check_shared_memory()
    assert actual_level == level and (f"--shm-size={gpus}g" in text) == (level != OK)


def test_quick_prints_one_line_and_exits_2(root, tmp_path, monkeypatch, capsys):
    (tmp_path / "params.yaml").write_text((root / "presets/sample.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB))
    assert doctor.main(["--quick"]) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert "disk" in line and "1 MiB" in line and output.out == ""


@pytest.mark.parametrize("folder", [".", "data/images"])
def test_a_folder_that_this_user_cannot_write_is_named(folder, tmp_path, monkeypatch):
    """Also one that another user's run has left. root may write everywhere, so the answer of the
    system is replaced.
    """
    (tmp_path / "a clone/data/images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a clone")
    assert not [*doctor.check_permissions()]
    denied = str(Path.cwd()) if folder == "." else folder
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != denied)
    ((level, _, text),) = doctor.check_permissions()
    assert level == FAIL and text.startswith(f"{denied}:")
    assert shlex.quote(str(Path.cwd())) in text  # of a command that repairs it
