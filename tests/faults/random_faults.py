"""Random faults: a stage is disturbed once, repeated until it succeeds, and its bytes compared.

A cell is a function of the seed and its number, except for the load of the machine.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import cv2
import numpy as np
import psutil
from made_params import file_of
from skimage import data

from faults.cells import ROOT, TRAIN
from faults.group import Outcome, start, wait
from pipeline.evaluate import __main__ as evaluate
from pipeline.fetch import __main__ as fetch
from pipeline.keypoints import __main__ as keypoints
from pipeline.keypoints import shards
from pipeline.parameters import params
from pipeline.processes.signals import STOP_SIGNALS
from pipeline.train import __main__ as train
from superglue_sift.apps import cli
from superglue_sift.files import DAMAGED
from superglue_sift.weights import BadCheckpoint, load_model_file

STARTS = 4  # at most, after the fault
SMALL: Dict[str, Dict[str, Any]] = {
    "fetch": {"source": "folder", "path": "photos", "val_fraction": 0.4},
    "keypoints": {"views_per_image": 3, "width": 160, "height": 120, "max_keypoints": 48},
    "train": {**TRAIN, "steps": 10},
    "evaluate": {"width": 160, "height": 120, "pairs_per_image": 3, "max_keypoints": 64},
}


class Stage(NamedTuple):
    """A command on small inputs; names of files are shell patterns below its folder.

    made: files whose bytes are promised; kept: those of them that are not made again once they are
    there; read: inputs and caches, in which bytes are damaged too.
    """

    main: Callable[..., int]
    words: str
    needs: Tuple[str, ...]
    made: Tuple[str, ...]
    kept: Tuple[str, ...] = ()
    read: Tuple[str, ...] = ()
    ranks: int = 1
    loaders: str = "0"


def extract(argv: Sequence[str]) -> int:
    """`keypoints` with one image in a shard."""
    shards.SHARD_IMAGES = 1
    return keypoints.main(argv)


PHOTOS = ("photos/*", "images/*")
STORE = ("keypoints/*/*",)
BEST = "checkpoints/best.safetensors"
LEARN = Stage(
    train.main,
    "--params params.json --keypoints keypoints --out checkpoints --reports reports/train",
    ("keypoints",),
    (BEST, "checkpoints/*/step-*.safetensors"),
    (),
    STORE,
)
STAGES = {
    "fetch": Stage(
        fetch.main,
        "--params params.json --out images --reports reports/fetch",
        ("photos",),
        ("images/manifest.csv", "images/source.json"),
    ),
    "keypoints": Stage(
        extract,
        "--params params.json --images images --out keypoints --workers 1",
        ("photos", "images"),
        STORE,
        ("keypoints/*/shard-*.safetensors",),
        PHOTOS,
    ),
    "train": LEARN,
    "train, 2 ranks": LEARN._replace(ranks=2),
    "train, loader processes": LEARN._replace(loaders="2"),
    "evaluate": Stage(
        evaluate.main,
        f"--model {BEST} --device cpu --params params.json --images images",
        ("photos", "images", "checkpoints"),
        ("reports/evaluate/pairs.csv", "reports/evaluate/metrics.json"),
        (),
        (*PHOTOS, BEST),
    ),
    "match": Stage(
        cli.main,
        f"photos --out-dir found --model {BEST} --device cpu --max-keypoints 64 --resize 160",
        ("photos", "checkpoints"),
        ("found/*_matches.npz",),
        ("found/*_matches.npz",),
        ("found/features/*", BEST),
    ),
}


class Base:
    """Inputs of every stage, made by those before it; bytes and seconds of undisturbed runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.stages = dict(STAGES)
        self.seconds: Dict[str, float] = {}
        self.expected: Dict[str, Dict[str, str]] = {}
        base = folder / "base"
        (base / "photos").mkdir(parents=True)
        names = ("coffee", "chelsea", "astronaut", "rocket", "camera", "brick", "grass", "gravel")
        for name in names:
            image = cv2.resize(getattr(data, name)(), (320, 240))
            cv2.imwrite(str(base / "photos" / f"{name}.jpg"), image)
        read = params.load_all(ROOT / "presets/sample.yaml")
        sections = {name: {**read[name].model_dump(), **SMALL.get(name, {})} for name in read}
        (base / "params.json").write_text(json.dumps(file_of(sections)))  # JSON is YAML
        for name, stage in self.stages.items():
            self.know(name, base if name in ("fetch", "keypoints", "train") else self.fresh(stage))

    def know(self, name: str, folder: Path) -> None:
        began = time.monotonic()
        outcome = wait(self.start(name, folder))
        assert outcome == Outcome([0] * self.stages[name].ranks, False), self.log.read_text()
        self.seconds[name] = time.monotonic() - began
        self.expected[name] = digests(folder, self.stages[name].made)

    def start(self, name: str, folder: Path, **environment: str) -> List[Any]:
        stage = self.stages[name]
        environment["SG_LOADER_PROCESSES"] = stage.loaders
        return start(stage.ranks, stage.main, stage.words.split(), self.log, folder, **environment)

    def fresh(self, stage: Stage) -> Path:
        """A folder with the inputs of the stage; always the same place, which results may name."""
        folder = self.folder / "cell"
        shutil.rmtree(folder, ignore_errors=True)
        for name in stage.needs:
            old = shutil.ignore_patterns("step-*")
            shutil.copytree(self.folder / "base" / name, folder / name, ignore=old)
        shutil.copy2(self.folder / "base" / "params.json", folder)
        return folder


class Cell:
    """A stage in its folder, and the broken promises so far."""

    def __init__(self, base: Base, name: str, draw: random.Random) -> None:
        self.base = base
        self.name = name
        self.stage = base.stages[name]
        self.draw = draw
        self.folder = base.fresh(self.stage)
        self.problems: List[str] = []
        base.log.write_text("")

    def said(self) -> str:
        return self.base.log.read_text(errors="replace")

    def start(self, **environment: str) -> List[Any]:
        return self.base.start(self.name, self.folder, **environment)

    def wait(self, processes: List[Any]) -> List[int]:
        outcome = wait(processes)
        if outcome.hung:
            self.problems.append("hangs")
        return outcome.codes

    def no_traceback(self) -> None:
        if "Traceback" in self.said():
            self.problems.append(f"a traceback: {self.said().strip().splitlines()[-1]}")

    def wrong(self) -> List[str]:
        """Files that differ from those of an undisturbed run, or that only one of both has."""
        found = digests(self.folder, self.stage.made)
        expected = self.base.expected[self.name]
        return sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))

    def interrupt(self, send: Callable[[List[Any]], None]) -> bool:
        """Start the stage, and `send` to its processes at a random moment; False: it had ended."""
        processes = self.start()
        time.sleep(self.draw.random() * self.base.seconds[self.name])
        there = [child for each in processes if each.is_alive() for child in family(each.pid)]
        if there:
            send(there)
        self.codes = self.wait(processes)
        _, left = psutil.wait_procs(there, 60)
        self.problems += [f"process {each.pid} outlives its parent" for each in left]
        return bool(there) and any(self.codes)

    def finish(self) -> None:
        """Repeat the command until it ends with 0; what is right must not be computed again."""
        expected = self.base.expected[self.name].items()
        right = digests(self.folder, self.stage.kept).items() & expected
        kept = [self.folder / name for name, _ in right if is_finished(self.folder / name)]
        stamps = [path.stat().st_mtime_ns for path in kept]
        if not any(not any(self.wait(self.start())) for _ in range(STARTS)):
            self.problems.append(f"no success after {STARTS} more starts: {self.said()[-200:]}")
        elif self.wrong():
            self.problems.append(f"other bytes: {', '.join(self.wrong())}")
        if stamps != [path.stat().st_mtime_ns for path in kept if path.exists()]:
            self.problems.append("computed again although intact")


def family(pid: int) -> List[psutil.Process]:
    """A process and all below it."""
    try:
        own = psutil.Process(pid)
        return [own, *own.children(recursive=True)]
    except psutil.Error:
        return []


def digests(folder: Path, patterns: Sequence[str]) -> Dict[str, str]:
    """SHA-256 of files by name."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for pattern in patterns
        for path in folder.glob(pattern)
    }


def is_finished(path: Path) -> bool:
    """A shard is, when its note was written behind it, or store.json in place of the notes."""
    notes = (path.with_suffix(".json"), path.parent / "store.json")
    return not path.name.startswith("shard-") or any(note.is_file() for note in notes)


def kill(cell: Cell) -> bool:
    """SIGKILL of any process at any moment: the same bytes, nothing computed twice"""
    return cell.interrupt(lambda there: cell.draw.choice(there).kill())


def stop(cell: Cell) -> bool:
    """SIGTERM, SIGINT or SIGUSR1: a training saves and exits with 143; no traceback"""
    number = cell.draw.choice(STOP_SIGNALS)
    in_steps: List[bool] = []

    def send(there: List[psutil.Process]) -> None:
        in_steps.append("pairs a step" in cell.said())
        # to one rank, or to all processes, those that were started last first
        for each in there[::-1] if cell.draw.random() < 0.5 else there[:1]:
            if each.is_running():
                each.send_signal(number)

    struck = cell.interrupt(send)
    cell.no_traceback()
    if struck and in_steps[0]:
        saved = list(cell.folder.glob("checkpoints/*/step-*.safetensors"))
        if not saved or not {0, 143} >= set(cell.codes):
            cell.problems.append(f"{number.name}: ended with {cell.codes}, {len(saved)} saved")
    return struck


def fill(cell: Cell) -> bool:
    """a full disk: one message names it, no traceback; with free space again, the same bytes"""
    struck = any(cell.wait(cell.start(SG_FULL=str(cell.draw.randrange(1, 10)))))
    cell.no_traceback()
    if struck and "No space left" not in cell.said():
        cell.problems.append(f"the message does not name the disk: {cell.said()[-200:]}")
    return struck


def damage(cell: Cell) -> bool:
    """a truncated or altered file: named or computed again, never used silently"""
    files = (*cell.stage.read, *cell.stage.made)
    ended = not cell.interrupt(lambda there: there[0].kill())
    if ended or not digests(cell.folder, files):  # killed before there was a file to damage
        cell.wait(cell.start())
    inputs = digests(cell.folder, cell.stage.read)
    name = cell.draw.choice(sorted(digests(cell.folder, files)))
    victim = cell.folder / name
    if not victim.stat().st_size:
        return False
    write_damaged(victim, cell.draw)
    before = len(cell.said())
    codes = cell.wait(cell.start())
    lists = [path.read_text() for path in cell.folder.glob("reports/*/*.csv")]
    said = "\n".join((cell.said()[before:], *lists))
    cell.no_traceback()
    wrong = [each for each in cell.wrong() if each != name or is_readable(victim)]
    named = victim.stem in said
    if (any(codes) or wrong) and not named:
        cell.problems.append(f"{name} is damaged, and no message names it")
    if name in inputs:  # the user restores it, and removes what was made from it
        cell.folder = cell.base.fresh(cell.stage)
    elif any(codes) or cell.wrong():
        victim.unlink(missing_ok=True)
    return True


def write_damaged(path: Path, draw: random.Random) -> None:
    """Flip one bit, truncate the file, or zero a part of it."""
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    how = draw.choice(("flip", "truncate", "zero"))
    if how == "truncate":
        del content[at:]
    elif how == "zero" and any(content[at : at + 512]):
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    else:
        content[at] ^= 1 << draw.randrange(8)
    path.unlink()  # not through a link into somebody's cache
    path.write_bytes(content)


def is_readable(path: Path) -> bool:
    """Whether its reader takes the damaged file for a good one."""
    try:
        if path.suffix == ".safetensors":
            load_model_file(path)
        elif path.suffix == ".npz":
            with np.load(path) as file:
                [file[name] for name in file.files]
    except (*DAMAGED, BadCheckpoint):
        return False
    return True


FAULTS = {"kill": kill, "signal": stop, "disk": fill, "damage": damage}


def run(base: Base, seed: int, number: int) -> Dict[str, Any]:
    """Run one cell; its result."""
    draw = random.Random(f"{seed} {number}")
    kind = draw.choice(list(FAULTS))
    name = draw.choice(list(STAGES))
    cell = Cell(base, name, draw)
    struck = FAULTS[kind](cell)
    cell.finish()
    found = {"seed": seed, "number": number, "kind": kind, "stage": name}
    return {**found, "struck": struck, "problems": cell.problems}
