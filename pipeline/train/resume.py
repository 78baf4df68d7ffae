"""Resuming: from the newest checkpoint, from one that was set aside, or from scratch.

Nothing here can change a weight: it moves files, compares fingerprints and prints messages. One rank does so for each
folder of checkpoints, and all ranks resume from the checkpoint of most steps. Checkpoints of another training are set
aside (`superseded`) and moved back when they fit again.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional

from pipeline.errors import RequestError
from pipeline.parameters.params import flag
from pipeline.parameters.schema import TrainOptions
from pipeline.processes import distributed
from pipeline.train import replicas, superseded
from pipeline.train.checkpoint import Checkpoints
from pipeline.train.identity import Fingerprint, fingerprint_of, misfits, steps_done
from pipeline.train.replicas import Saved, Writes
from pipeline.train.superseded import SUPERSEDED, read

AUTO, MUST, NEVER = "auto", "must", "never"
CURVES = ("train.csv", "validation.csv")


@dataclasses.dataclass(frozen=True)
class TrainPaths:
    """Paths on the command line of a training, and what it may resume from."""

    keypoints: Path = Path("data/keypoints")
    out: Path = Path("checkpoints")
    reports: Path = Path("reports/train")
    params: Path = Path("params.yaml")
    resume: str = AUTO
    keep_seen: bool = False  # validate also on photographs that the initial weights were trained on
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the `TrainOptions` given

    def command(self, place: Path) -> str:
        """The command that resumes the training set aside in `place`."""
        words = ["python", "-m", "pipeline.launch", "pipeline.train"]
        for name in ("keypoints", "out", "reports", "params"):
            given = getattr(self, name)
            words += [f"--{name}", str(given)] if given != getattr(TrainPaths, name) else []
        words += [word for name, value in self.options.items() for word in flag(name, value).split()]
        words += ["--resume", str(place)]
        return " ".join(shlex.quote(word) for word in words)


def check(paths: TrainPaths) -> None:
    """Before any process starts: RequestError if --resume names no training."""
    place = Path(paths.resume)
    several = os.environ.get("NNODES", "1") != "1"  # the folder may be on another node: `prepare` asks all
    named = paths.resume not in (AUTO, MUST, NEVER) and not several
    if named and not _holds_a_training(place) and not _was_moved_back(paths, place):
        raise RequestError(
            f"--resume {paths.resume}: no checkpoints there; give {AUTO}, {MUST}, {NEVER}, or a folder in "
            f"{paths.out / SUPERSEDED}"
        )


class Start(NamedTuple):
    """How a training starts. saved: the checkpoint to resume from, on every rank; None: from scratch."""

    finished: bool
    saved: Optional[Saved] = None


def agree(ours: Fingerprint, is_main: bool) -> None:
    """RequestError on rank 0 if another rank has other parameters or data; the others exit silently."""
    disagreement = replicas.disagreement(ours)
    _refuse(
        f"{disagreement}; give every node the same parameters, keypoints and code" if disagreement and is_main else ""
    )


def prepare(paths: TrainPaths, ours: Fingerprint, writes: Writes, is_main: bool) -> Start:
    """Leave in `paths.out` what this training resumes from, or nothing; all ranks take the checkpoint of most steps.

    Raises RequestError on one rank if --resume asks for a checkpoint that does not fit; the others exit silently.
    """
    work = _Resume(paths, ours, writes.curves, is_main, restarted=distributed.any_rank(_restarted)())
    finished, saved, refusal = False, None, ""
    if writes.checkpoints:
        try:
            finished = work.prepare()
            saved = Checkpoints(paths.out).load_newest()[0]
        except RequestError as error:
            refusal = str(error)
    _refuse(refusal)
    if is_main and superseded.places(paths.out):
        print(superseded.summary(paths.out))
    if distributed.broadcast(finished):
        return Start(True)
    source = replicas.furthest(saved[1]["step"] if saved else -1)
    if source is None:
        asked = paths.resume not in (AUTO, NEVER)
        _refuse(f"{paths.out}: cannot resume: no checkpoint" if asked and is_main else "")
        return Start(False)
    newest = replicas.shared(saved, source)
    if writes.checkpoints and not (saved and saved[1]["step"] == newest[1]["step"]):
        Checkpoints(paths.out).save(newest[1]["step"], *newest)  # a node with a folder of its own that lacks it
    return Start(False, newest)


def _refuse(refusal: str) -> None:
    """End all ranks if one has a reason, which RequestError reports there."""
    refusals = distributed.all_gather(refusal)
    if refusal:
        raise RequestError(refusal)
    if any(refusals):
        raise SystemExit(2)


class Fit(NamedTuple):
    """How the training in a folder fits: keys that do not (none: it fits), a text for each, whether it is finished."""

    keys: List[str]
    reasons: List[str]
    finished: bool = False


EMPTY = Fit(["nothing"], ["no checkpoint"])


class _Resume:
    """Prepares one folder, on the rank that writes there.

    curves: whether it writes the curves, too, which move with their checkpoints.
    """

    def __init__(self, paths: TrainPaths, ours: Fingerprint, curves: bool, is_main: bool, restarted: bool) -> None:
        self.paths, self.ours, self.out = paths, ours, paths.out
        self.curves, self.moves_curves = paths.reports / "curves", curves
        self.is_main, self.restarted = is_main, restarted

    def prepare(self) -> bool:
        """Prepare the folder. Returns whether its training is finished."""
        how = self.paths.resume
        if how == NEVER and not self.restarted:
            self._make_room(Fit([f"resume-{NEVER}"], ["--resume never"]))
            return False
        place = Path(how)
        if how not in (AUTO, MUST, NEVER) and _holds_a_training(place):
            fit = self._named(place)
        else:
            fit = self._inspect(self.out)
            if fit.keys:
                fit = self._from_superseded(fit)
        best = read(self.out / "best.safetensors")
        if not fit.finished and not fit.keys and best and self._misfits(best):
            # `dvc checkout` may have put another training's best model next to our checkpoints
            self._set_aside("best-of-another", best_alone=True)
        return fit.finished

    def _named(self, place: Path) -> Fit:
        """Move back the folder that --resume names. Raises RequestError if it does not fit."""
        fit = self._inspect(place)
        if fit.keys:
            raise RequestError(f"--resume {place}: {'; '.join(fit.reasons)}{_fix(fit.keys)}")
        self._make_room(Fit(["resume"], [f"--resume {place}"]), spare=place)
        self._move_back(place)
        return fit

    def _from_superseded(self, misfit: Fit) -> Fit:
        """Move back the training of most steps that fits; without one make room to start from scratch."""
        for place in sorted(superseded.places(self.out), key=lambda place: -place.steps):
            fit = self._inspect(place.path)
            if not fit.keys:
                self._make_room(misfit, spare=place.path)
                self._move_back(place.path)
                print(f"{place.path} fits: its training is resumed")
                return fit
        strict = self.paths.resume == MUST or (self.paths.resume not in (AUTO, NEVER) and self.is_main)
        if strict and misfit != EMPTY:
            raise RequestError(f"{self.out}: cannot resume: {'; '.join(misfit.reasons)}{_fix(misfit.keys)}")
        self._make_room(misfit)
        return misfit

    def _inspect(self, folder: Path) -> Fit:
        """How the training in a folder fits."""
        best = read(folder / "best.safetensors")
        curves = self.curves if folder == self.out else folder / "curves"
        whole = all((curves / name).is_file() for name in CURVES)
        as_long = best and best.get("finished") and best["train"]["steps"] == self.ours["train.steps"]
        if best and as_long and whole and not self._misfits(best):
            return Fit([], [], finished=True)
        newest, warnings = Checkpoints(folder).load_newest()
        for warning in warnings:
            print(f"warning: {warning}; {'the previous one is used' if newest else 'there is no other'}")
        info = newest[1] if newest else best
        if not info:
            return Fit(["damaged"], warnings) if warnings else EMPTY
        saved, keys = fingerprint_of(info), self._misfits(info)
        if not newest and not keys:
            return Fit(["best-alone"], ["a best model without a checkpoint"])
        return Fit(keys, [f"{key}: {saved.get(key)} in the checkpoint, {self.ours.get(key)} now" for key in keys])

    def _misfits(self, info: Dict[str, Any]) -> List[str]:
        return misfits(fingerprint_of(info), self.ours, steps_done(info))

    def _make_room(self, why: Fit, spare: Optional[Path] = None) -> None:
        """Set aside what is there. Prints what lies where and the command that resumes it."""
        best, newest = read(self.out / "best.safetensors"), Checkpoints(self.out).load_newest()[0]
        if best and newest and misfits(fingerprint_of(best), fingerprint_of(newest[1]), steps_done(best)):
            self._set_aside("best-of-another", best_alone=True)
        keys = why.keys if len(why.keys) < 3 else [why.keys[0], f"and-{len(why.keys) - 1}-more"]
        place = self._set_aside("-".join(keys))
        if place is None:
            return
        line = f"{self.out} held another training ({'; '.join(why.reasons)}). It is set aside in {place}. "
        saved = newest[1] if newest else best if best and best.get("finished") else None
        if saved:
            first = _first(why.keys, fingerprint_of(saved))
            line += f"To resume it{first}: {self.paths.command(place)}"
        else:
            line += "It has no checkpoint to resume from."
        print(line)
        superseded.apply_limit(self.out, self.ours["train.superseded_gb"], (place, spare))

    def _set_aside(self, reason: str, best_alone: bool = False) -> Optional[Path]:
        """Move checkpoints, best model and curves to a new folder. Returns it; None if there is nothing to move.

        reason: a part of its name. best_alone: the checkpoints stay, since they are another training's. A kill in
        between loses no file.
        """
        steps = [] if best_alone else list(self.out.glob("step-*"))
        best = list(self.out.glob("best.*"))
        if not steps and not best:
            return None
        name, number = f"{time.strftime('%Y-%m-%d-%H%M%S', time.gmtime())}-{reason}", 1
        place = self.out / SUPERSEDED / name
        while place.exists():
            number += 1
            place = place.with_name(f"{name}-{number}")
        if self.moves_curves:
            _move(self.curves.glob("*.csv"), place / "curves")
        _move((*best, *steps), place)
        return place

    def _move_back(self, place: Path) -> None:
        """Move the files of `place` back to `out`, which must be empty; the newest checkpoint last."""
        if self.moves_curves:
            _move((place / "curves").glob("*.csv"), self.curves)
        _move((*place.glob("best.*"), *place.glob("step-*")), self.out)
        for folder in (place / "curves", place):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def _move(files: Iterable[Path], folder: Path) -> None:
    """Move files in the order of their names: the newest checkpoint last."""
    for file in sorted(files):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(str(file), str(folder / file.name))


def _first(keys: List[str], saved: Fingerprint) -> str:
    """What to do before the command that resumes a training."""
    named = {key.partition(".")[2]: saved.get(key) for key in keys if key.startswith("train.")}
    changes = [f"train.{name}: {value}" for name, value in named.items() if name not in TrainOptions.model_fields]
    options = [flag(name, value) for name, value in named.items() if name in TrainOptions.model_fields]
    words = [f"set {', '.join(changes)} in params.yaml"] if changes else []
    words += [f"give {' '.join(options)} in TRAIN_OPTIONS"] if options else []
    words += ["restore the keypoints it was trained on"] if "data" in keys else []
    words += ["use as many processes"] if "world_size" in keys else []
    return f", {' and '.join(words)} and run" if words else ""


def _fix(keys: List[str]) -> str:
    return "; make them equal again to resume" if EMPTY.keys != keys else ""


def _restarted() -> bool:
    """Whether the launcher or torchrun restarted us after a lost rank: then `never` has taken effect already."""
    return "SG_RESTARTED" in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _holds_a_training(place: Path) -> bool:
    return any(place.glob("*.safetensors"))


def _was_moved_back(paths: TrainPaths, place: Path) -> bool:
    """Whether the folder's files are in `paths.out` by now: the same command again, or a restart after a lost rank."""
    return place.resolve().parent == (paths.out / SUPERSEDED).resolve() and _holds_a_training(paths.out)
