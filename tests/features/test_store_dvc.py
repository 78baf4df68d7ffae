"""The store under DVC: pushed and pulled whole; a damaged cache object, which DVC lets through, is
caught.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from test_store import COUNTS, make_images, write

from pipeline.errors import RequestError
from pipeline.features.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def dvc(tmp_path):
    """A DVC repository with a store under data/keypoints and a remote in another folder."""

    def run(*arguments):
        command = [sys.executable, "-m", "dvc", *arguments]
        env = {**os.environ, "DVC_NO_ANALYTICS": "true"}
        subprocess.run(
            command, cwd=tmp_path / "repo", env=env, check=True, stdout=subprocess.DEVNULL
        )

    (tmp_path / "repo").mkdir()
    run("init", "--no-scm", "-q")
    run("remote", "add", "-d", "store", str(tmp_path / "remote"))
    write(tmp_path / "repo" / "data" / "keypoints", make_images(COUNTS))
    return run


def test_a_damaged_cache_object_is_caught(dvc, tmp_path):
    store = tmp_path / "repo" / "data" / "keypoints"
    dvc("add", "-q", "data/keypoints")
    objects = sorted(
        (tmp_path / "repo" / ".dvc" / "cache").rglob("*"), key=lambda path: path.stat().st_size
    )
    largest = [path for path in objects if path.is_file()][-1]
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    os.chmod(largest, 0o644)
    largest.write_bytes(data)
    os.chmod(largest, 0o444)
    shutil.rmtree(store)
    dvc("checkout", "-q", "data/keypoints.dvc")  # DVC finds nothing wrong
    with pytest.raises(RequestError, match="SHA-256"):
        Store(store, verify="all")
