"""The matrix: the places where a training is killed, and the trainings."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

from made_params import file_of, words_of
from made_views import made_keypoints

from pipeline.parameters import params

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8
TRAIN = {
    "init_from": "",
    "precision": "float32",  # auto would be bfloat16 on some machines
    "batch": 8,
    "steps": STEPS,
    "dim": 16,
    "layers": 1,
    "heads": 2,
    "max_keypoints": 24,
    "warmup_steps": 2,
    "val_pairs": 4,
    "val_every": 2,
    "save_every": 2,
    "log_every": 2,
    "decay_start": 3,
    "keypoint_drop": 0.2,
}
COMPUTING = ("load_batch", "forward", "backward", "opt_step")
SAVING = ("ckpt_fsync", "ckpt_replace", "ckpt_prune")  # the last deletes the oldest of three


class Cell(NamedTuple):
    """One training with one or more faults: the worlds of its starts, SG_FAULT, and changes to its
    parameters.

    environment: variables of its ranks.
    """

    worlds: Tuple[int, ...]
    fault: str
    keys: Tuple[Tuple[str, Any], ...] = ()
    environment: Tuple[Tuple[str, str], ...] = ()


def kills() -> List[Cell]:
    """SIGKILL of every rank at first, early and last steps in every phase: row 4."""
    cells = []
    for world in (1, 2, 4):
        for rank in range(world):
            cells += [
                Cell((world,), f"kill:rank={rank},step={step},phase={phase}")
                for phase in COMPUTING
                for step in (0, 1, 3, STEPS - 1)
            ]
            cells += [
                Cell((world,), f"kill:rank={rank},step={step},phase=eval")
                for step in (1, 3, STEPS - 1)
            ]
        cells += [
            Cell((world,), f"kill:rank=0,step={step},phase={phase}")
            for phase in SAVING
            for step in (5, STEPS - 1)
        ]
    return cells


def repeated() -> List[Cell]:
    """Killed twice or more, also while resuming; with accumulation, batch norm and a moving
    average: row 6.
    """
    twice = (
        "kill:rank=1,step=3,phase=backward;kill:rank=0,step=5,phase=ckpt_replace;"
        "kill:rank=1,step=7,phase=eval"
    )
    resuming = (
        "kill:rank=0,step=4,phase=forward;kill:rank=1,step=4,phase=load_batch;"
        "kill:rank=0,step=4,phase=opt_step"
    )
    options = (
        (("accumulate", 2),), (("norm", "batch"),), (("ema", 0.9),), (("optimizer", "sgd"),),
        (("schedule", "constant_decay"),),
    )  # fmt: skip
    return [Cell((2,), fault, keys) for fault in (twice, resuming) for keys in ((), *options)]


def signals() -> List[Cell]:
    """SIGTERM, SIGINT and SIGUSR1 to one rank, in training, validation and saving: row 7."""
    return [
        Cell((world,), f"{name}:rank={rank},step={step},phase={phase}")
        for world, rank in ((1, 0), (2, 0), (2, 1))
        for name in ("term", "int", "usr1")
        for step, phase in ((0, "forward"), (3, "backward"), (3, "eval"))
    ]


def loaders() -> List[Cell]:
    """Batches from loader processes, as for a GPU: signals to them and their rank, and one of them
    killed.
    """
    places = ((1, 0), (2, 1))
    signalled = (
        ("term", 0, "forward"), ("term", 3, "backward"), ("term", 5, "eval"), ("int", 3, "forward"),
        ("usr1", 4, "opt_step"),
    )  # fmt: skip
    faults = [
        f"group-{name}:rank={{}},step={step},phase={phase}" for name, step, phase in signalled
    ]
    faults += [f"kill:rank={{}},step={step},phase=load_batch" for step in (0, 3, STEPS - 1)]
    processes = (("SG_LOADER_PROCESSES", "2"),)
    return [
        Cell((world,), fault.format(rank), (), processes)
        for world, rank in places
        for fault in faults
    ]


class Workbench:
    """A folder with synthetic views, and the arguments of trainings on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keypoints = made_keypoints(folder / "keypoints")
        self._clean: Dict[tuple, str] = {}

    def arguments(self, keys: Tuple[Tuple[str, Any], ...] = ()) -> List[str]:
        """Command line of pipeline.train, without --out and --reports."""
        section = params.load_all(ROOT / "presets" / "sample.yaml")["train"].model_dump()
        section.update(TRAIN)
        section.update(dict(keys))
        file = self.folder / f"params-{hashlib.sha256(repr(keys).encode()).hexdigest()[:12]}.yaml"
        file.write_text(json.dumps(file_of({"train": section})))  # JSON is YAML
        return ["--keypoints", str(self.keypoints), "--params", str(file), *words_of(section)]

    def clean(self, world: int, keys: Tuple[Tuple[str, Any], ...] = ()) -> str:
        """Digest of the same training without a fault, with `world` ranks."""
        from faults.group import until_done

        if (world, keys) not in self._clean:
            steps = dict(keys).get("steps", STEPS)
            done = until_done(
                self.folder / "clean", self.arguments(keys), [world], "", seconds=60 + steps
            )
            assert done.starts == 1, done
            self._clean[world, keys] = done.digest
        return self._clean[world, keys]
