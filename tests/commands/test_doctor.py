"""The doctor's judgements, on machines that are not here."""

import os
import subprocess
import sys

import pytest

from pipeline import doctor
from pipeline.fetch import coco
from pipeline.processes import machine
from pipeline.processes.machine import FAIL, GIB, MIB, NOTE, OK, WARN

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
    found = machine.check_capability(name, capability, build, "11.1" if build is CU111 else "13.0")
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
    assert machine.check_driver(driver, cuda).level == level


def test_gpus_against_processes():
    assert machine.check_gpu_count(0, "auto").level == NOTE
    assert machine.check_gpu_count(4, "8").level == FAIL
    assert "set it to 4" in machine.check_gpu_count(4, "8").text
    assert machine.check_gpu_count(4, "auto").level == OK
    assert "--gpus all" in machine.check_gpu_count(0, "auto", hidden=2, cuda="11.1").text


def test_shared_memory_names_the_exact_flag():
    nccl = machine.shared_memory_needed(gpus=8)
    found = machine.check_shared_memory(64 * MIB, nccl, 2 * GIB)
    assert found.level == FAIL and "--shm-size=3g" in found.text
    found = machine.check_shared_memory(2 * GIB, nccl, 2 * GIB)
    assert found.level == WARN and "fewer processes" in found.text
    assert machine.check_shared_memory(3 * GIB, nccl, 2 * GIB).level == OK
    # Docker's default serves one GPU or none
    assert machine.check_shared_memory(64 * MIB, machine.shared_memory_needed(1)).level == OK


def test_disk_against_a_preset():
    small = machine.disk_needed(*coco.expect("sample"), 12, 256)
    whole, linked = (machine.disk_needed(*coco.expect("coco2017"), 4, 1024, n) for n in (2, 1))
    assert small < 2 * GIB < 50 * GIB < linked < whole
    found = machine.check_disk((whole + linked) // 2, whole, "here", linked)
    assert found.level == WARN and "cache.type hardlink" in found.text
    assert machine.check_disk(linked - 1, whole, "here", linked).level == FAIL
    assert coco.expect("coco2017-val", 100)[1] == 200 and coco.expect("folder") == (0, 0)


def test_an_unreachable_server_is_a_warning(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter22@127.0.0.1:1")
    (found,) = doctor.mlflow()
    assert (
        found.level == WARN
        and "http://127.0.0.1:1 does not answer" in found.text
        and "hunter22" not in found.text
    )


def test_quick_prints_one_line_and_exits_2(root, tmp_path):
    (tmp_path / "params.yaml").write_text((root / "params.yaml").read_text())
    environment = dict(os.environ, PYTHONPATH=str(root))
    command = f"ulimit -n 64; exec {sys.executable} -m pipeline.doctor --quick"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert (
        "open files: limit 64" in done.stderr
        and "--ulimit nofile" in done.stderr
        and len(done.stderr.strip().splitlines()) == 1
    )
    assert done.stdout == ""
