"""The stage `keypoints` on many images: real COCO photographs, and eight thousand small ones."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List

import cv2
import pytest
from made_params import file_of

from pipeline.features.store import Store
from pipeline.fetch import __main__ as fetch

# few and small views: that the bytes are the same does not hang on their number and size
VIEWS = {"views_per_image": 2, "width": 128, "height": 96, "max_keypoints": 256}


def digests(folder: Path) -> Dict[str, str]:
    """SHA-256 of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def fetched(tmp_path, make_params):
    """`fetched(folder, **views)` fetches a folder without test images; returns the command line of
    the stage.
    """
    from ruamel.yaml import YAML

    def made(folder: Path, **views) -> Callable[..., List[str]]:
        held = {"val_fraction": 0.1, "test_fraction": 0.0}
        tree = {
            "fetch": make_params("fetch", source="folder", path=str(folder), **held).model_dump(),
            "keypoints": make_params("keypoints", **views).model_dump(),
        }
        with (tmp_path / f"{folder.name}.yaml").open("w") as stream:
            YAML(typ="safe").dump(file_of(tree), stream)
        shared = [
            "--params",
            str(tmp_path / f"{folder.name}.yaml"),
            "--reports",
            str(tmp_path / "reports"),
        ]
        images = str(tmp_path / f"images of {folder.name}")
        fetch.main([*shared, "--out", images, "--archives", str(tmp_path / "archives")])

        def command(out: str, *more: str, start: tuple = ()) -> List[str]:
            begin = [sys.executable, *start, "-m", "pipeline.keypoints", *shared]
            return [*begin, "--images", images, "--out", str(tmp_path / out), *more]

        return command

    return made


def run(command: List[str], root: Path, **environment: str) -> None:
    """Run a command, which must succeed."""
    subprocess.run(command, cwd=root, check=True, env={**os.environ, **environment})


@pytest.mark.slow
def test_photographs_give_the_same_bytes_with_workers_and_ranks(
    fetched, shared_data, tmp_path, root
):
    """One worker, two workers, and torchrun with two ranks: equal in every file."""
    photographs = sorted((shared_data / "coco").rglob("*.jpg"))[::5]
    folder = tmp_path / "coco"
    folder.mkdir()
    for number, path in enumerate(photographs):
        (folder / f"{number}.jpg").symlink_to(path)
    command = fetched(folder, **VIEWS)
    run(command("one", "--workers", "1"), root)
    reference = digests(tmp_path / "one")
    stores = [Store(tmp_path / "one" / split, verify="all") for split in ("train", "val")]
    assert sum(len(store) for store in stores) == len(photographs) > 500 and len(reference) > 6
    run(command("two", "--workers", "2"), root)
    assert digests(tmp_path / "two") == reference
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    run(command("ranks", start=torchrun), root, OMP_NUM_THREADS="1")
    assert digests(tmp_path / "ranks") == reference


def peaks(command: List[str], root: Path) -> List[int]:
    """Largest resident memory in KiB of a command and, after it, of its workers, seen while it
    runs.
    """
    process = subprocess.Popen(
        command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    seen: Dict[int, int] = {}
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        with contextlib.suppress(OSError):  # one has ended
            for each in (process.pid, *map(int, children.read_text().split())):
                for peak in re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{each}/status").read_text()):
                    seen[each] = int(peak)
        time.sleep(0.2)
    assert process.returncode == 0
    parent = seen.pop(process.pid)
    return [parent, max(seen.values())]


@pytest.mark.slow
def test_memory_is_flat_from_one_thousand_to_eight_thousand_images(fetched, photo, tmp_path, root):
    """Eight times the images may cost the parent the list of their names, and a worker nothing."""
    small = cv2.imencode(".jpg", photo[:80, :80])[1].tobytes()
    found = {}
    for count in (1_000, 8_000):
        folder = tmp_path / f"{count} images"
        folder.mkdir()
        for index in range(count):
            # bytes after the end make it another photograph
            (folder / f"{index:06d}.jpg").write_bytes(small + str(index).encode())
        command = fetched(folder, views_per_image=2, width=64, height=64)
        found[count] = peaks(command(f"of {count}", "--workers", "2"), root)
        assert len(Store(tmp_path / f"of {count}" / "train", verify="none")) > 0.85 * count
    grown = [many - few for few, many in zip(found[1_000], found[8_000])]
    assert grown[0] < 15 * 1024 and grown[1] < 8 * 1024
