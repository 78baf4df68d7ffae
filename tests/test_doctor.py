"""The doctor's judgements, on machines that are not here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeline import doctor
from pipeline.runtime import machine
from pipeline.runtime.machine import FAIL, GIB, MIB, NOTE, OK, WARN

CU111 = ["sm_37", "sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "compute_37"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("name", "capability", "build", "level", "word"),
    [
        ("Tesla V100", (7, 0), CU111, OK, "has kernels"),
        ("A100", (8, 0), CU111, OK, "has kernels"),
        ("RTX 4090", (8, 9), CU111, OK, "has kernels"),
        ("H100", (9, 0), CU111, FAIL, "--target modern"),
        ("B200", (10, 0), CU111, FAIL, "--target modern"),
        ("H200", (9, 0), CU130, OK, "has kernels"),
        ("Tesla V100", (7, 0), CU130, FAIL, "cu111 image"),
    ],
)
def test_a_card_is_judged_against_the_kernels_of_the_build(name, capability, build, level, word):
    found = machine.judge_capability(name, capability, build, "11.1" if build is CU111 else "13.0")
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
def test_a_driver_is_judged_against_cuda(driver, cuda, level):
    assert machine.judge_driver(driver, cuda).level == level


def test_a_driver_message_names_the_version_to_install():
    assert "450.80.02" in machine.judge_driver("418.226.00", "11.1").text
    assert "install 580 or later" in machine.judge_driver("535.10.01", "13.0").text


def test_gpus_against_processes():
    assert machine.judge_gpu_count(0, "auto").level == NOTE
    assert machine.judge_gpu_count(4, "8").level == FAIL
    assert "set it to 4" in machine.judge_gpu_count(4, "8").text
    assert machine.judge_gpu_count(4, "auto").level == OK
    assert "--gpus all" in machine.judge_gpu_count(0, "auto", hidden=2, cuda="11.1").text


def test_shared_memory_names_the_exact_flag():
    needed = machine.shared_memory_needed(ranks=8, pairs_per_rank=8, keypoints=1024)
    found = machine.judge_shared_memory(64 * MIB, needed)
    assert found.level == FAIL and "--shm-size=1g" in found.text
    assert machine.judge_shared_memory(8 * GIB, needed).level == OK
    assert machine.shared_memory_needed(1, 8, 256) < 64 * MIB  # one process runs in Docker's default


def test_disk_wants_more_for_a_larger_preset():
    small = machine.disk_needed("sample", 12, 256)
    large = machine.disk_needed("coco2017", 4, 1024)
    assert small < 2 * GIB < 50 * GIB < large
    assert machine.judge_disk(10 * GIB, large, "/workspace").level == FAIL


def test_open_files_names_the_flag():
    found = machine.judge_files(64)
    assert found.level == FAIL and "--ulimit nofile" in found.text


def test_a_tracking_server_that_refuses_its_name():
    found = machine.judge_tracking("http://mlflow:5000", 403)
    assert found.level == WARN and "--allowed-hosts 'mlflow:5000" in found.text
    assert machine.judge_tracking("http://mlflow:5000", None, "timed out").level == WARN
    assert machine.judge_tracking("http://mlflow:5000", 200).level == OK


def test_an_unreachable_server_is_a_warning(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert [found.level for found in doctor.mlflow()] == [WARN]


def test_a_check_that_breaks_is_a_warning():
    def broken():
        raise OSError("strange machine")
        yield

    assert [found.level for found in doctor.guarded(broken)] == [WARN]


def test_quick_prints_one_line_and_exits_2(root, tmp_path):
    (tmp_path / "params.yaml").write_text((root / "params.yaml").read_text())
    environment = dict(os.environ, PYTHONPATH=str(root))
    command = f"ulimit -n 64; exec {sys.executable} -m pipeline.doctor --quick"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "open files: limit 64" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
