"""The doctor's judgements, on machines that are not here."""

import getpass
import os
import pwd
import shlex
import subprocess
from types import SimpleNamespace

import pytest
import torch

from pipeline import doctor, provenance
from pipeline.doctor import FAIL, NOTE, OK, WARN
from superglue_sift.files import GIB, MIB


def test_no_gpu_is_a_note_and_one_that_torch_cannot_use_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "GPU_FILE", tmp_path / "nvidia0")
    (found,) = doctor.check_gpus()
    assert found[0] == NOTE and "--gpus all" in found[2]
    (tmp_path / "nvidia0").touch()
    assert [level for level, _, _ in doctor.check_gpus()] == [FAIL]


@pytest.mark.parametrize("processes, level", [("auto", OK), ("2", FAIL)])
def test_a_card_is_tried(monkeypatch, processes, level):
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
    assert level == FAIL and "H100: CUDA error: no kernel image is available: use the" in text


@pytest.mark.parametrize(
    "gpus, free, level",
    [(0, 64 * MIB, OK), (1, 64 * MIB, WARN), (2, 64 * MIB, FAIL), (2, 2 * GIB, OK)],
)
def test_shared_memory_names_the_exact_flag(monkeypatch, gpus, free, level):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    ((found, _, text),) = doctor.check_shared_memory()
    assert found == level and (f"--shm-size={gpus}g" in text) == (level != OK)


def test_quick_prints_one_line_and_exits_2(root, tmp_path, monkeypatch, capsys):
    (tmp_path / "params.yaml").write_text((root / "presets/sample.yaml").read_text())
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
    linked, without_git = (text for _, _, text in doctor.check_workspace())
    assert linked.startswith("data is a link") and "cache.dir" in linked
    assert "git init" in without_git and "core.no_scm true" in without_git
    data.unlink()
    (tmp_path / (".git" if fix == "git" else ".dvc")).mkdir()
    if fix == "no_scm":
        (tmp_path / ".dvc/config.local").write_text("[core]\n    no_scm = true\n")
    assert not list(doctor.check_workspace())


def test_a_user_without_an_account_is_told_what_dvc_needs(monkeypatch):
    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    ((level, subject, text),) = doctor.check_user()
    assert (level, subject) == (FAIL, "user") and "`export HOME=/tmp USER=user`" in text
    # what DVC looks for, by the same functions
    with pytest.raises(KeyError):
        getpass.getuser()
    monkeypatch.setenv("HOME", "/tmp")
    ((_, _, text),) = doctor.check_user()
    assert "`export USER=user`" in text
    monkeypatch.setenv("USER", "user")
    assert not [*doctor.check_user()] and getpass.getuser() == "user"


def test_a_folder_that_this_user_cannot_write_is_named(tmp_path, monkeypatch):
    """Also one that another user's run has left. root may write everywhere, so the answer of the
    system is replaced.
    """
    clone = tmp_path / "a clone"
    for name in (".dvc/tmp", "data/images", "reports"):
        (clone / name).mkdir(parents=True)
    for name in (".dvc/tmp/lock", "dvc.lock", "data/images/manifest.csv"):
        (clone / name).touch()
    monkeypatch.chdir(clone)
    assert not [*doctor.check_permissions()]
    denied = []
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: str(path) not in denied)
    for name in (".dvc/tmp/lock", "dvc.lock", "data/images", "reports", str(clone)):
        denied[:] = [name]
        ((level, _, text),) = doctor.check_permissions()
        assert level == FAIL and text.startswith(f"{name}: user ")
        assert f"`sudo chown -R $(id -u) {shlex.quote(str(clone))}`" in text
    # files that are replaced need a folder that can be written
    denied[:] = ["data/images/manifest.csv"]
    assert not [*doctor.check_permissions()]
    denied[:] = ["data/images", "reports", "dvc.lock"]
    assert " and 2 more: user " in next(doctor.check_permissions())[2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("quick", [False, True])
def test_a_clone_of_another_user_is_a_warning_with_what_git_needs(
    root, tmp_path, monkeypatch, capsys, quick
):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    clone = tmp_path / "a clone"
    clone.mkdir()
    (clone / "params.yaml").write_text((root / "presets/sample.yaml").read_text())
    monkeypatch.chdir(clone)
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=b", "commit", "-q", "-m", "first")
    assert not [*doctor.check_commit()]
    for path in (clone, *clone.rglob("*")):
        os.chown(path, 12345, 12345)
    assert provenance.read_git_state(clone)["commit"] == provenance.UNKNOWN
    assert doctor.main(["--quick"] if quick else []) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " git: " in line]
    fix = f"git config --global --add safe.directory {shlex.quote(str(clone))}"
    assert "warn" in line and "dubious ownership" in line and line.endswith(f"type `{fix}`")
    git(*shlex.split(fix)[1:])
    assert not [*doctor.check_commit()]


def test_a_repository_without_a_commit_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not [*doctor.check_commit()]  # no repository
    git("init", "-q")
    ((level, _, text),) = doctor.check_commit()
    assert level == WARN and "results will not name the commit (fatal: " in text
    monkeypatch.setenv("PATH", "")
    ((level, _, text),) = doctor.check_commit()
    assert level == WARN and "install git" in text


def git(*words):
    subprocess.run(["git", *words], check=True)
