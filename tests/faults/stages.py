"""The stages under random faults: small work for each, in a separate folder, and the bytes that it
must write.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
from made_params import file_of

from faults.cells import TRAIN
from faults.group import fork, wait
from pipeline.evaluate import __main__ as evaluate
from pipeline.fetch import __main__ as fetch
from pipeline.fetch import coco, download
from pipeline.keypoints import __main__ as keypoints
from pipeline.keypoints import shards
from pipeline.parameters import params
from pipeline.tracking import run, sender
from pipeline.train import __main__ as train
from superglue_sift.apps import cli
from superglue_sift.weights import load_model_file

ROOT = Path(__file__).resolve().parents[2]
PHOTOGRAPHS = 9
SMALL: Dict[str, Dict[str, Any]] = {
    "fetch": {"source": "folder", "path": "photos", "val_fraction": 0.4},
    "keypoints": {"views_per_image": 3, "width": 160, "height": 120, "max_keypoints": 48},
    "train": {**TRAIN, "steps": 10},
    "evaluate": {"width": 160, "height": 120, "pairs_per_image": 3, "max_keypoints": 64},
}  # fmt: skip


class Start(NamedTuple):
    """One process: a command's `main`, its arguments, and its environment."""

    main: Callable[..., int]
    arguments: Tuple[str, ...]
    environment: Tuple[Tuple[str, str], ...] = ()


class Stage(NamedTuple):
    """A command on small inputs. Names of files are shell patterns below its folder.

    ranks: its processes; made: files whose bytes are promised; lasting: those of them that, once
    there, are not made again; read: inputs and what is kept, in which bytes are damaged too.
    """

    name: str
    ranks: Tuple[Start, ...]
    needs: Tuple[str, ...]
    made: Tuple[str, ...]
    lasting: Tuple[str, ...] = ()
    read: Tuple[str, ...] = ()


def _start(main: Callable[..., int], words: str, *environment: Tuple[str, str]) -> Start:
    return Start(main, tuple(words.split()), environment)


STORE = ("keypoints/*/*",)
MODEL = "--model checkpoints/best.safetensors --device cpu"
TRAINING = "--params params.json --keypoints keypoints --out checkpoints --reports reports/train"
WEIGHTS = ("checkpoints/best.safetensors", "checkpoints/*/step-*.safetensors")
IMAGES = ("images/manifest.csv", "images/source.json")


def stages() -> Dict[str, Stage]:
    """All by name."""
    two = [
        _start(
            train.main,
            TRAINING,
            ("RANK", str(rank)),
            ("LOCAL_RANK", str(rank)),
            ("WORLD_SIZE", "2"),
        )
        for rank in range(2)
    ]
    there = TRAINING.replace(" checkpoints", " other/checkpoints").replace(
        " reports", " other/reports"
    )
    nodes = [
        _start(train.main, words, *two[rank].environment)
        for rank, words in enumerate((TRAINING, there))
    ]
    alone = _start(train.main, TRAINING)
    loaders = alone._replace(environment=(("SG_LOADER_PROCESSES", "2"),))
    learn = {"needs": ("keypoints",), "made": WEIGHTS, "read": STORE}
    listed = [
        Stage(
            "fetch",
            (_start(fetch.main, "--params params.json --out images --reports reports/fetch"),),
            ("photos",),
            IMAGES,
        ),
        Stage(
            "download",
            (
                _start(
                    download_main,
                    "--params remote.json --out images --reports reports/fetch --archives archives",
                ),
            ),
            (),
            (*IMAGES, "archives/*.zip"),
            ("archives/*.zip",),
        ),
        Stage(
            "keypoints",
            (
                _start(
                    keypoints_main,
                    "--params params.json --images images --out keypoints "
                    "--reports reports/keypoints --workers 1",
                ),
            ),
            ("photos", "images"),
            STORE,
            ("keypoints/*/shard-*.safetensors",),
            ("photos/*", *IMAGES),
        ),
        Stage("train", (alone,), **learn),
        Stage("train, 2 ranks", tuple(two), **learn),
        Stage("train, loader processes", (loaders,), **learn),
        Stage("train, 2 nodes", tuple(nodes), **learn),
        Stage("train, tracked", (_start(tracked_main, TRAINING),), **learn),
        Stage("launcher", (_start(launcher_main, TRAINING),), **learn),
        Stage(
            "evaluate",
            (
                _start(
                    evaluate.main,
                    f"{MODEL} --params params.json --images images "
                    "--out reports/evaluate --batch 4 --pictures 1",
                ),
            ),
            ("photos", "images", "checkpoints"),
            ("reports/evaluate/pairs.csv", "reports/evaluate/metrics.json"),
            (),
            ("photos/*", *IMAGES, WEIGHTS[0]),
        ),
        Stage(
            "match",
            (_start(cli.main, f"photos --out-dir found {MODEL} --max-keypoints 64 --resize 160"),),
            ("photos", "checkpoints"),
            ("found/*_matches.npz",),
            ("found/*_matches.npz",),
            ("found/features/*", WEIGHTS[0]),
        ),
    ]
    return {stage.name: stage for stage in listed}


def keypoints_main(argv: Sequence[str]) -> int:
    """`keypoints` with one image in a shard; runs in a separate process."""
    shards.SHARD_IMAGES = 1
    return keypoints.main(argv)


def download_main(argv: Sequence[str]) -> int:
    """`fetch` of an archive as COCO's, from the server in remote-archive.json; runs in a separate
    process.
    """
    os.environ[download.MIRROR], *about = json.loads(Path("remote-archive.json").read_text())
    coco.SOURCES["coco2017-val"] = coco.Source(coco.Archive("val2017.zip", *about), None)
    download.sleep = lambda _: None
    return fetch.main(argv)


def tracked_main(argv: Sequence[str]) -> int:
    """`train` with a short wait for a tracking server at its end; runs in a separate process."""
    close = run.Run.close
    run.Run.close = lambda self, status="FINISHED": close(
        self, status, float(os.environ["SG_WAIT"])
    )
    sender.POLL_SECONDS = 0.1
    sender.LONGEST_PAUSE_SECONDS = 0.2
    return train.main(argv)


def launcher_main(argv: Sequence[str]) -> int:
    """This process becomes the launcher as a person starts it, with torchrun and two ranks below
    it.
    """
    store = f"sqlite:///{os.getcwd()}/mlflow.db"
    own = {
        "PYTHONPATH": str(ROOT),
        "NPROC_PER_NODE": "2",
        "OMP_NUM_THREADS": "1",
        "MLFLOW_TRACKING_URI": store,
    }
    words = [sys.executable, "-m", "pipeline.launch", "pipeline.train", *argv]
    os.execve(sys.executable, words, {**os.environ, **own})


def write_photographs(folder: Path) -> int:
    """Real photographs, reduced; in a separate process, since OpenCV starts threads."""
    import cv2
    import numpy as np
    from skimage import data

    folder.mkdir(parents=True)
    taken = [
        getattr(data, name)() for name in ("coffee", "chelsea", "astronaut", "rocket", "camera")
    ]
    for number in range(PHOTOGRAPHS):
        image = taken[number % len(taken)]
        if number >= len(taken):
            image = np.ascontiguousarray(np.rot90(image, 2))
        cv2.imwrite(str(folder / f"{number:03d}.jpg"), cv2.resize(image, (320, 240)))
    return 0


def write_params(folder: Path, **remote: str) -> None:
    """params.json of the small work, and remote.json, the same with these keys of `fetch`."""
    sections = {
        name: section.model_dump()
        for name, section in params.load_all(ROOT / "presets/sample.yaml").items()
    }
    for name, changes in SMALL.items():
        sections[name].update(changes)
    (folder / "params.json").write_text(json.dumps(file_of(sections)))  # JSON is YAML
    sections["fetch"].update(remote)
    (folder / "remote.json").write_text(json.dumps(file_of(sections)))


class Base:
    """The inputs of every stage, computed once by the stages before it, and the outputs of
    undisturbed runs.
    """

    def __init__(self, work: Path, logs: Path) -> None:
        """work: where cells are; logs: where processes print, on another disk."""
        self.work = work
        self.logs = logs
        self.folder = work / "base"
        self.known = stages()
        self.seconds: Dict[str, float] = {}  # of the last undisturbed run of a stage
        self._expected: Dict[str, Dict[str, str]] = {}

    def make(self) -> None:
        """Photographs, their manifest, keypoints, and a trained model."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_params(self.folder)
        self._done(
            fork(
                lambda _: write_photographs(self.folder / "photos"),
                (),
                self.logs / "base",
                self.folder,
            )
        )
        for name in ("fetch", "keypoints", "train"):
            self.run(self.known[name], self.folder)

    def run(self, stage: Stage, folder: Path) -> None:
        """The stage undisturbed. AssertionError when it fails."""
        from faults.random_faults import start

        began = time.monotonic()
        outcome = wait(start(stage, folder, self.logs / "base"), 180)
        self.seconds[stage.name] = time.monotonic() - began
        assert not any(outcome.codes), (
            f"{stage.name}: {outcome}\n{(self.logs / 'base').read_text()[-2000:]}"
        )

    def _done(self, pid: int) -> None:
        assert wait([pid], 600).codes == [0], (self.logs / "base").read_text()[-2000:]

    def cell(self, stage: Stage) -> Path:
        """A fresh folder with the inputs of the stage; always the same place, which results may
        name.
        """
        folder = self.work / "cell"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in (
            *stage.needs,
            "params.json",
            "remote.json",
            "remote-archive.json",
            "mlflow.db",
        ):
            source = self.folder / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("step-*"))
            elif source.is_file():
                shutil.copy2(source, folder / name)
        return folder

    def expected(self, stage: Stage) -> Dict[str, str]:
        """SHA-256 of the stage's files by name; two runs must agree."""
        if stage.name not in self._expected:
            found: List[Dict[str, str]] = []
            for _ in range(2):
                folder = self.cell(stage)
                self.run(stage, folder)
                found.append(digests(folder, stage.made))
            assert found[0] and found[0] == found[1], (
                f"{stage.name}: run twice, other bytes: {differing(*found)}"
            )
            self._expected[stage.name] = found[0]
        return self._expected[stage.name]


def files(folder: Path, patterns: Sequence[str]) -> List[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def finished(path: Path) -> bool:
    """A shard of keypoints is when its note was written behind it, or store.json, which takes the
    notes' place.
    """
    notes = (path.with_suffix(".json"), path.parent / "store.json")
    return not path.name.startswith("shard-") or any(note.is_file() for note in notes)


def same_content(path: Path, good: bytes) -> bool:
    """Whether a damaged result has the same content as the `good` bytes. ValueError: its reader
    refuses it.

    A byte of a zip's dates changes nothing.
    """
    if path.suffix == ".safetensors":
        load_model_file(path)
    if path.suffix != ".npz":
        return path.read_bytes() == good
    try:
        with (
            np.load(path, allow_pickle=False) as one,
            np.load(io.BytesIO(good), allow_pickle=False) as other,
        ):
            return all(np.array_equal(one[name], other[name]) for name in other.files)
    except Exception as error:  # whatever numpy and zipfile raise over other bytes
        raise ValueError(str(error)) from error


def digests(folder: Path, patterns: Sequence[str]) -> Dict[str, str]:
    found = files(folder, patterns)
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
    }


def differing(one: Dict[str, str], other: Dict[str, str]) -> List[str]:
    """Names that only one has, or whose digests differ."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
