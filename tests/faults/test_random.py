"""Random faults: a stage gets a signal at a random moment and is repeated until it succeeds.

Its bytes must then be those of an undisturbed run. `make random-faults N=1000` tries 1,000; a fault
is a function of its number, except for the load of the machine.
"""

import contextlib
import os
import random
import shutil
import signal
import time
from typing import Callable, NamedTuple

import cv2
import psutil
import pytest
from skimage import data

from faults.cells import TRAIN, write_params
from faults.group import start, wait
from pipeline.evaluate import __main__ as evaluate
from pipeline.fetch import __main__ as fetch
from pipeline.keypoints import __main__ as keypoints
from pipeline.keypoints import shards
from pipeline.train import __main__ as train
from pipeline.workers import STOP_SIGNALS
from superglue_sift.apps import cli

COUNT = int(os.environ.get("RANDOM_FAULTS", "3"))
STARTS = 4  # at most, after the fault
SMALL = {
    "fetch": {"source": "folder", "path": "photos", "val_fraction": 0.4},
    "keypoints": {"views_per_image": 3, "width": 160, "height": 120, "max_keypoints": 48},
    "train": {**TRAIN, "steps": 10},
    "evaluate": {"width": 160, "height": 120, "pairs_per_image": 3, "max_keypoints": 64},
}


class Stage(NamedTuple):
    """A command on small inputs; names of files are shell patterns below its folder, in one text.

    outputs: files whose bytes are promised; reused: those of them that are not made again once
    they are there.
    """

    main: Callable[..., int]
    words: str
    needs: str
    outputs: str
    reused: str = ""
    ranks: int = 1
    loaders: str = "0"


def extract(argv):
    """`keypoints` with one image in a shard."""
    shards.SHARD_IMAGES = 1
    return keypoints.main(argv)


BEST = "checkpoints/best.safetensors"
LEARN = Stage(
    train.main,
    "--params params.json --keypoints keypoints --out checkpoints --reports reports/train",
    "keypoints",
    f"{BEST} checkpoints/*/step-00000010.safetensors",  # a stop saves in between
)
STAGES = [
    Stage(
        fetch.main,
        "--params params.json --out images --reports reports/fetch",
        "photos",
        "images/manifest.csv images/source.json",
    ),
    Stage(
        extract,
        "--params params.json --images images --out keypoints --workers 1",
        "photos images",
        "keypoints/*/*",
        "keypoints/*/shard-*.safetensors",
    ),
    LEARN,
    LEARN._replace(ranks=2),
    LEARN._replace(loaders="2"),
    Stage(
        evaluate.main,
        f"--model {BEST} --device cpu --params params.json --images images",
        "photos images checkpoints",
        "reports/evaluate/pairs.csv reports/evaluate/metrics.json",
    ),
    Stage(
        cli.main,
        f"folder photos --out-dir results --model {BEST} --device cpu --max-keypoints 64"
        " --resize 160",
        "photos checkpoints",
        "results/*_matches.npz",
        "results/*_matches.npz",
    ),
]


class Base:
    """Inputs of every stage, made by those before it; bytes and seconds of undisturbed runs."""

    def __init__(self, folder):
        self.folder = folder
        self.log = folder / "log"
        self.seconds = {}
        self.expected = {}
        base = folder / "base"
        (base / "photos").mkdir(parents=True)
        names = "coffee chelsea astronaut rocket camera brick grass gravel"
        for name in names.split():
            image = cv2.resize(getattr(data, name)(), (320, 240))
            cv2.imwrite(str(base / "photos" / f"{name}.jpg"), image)
        write_params(base / "params.json", **SMALL)
        for number, stage in enumerate(STAGES):
            # the first three make what the others need
            stage_folder = base if number < 3 else self.make_folder(stage)
            begin = time.monotonic()
            assert not any(wait(self.start(stage, stage_folder))), self.log.read_text()
            self.seconds[stage] = time.monotonic() - begin
            self.expected[stage] = read_outputs(stage_folder, stage.outputs)

    def start(self, stage, folder):
        words = stage.words.split()
        loaders = {"SG_LOADER_PROCESSES": stage.loaders}
        return start(stage.ranks, stage.main, words, self.log, folder, **loaders)

    def make_folder(self, stage):
        """A folder with the inputs of the stage; always the same place, which results may name."""
        folder = self.folder / "cell"
        shutil.rmtree(folder, ignore_errors=True)
        for name in stage.needs.split():
            old = shutil.ignore_patterns("step-*")
            shutil.copytree(self.folder / "base" / name, folder / name, ignore=old)
        shutil.copy2(self.folder / "base/params.json", folder)
        return folder


def list_family(pid):
    """A process and all below it."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def read_outputs(folder, patterns):
    """Bytes of files by path below the folder."""
    paths = (path for pattern in patterns.split() for path in folder.glob(pattern))
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def is_finished(path):
    """A shard is, when its note was written behind it, or store.json in place of the notes."""
    notes = (path.with_suffix(".json"), path.parent / "store.json")
    return not path.name.startswith("shard-") or any(note.is_file() for note in notes)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return Base(tmp_path_factory.mktemp("random"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT))
def test_a_stage_that_gets_a_signal_ends_with_the_same_bytes(base, seed):
    draw = random.Random(seed)
    stage = draw.choice(STAGES)
    number = draw.choice([signal.SIGKILL, draw.choice(STOP_SIGNALS)])
    folder = base.make_folder(stage)
    base.log.write_text("")
    processes = base.start(stage, folder)
    time.sleep(draw.random() * base.seconds[stage])
    ranks = [process for process in processes if process.is_alive()]
    running = [child for rank in ranks for child in list_family(rank.pid)]
    in_steps = "pairs a step" in base.log.read_text()
    if number == signal.SIGKILL:
        victims = draw.sample(running, min(len(running), 1))
    else:  # to one rank, or to all processes, those that were started last first
        victims = draw.choice((running[:1], running[::-1]))
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    codes = wait(processes)
    assert not psutil.wait_procs(running, 60)[1], "a process outlives its parent"
    if number != signal.SIGKILL:
        assert "Traceback" not in base.log.read_text()
        if in_steps and any(codes):
            assert set(codes) <= {0, 143} and list(folder.glob("checkpoints/*/step-*.safetensors"))
    # what is right must not be computed again
    expected = base.expected[stage]
    right = read_outputs(folder, stage.reused).items() & expected.items()
    finished = [folder / name for name, _ in right if is_finished(folder / name)]
    times = [path.stat().st_mtime_ns for path in finished]
    starts = (wait(base.start(stage, folder)) for _ in range(STARTS))
    assert any(not any(codes) for codes in starts), base.log.read_text()
    assert read_outputs(folder, stage.outputs) == expected
    assert [path.stat().st_mtime_ns for path in finished] == times
