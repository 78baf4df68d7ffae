"""The stage `keypoints` on many images: all the real COCO photographs, and twenty thousand small ones.

Run with -s these print their measurements.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import signal
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
PHOTOGRAPHS, KILLS = 3099, 10


def digests(folder: Path) -> Dict[str, str]:
    """SHA-256 of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def fetched(tmp_path, make_params):
    """`fetched(folder, **views)` fetches a folder without test images; returns the command line of the stage."""
    from ruamel.yaml import YAML

    def made(folder: Path, **views) -> Callable[..., List[str]]:
        held = {"val_fraction": 0.1, "test_fraction": 0.0}
        tree = {
            "fetch": make_params("fetch", source="folder", path=str(folder), **held).model_dump(),
            "keypoints": make_params("keypoints", **views).model_dump(),
        }
        with (tmp_path / f"{folder.name}.yaml").open("w") as stream:
            YAML(typ="safe").dump(file_of(tree), stream)
        shared = ["--params", str(tmp_path / f"{folder.name}.yaml"), "--reports", str(tmp_path / "reports")]
        images = str(tmp_path / f"images of {folder.name}")
        fetch.main([*shared, "--out", images, "--archives", str(tmp_path / "archives")])

        def command(out: str, *more: str, start: tuple = ()) -> List[str]:
            begin = [sys.executable, *start, "-m", "pipeline.keypoints", *shared]
            return [*begin, "--images", images, "--out", str(tmp_path / out), *more]

        return command

    return made


def run(command: List[str], root: Path, **environment: str) -> float:
    """Seconds that a command took; it must succeed."""
    begun = time.monotonic()
    subprocess.run(command, cwd=root, check=True, env={**os.environ, **environment})
    return time.monotonic() - begun


def killed(command: List[str], root: Path, times: List[float]) -> None:
    """Start the command repeatedly; its process group is killed after each of these numbers of seconds."""
    for seconds in times:
        process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        assert process.poll() is None, f"it ended within {seconds:.1f} s, before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_all_photographs_give_the_same_bytes_with_workers_ranks_and_kills(fetched, shared_data, tmp_path, root):
    """One worker, two workers, torchrun with two ranks, and ten times SIGKILL at random: equal in every file."""
    command = fetched(shared_data / "coco", **VIEWS)
    taken = {"one worker": run(command("one", "--workers", "1"), root)}
    reference = digests(tmp_path / "one")
    stores = [Store(tmp_path / "one" / split, verify="all") for split in ("train", "val")]
    assert sum(len(store) for store in stores) == PHOTOGRAPHS and len(reference) > 30
    taken["two workers"] = run(command("two", "--workers", "2"), root)
    assert digests(tmp_path / "two") == reference
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    taken["two ranks"] = run(command("ranks", start=torchrun), root, OMP_NUM_THREADS="1")
    assert digests(tmp_path / "ranks") == reference
    rng, whole = random.Random(0), taken["two workers"]
    again = command("killed", "--workers", "2")
    killed(again, root, [rng.uniform(0.03, 0.11) * whole for _ in range(KILLS)])
    kept = len(list((tmp_path / "killed").rglob("shard-*.safetensors")))
    taken[f"after {KILLS} kills, from {kept} shards"] = run(again, root)
    assert digests(tmp_path / "killed") == reference
    print("\n".join(f"{name}: {seconds:.0f} s" for name, seconds in taken.items()))


def peaks(command: List[str], root: Path) -> List[int]:
    """Largest resident memory in KiB of a command and, after it, of its workers, seen while it runs."""
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
def test_memory_is_flat_from_one_thousand_to_twenty_thousand_images(fetched, photo, tmp_path, root):
    """Twenty times the images may cost the parent the list of their names, and a worker nothing."""
    small = cv2.imencode(".jpg", photo[:80, :80])[1].tobytes()
    (tmp_path / "small.jpg").write_bytes(small)
    found = {}
    for count in (1_000, 20_000):
        folder = tmp_path / f"{count} images"
        folder.mkdir()
        for index in range(count):
            os.link(tmp_path / "small.jpg", folder / f"{index:06d}.jpg")
        command = fetched(folder, views_per_image=2, width=64, height=64)
        found[count] = peaks(command(f"of {count}", "--workers", "2"), root)
        assert len(Store(tmp_path / f"of {count}" / "train", verify="none")) > 0.85 * count
    for count, (parent, worker) in found.items():
        print(f"{count} images: parent {parent / 1024:.0f} MiB, worker {worker / 1024:.0f} MiB")
    grown = [many - few for few, many in zip(found[1_000], found[20_000])]
    assert grown[0] < 40 * 1024 and grown[1] < 8 * 1024
