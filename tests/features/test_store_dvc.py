"""The store under DVC: pushed and pulled whole; a damaged cache object, which DVC lets through, is
caught.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def content(folder: Path):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("link", ["copy", "hardlink", "symlink"])
def test_shards_survive_push_and_pull_with_every_kind_of_link(dvc, tmp_path, link):
    store = tmp_path / "repo" / "data" / "keypoints"
    before = content(store)
    digest = Store(store).digest
    dvc("config", "cache.type", link)
    dvc("add", "-q", "data/keypoints")
    dvc("push", "-q")
    shutil.rmtree(tmp_path / "repo" / ".dvc" / "cache")
    shutil.rmtree(store)
    dvc("pull", "-q")
    assert content(store) == before and Store(store, verify="all").digest == digest


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
