"""The doctor's judgements, on machines that are not here."""

from types import SimpleNamespace

import pytest
import torch

from pipeline import doctor
from pipeline.doctor import FAIL, NOTE, OK, WARN
from superglue_sift.files import GIB, MIB


def test_no_gpu_is_a_note_and_one_that_torch_cannot_use_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "GPU_FILE", tmp_path / "nvidia0")
    (found,) = doctor.gpus()
    assert found[0] == NOTE and "--gpus all" in found[2]
    (tmp_path / "nvidia0").touch()
    assert [level for level, _, _ in doctor.gpus()] == [FAIL]


@pytest.mark.parametrize("processes, level", [("auto", OK), ("2", FAIL)])
def test_a_card_is_tried(monkeypatch, processes, level):
    monkeypatch.setenv("NPROC_PER_NODE", processes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    monkeypatch.setattr(torch, "ones", lambda *_, device: torch.zeros(1))
    assert next(iter(doctor.gpus()))[0] == level

    def ones(*_, device):
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution")

    monkeypatch.setattr(torch, "ones", ones)
    level, _, text = [*doctor.gpus()][-1]
    assert level == FAIL and "H100: CUDA error: no kernel image is available: use the" in text


@pytest.mark.parametrize(
    "gpus, free, level",
    [(0, 64 * MIB, OK), (1, 64 * MIB, WARN), (2, 64 * MIB, FAIL), (2, 2 * GIB, OK)],
)
def test_shared_memory_names_the_exact_flag(monkeypatch, gpus, free, level):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    ((found, _, text),) = doctor.shared_memory()
    assert found == level and (f"--shm-size={gpus}g" in text) == (level != OK)


def test_quick_prints_one_line_and_exits_2(root, tmp_path, monkeypatch, capsys):
    (tmp_path / "params.yaml").write_text((root / "params.yaml").read_text())
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB))
    assert doctor.main(["--quick"]) == 2
    done = capsys.readouterr()
    (line,) = done.err.splitlines()
    assert "disk: 1 MiB free" in line and "fetch.limit" in line and done.out == ""


@pytest.mark.parametrize("fix", ["git", "no_scm"])
def test_what_dvc_refuses_is_said_before_with_what_works(tmp_path, monkeypatch, fix):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    data.symlink_to("disk")
    linked, without_git = (text for _, _, text in doctor.workspace())
    assert linked.startswith("data is a link") and "cache.dir" in linked
    assert "git init" in without_git and "core.no_scm true" in without_git
    data.unlink()
    (tmp_path / (".git" if fix == "git" else ".dvc")).mkdir()
    if fix == "no_scm":
        (tmp_path / ".dvc/config.local").write_text("[core]\n    no_scm = true\n")
    assert not list(doctor.workspace())
