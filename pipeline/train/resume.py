"""What a training goes on from: its newest checkpoint, one that was set aside, or nothing.

Nothing here can change a weight: it moves files, compares fingerprints and says what it did. In each folder of
checkpoints one rank does so, and all go on from the one of most steps. Checkpoints whose place another training takes
are set aside (`superseded`) and brought back when they fit again.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from pipeline.errors import RequestError
from pipeline.parameters.old_keys import flag
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
    """What the command line of a training names: where it reads and writes, and what it may go on from."""

    keypoints: Path = Path("data/keypoints")
    out: Path = Path("checkpoints")
    reports: Path = Path("reports/train")
    params: Path = Path("params.yaml")
    resume: str = AUTO
    accept: Tuple[str, ...] = ()  # keys of the fingerprint that may differ
    keep_seen: bool = False  # validate also on photographs that the initial weights were trained on
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of `TrainOptions`, those given

    def command(self, place: Path, accept: Sequence[str]) -> str:
        """The command that takes up again what is set aside in `place`."""
        words = ["python", "-m", "pipeline.launch", "pipeline.train"]
        for name in ("keypoints", "out", "reports", "params"):
            given = getattr(self, name)
            words += [f"--{name}", str(given)] if given != getattr(TrainPaths, name) else []
        words += [word for name, value in self.options.items() for word in flag(name, value).split()]
        words += ["--resume", str(place)]
        for key in accept:
            words += ["--accept", key]
        return " ".join(shlex.quote(word) for word in words)


def check(paths: TrainPaths) -> None:
    """Before any process starts. RequestError when --resume names no folder."""
    place = Path(paths.resume)
    several = os.environ.get("NNODES", "1") != "1"  # the folder may be on another node: `prepare` asks all
    named = paths.resume not in (AUTO, MUST, NEVER) and not several
    if named and not _holds_a_training(place) and not _was_taken_up(paths, place):
        raise RequestError(
            f"--resume {paths.resume}: no checkpoints there; give {AUTO}, {MUST}, {NEVER}, or a folder in "
            f"{paths.out / SUPERSEDED}"
        )


class Start(NamedTuple):
    """What a training begins with. saved: the checkpoint to go on from, on every rank; None: it begins."""

    finished: bool
    saved: Optional[Saved] = None


def agree(ours: Fingerprint, is_main: bool) -> None:
    """RequestError on rank 0 where another rank has other parameters, data or code; the others end in silence."""
    disagreement = replicas.disagreement(ours)
    _refuse(
        f"{disagreement}; give every node the same parameters, keypoints and code" if disagreement and is_main else ""
    )


def prepare(paths: TrainPaths, ours: Fingerprint, writes: Writes, is_main: bool) -> Start:
    """Leave in `paths.out` what this training goes on from, or nothing; of several folders all ranks take the furthest.

    Raises RequestError, on one rank: --resume asks for a checkpoint that does not fit. The others end in silence.
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
        Checkpoints(paths.out).save(newest[1]["step"], *newest)  # a node that has a folder of its own, and lacks it
    return Start(False, newest)


def _refuse(refusal: str) -> None:
    """End all ranks when one has a reason: there RequestError says it."""
    refusals = distributed.all_gather(refusal)
    if refusal:
        raise RequestError(refusal)
    if any(refusals):
        raise SystemExit(2)


class _Found(NamedTuple):
    """What lies in a folder: the keys that do not fit (none: it does), each as a text; is the training finished."""

    keys: List[str]
    reasons: List[str]
    finished: bool = False


NOTHING = _Found(["nothing"], ["no checkpoint"])


class _Resume:
    """The decision about one folder, on the rank that writes there.

    curves: does it write the curves too? They go with their checkpoints.
    """

    def __init__(self, paths: TrainPaths, ours: Fingerprint, curves: bool, is_main: bool, restarted: bool) -> None:
        self.paths, self.ours, self.out = paths, ours, paths.out
        self.curves, self.moves_curves = paths.reports / "curves", curves
        self.is_main, self.restarted = is_main, restarted

    def prepare(self) -> bool:
        """Is the training that is left there finished?"""
        how = self.paths.resume
        if how == NEVER and not self.restarted:
            self._make_room(_Found([f"resume-{NEVER}"], ["--resume never"]))
            return False
        place = Path(how)
        if how not in (AUTO, MUST, NEVER) and _holds_a_training(place):
            found = self._asked_for(place)
        else:
            found = self._look(self.out)
            if found.keys:
                found = self._from_those_set_aside(found)
        best = read(self.out / "best.safetensors")
        if not found.finished and not found.keys and best and self._misfits(best):
            # `dvc checkout` may have put another training's best model beside our checkpoints
            self._set_aside("best-of-another", best_alone=True)
        return found.finished

    def _asked_for(self, place: Path) -> _Found:
        """Bring back the folder that --resume names. RequestError when it does not fit."""
        found = self._look(place)
        if found.keys:
            raise RequestError(f"--resume {place}: {'; '.join(found.reasons)}{_fix(found.keys)}")
        self._make_room(_Found(["resume"], [f"--resume {place}"]), spare=place)
        self._bring_back(place)
        return found

    def _from_those_set_aside(self, misfit: _Found) -> _Found:
        """Bring back what was set aside and fits, of several the one of most steps; else make room to begin."""
        fitting = [
            (place, found)
            for place in sorted(superseded.places(self.out), key=lambda place: -place.steps)
            for found in [self._look(place.path)]
            if not found.keys
        ]
        if fitting:
            place, found = fitting[0]
            self._make_room(misfit, spare=place.path)
            self._bring_back(place.path)
            print(f"{place.path} fits: its training is taken up again")
            return found
        strict = self.paths.resume == MUST or (self.paths.resume not in (AUTO, NEVER) and self.is_main)
        if strict and misfit != NOTHING:
            raise RequestError(f"{self.out}: cannot resume: {'; '.join(misfit.reasons)}{_fix(misfit.keys)}")
        self._make_room(misfit)
        return misfit

    def _look(self, folder: Path) -> _Found:
        """What lies there, and does it fit?"""
        best = read(folder / "best.safetensors")
        curves = self.curves if folder == self.out else folder / "curves"
        whole = all((curves / name).is_file() for name in CURVES)
        as_long = best and best.get("finished") and best["train"]["steps"] == self.ours["train.steps"]
        if best and as_long and whole and not self._misfits(best):
            return _Found([], [], finished=True)
        newest, complaints = Checkpoints(folder).load_newest()
        for complaint in complaints:
            print(f"warning: {complaint}; {'the one before it is used' if newest else 'there is no other'}")
        info = newest[1] if newest else best
        if not info:
            return _Found(["damaged"], complaints) if complaints else NOTHING
        saved, keys = fingerprint_of(info), self._misfits(info)
        if not newest and not keys:
            return _Found(["best-alone"], ["the best model, and no checkpoint"])
        return _Found(keys, [f"{key}: {saved.get(key)} in the checkpoint, {self.ours.get(key)} now" for key in keys])

    def _misfits(self, info: Dict[str, Any]) -> List[str]:
        found = misfits(fingerprint_of(info), self.ours, steps_done(info))
        return [key for key in found if key not in self.paths.accept]

    def _make_room(self, why: _Found, spare: Optional[Path] = None) -> None:
        """Set aside what is there, and say in one line what lies where and which command takes it up again."""
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
            accept = ["code"] if "code" in why.keys else []
            first = _first(why.keys, fingerprint_of(saved))
            line += f"To take it up again{first}: {self.paths.command(place, accept)}"
        else:
            line += "It has no checkpoint to go on from."
        print(line)
        superseded.apply_limit(self.out, self.ours["train.superseded_gb"], (place, spare))

    def _set_aside(self, reason: str, best_alone: bool = False) -> Optional[Path]:
        """Move the checkpoints, the best model and the curves away; the new place, None where there is nothing.

        reason: a few words for its name. best_alone: the checkpoints stay, they are another training's. Whoever is
        killed in between has moved some files and lost none.
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

    def _bring_back(self, place: Path) -> None:
        """Move the files of `place` to where the training works, which must be empty; newest checkpoint last."""
        if self.moves_curves:
            _move((place / "curves").glob("*.csv"), self.curves)
        _move((*place.glob("best.*"), *place.glob("step-*")), self.out)
        for folder in (place / "curves", place):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def _move(files: Iterable[Path], folder: Path) -> None:
    """In the order of their names: the newest checkpoint goes last."""
    for file in sorted(files):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(str(file), str(folder / file.name))


def _first(keys: List[str], saved: Fingerprint) -> str:
    """What has to be done before the command can take a training up again."""
    named = {key.partition(".")[2]: saved.get(key) for key in keys if key.startswith("train.")}
    changes = [f"train.{name}: {value}" for name, value in named.items() if name not in TrainOptions.model_fields]
    options = [flag(name, value) for name, value in named.items() if name in TrainOptions.model_fields]
    words = [f"set {', '.join(changes)} in params.yaml"] if changes else []
    words += [f"give {' '.join(options)}"] if options else []
    words += ["bring back the keypoints it was trained on"] if "data" in keys else []
    words += ["take as many processes"] if "world_size" in keys else []
    return f", {' and '.join(words)} and run" if words else ""


def _fix(keys: List[str]) -> str:
    if keys == ["code"]:
        return "; --accept code goes on with the code as it is now"
    return "; make them equal again to go on" if NOTHING.keys != keys else ""


def _restarted() -> bool:
    """Has the launcher, or torchrun, started us again after a rank was lost? Then `never` has been obeyed already."""
    return "SG_RESTARTED" in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _holds_a_training(place: Path) -> bool:
    return any(place.glob("*.safetensors"))


def _was_taken_up(paths: TrainPaths, place: Path) -> bool:
    """The command given again, or a restart after a lost rank: the folder's files are in `paths.out` now."""
    return place.resolve().parent == (paths.out / SUPERSEDED).resolve() and _holds_a_training(paths.out)
