"""The doctor's judgements, on machines that are not here."""

from types import SimpleNamespace

import pytest

from pipeline import distributed, doctor
from pipeline.doctor import FAIL, NOTE, OK, WARN
from pipeline.fetch import coco
from pipeline.files import GIB, MIB

CU111 = ["sm_37", "sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "compute_37"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("name", "capability", "build", "level", "word"),
    [
        ("Tesla V100", (7, 0), CU111, OK, "has kernels"),
        ("RTX 4090", (8, 9), CU111, OK, "has kernels"),
        ("H100", (9, 0), CU111, FAIL, "--target modern"),
        ("H200", (9, 0), CU130, OK, "has kernels"),
        ("Tesla V100", (7, 0), CU130, FAIL, "cu111 image"),
    ],
)
def test_a_card_is_checked_against_the_kernels_of_the_build(name, capability, build, level, word):
    found = doctor.check_capability(name, capability, build, "11.1" if build is CU111 else "13.0")
    assert found.level == level
    assert word in found.text and "\n" not in found.text


@pytest.mark.parametrize(
    ("driver", "cuda", "level"),
    [
        ("450.80.02", "11.1", OK),
        ("418.226.00", "11.1", FAIL),
        ("570.124.06", "11.1", OK),
        ("570.124.06", "13.0", FAIL),
        ("580.65.06", "13.0", OK),
    ],
)
def test_a_driver_is_checked_against_cuda(driver, cuda, level):
    assert doctor.check_driver(driver, cuda).level == level


def test_gpus_against_processes():
    assert doctor.check_gpu_count(0, "auto").level == NOTE
    assert doctor.check_gpu_count(4, "8").level == FAIL
    assert "set it to 4" in doctor.check_gpu_count(4, "8").text
    assert doctor.check_gpu_count(4, "auto").level == OK
    assert "--gpus all" in doctor.check_gpu_count(0, "auto", hidden=2, cuda="11.1").text


def test_shared_memory_names_the_exact_flag():
    nccl = distributed.shared_memory_needed(gpus=8)
    found = doctor.check_shared_memory(64 * MIB, nccl, 2 * GIB)
    assert found.level == FAIL and "--shm-size=3g" in found.text
    found = doctor.check_shared_memory(2 * GIB, nccl, 2 * GIB)
    assert found.level == WARN and "fewer processes" in found.text
    assert doctor.check_shared_memory(3 * GIB, nccl, 2 * GIB).level == OK
    # Docker's default serves one GPU or none
    assert doctor.check_shared_memory(64 * MIB, distributed.shared_memory_needed(1)).level == OK


def test_disk_against_a_preset():
    small = doctor.disk_needed(*coco.expect("sample"), 12, 256)
    whole = doctor.disk_needed(*coco.expect("coco2017"), 4, 1024)
    assert small < 2 * GIB < 50 * GIB < whole
    assert doctor.check_disk(whole, whole, "here").level == OK
    found = doctor.check_disk(whole - 1, whole, "here")
    assert found.level == FAIL and "DVC's cache" in found.text
    part = coco.expect("coco2017-val", 100)[0]  # of the zip only a part is downloaded
    assert part == pytest.approx(coco.expect("coco2017-val")[0] / 25, rel=1e-6)
    assert coco.expect("coco2014")[1] == 82_783 + 5_000  # other images of val2014 are not used
    assert coco.expect("coco2017-val", 4000)[0] == coco.expect("coco2017-val")[0]
    assert coco.expect("coco2017-val", 100)[1] == 200 and coco.expect("folder") == (0, 0)


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
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")
    linked, without_git = (finding.text for finding in doctor.run_check(doctor.workspace))
    assert linked.startswith("data is a link") and "cache.dir" in linked
    assert "git init" in without_git and "core.no_scm true" in without_git
    (tmp_path / "data").unlink()
    (tmp_path / (".git" if fix == "git" else ".dvc")).mkdir()
    if fix == "no_scm":
        (tmp_path / ".dvc/config.local").write_text("[core]\n    no_scm = true\n")
    assert doctor.run_check(doctor.workspace) == []
