"""A stage of a plain `dvc repro` locks the workspace; under `make repro` the lock is already
held.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAGE = "from pipeline import errors\nfrom pipeline.provenance import workspace_lock\n"
STAGE += (
    "def main(argv):\n    workspace_lock.take()\n    import time\n    print('working',"
    " flush=True)\n"
)
STAGE += (
    "    time.sleep(float(argv[0]))\n    return 0\nraise SystemExit(errors.run(main, {argv}))\n"
)


@pytest.fixture
def stage(tmp_path):
    """`stage(seconds)`: a stage as DVC starts it; with `prefix` as another program does."""

    def start(seconds: float = 0, *prefix: str, **environment: str) -> subprocess.Popen:
        values = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DVC_ROOT": str(tmp_path),
            "DVC_STAGE": "fetch",
        }
        return subprocess.Popen(
            [*prefix, sys.executable, "-c", STAGE.replace("{argv}", repr([str(seconds)]))],
            cwd=tmp_path,
            env={**values, **environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


def test_a_stage_locks_the_workspace_and_says_so(stage, tmp_path):
    first = stage(60)
    assert "started by hand" in first.stdout.readline() and first.stdout.readline() == "working\n"
    out, err = stage().communicate()
    assert (
        "working" not in out and "is in use by container or host" in err and "Traceback" not in err
    )
    first.kill()
    first.wait()
    again = stage()
    assert "working" in again.communicate()[0] and again.returncode == 0


def test_under_make_repro_there_is_nothing_to_do(stage, tmp_path):
    lock = str(ROOT / "docker" / "workspace.py")
    run = stage(0, sys.executable, lock, "sh", "-c", '"$@"; exit $?', "sh")
    out, err = run.communicate()
    assert out == "working\n" and run.returncode == 0, err


def test_a_lock_of_another_container_with_our_process_ids_is_respected(stage, tmp_path):
    path = tmp_path / ".dvc" / "tmp" / "workspace.lock"
    path.parent.mkdir(parents=True)
    with path.open("a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(json.dumps({"host": "another", "pid": os.getpid(), "since": "now"}))
        stream.flush()
        out, err = stage().communicate()
    assert "working" not in out and "another" in err


def test_without_dvc_nothing_is_locked(stage, tmp_path):
    run = stage(0, DVC_ROOT="")
    assert run.communicate()[0] == "working\n" and not (tmp_path / ".dvc").exists()
