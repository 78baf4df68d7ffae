"""What a training goes on from: its newest checkpoint, one that was set aside, or nothing.

Nothing here can change a weight: it moves files, compares fingerprints and says what it did. Rank 0 decides for all.
Checkpoints whose place another training takes are set aside, thinned, brought back. None is deleted:

checkpoints/superseded/<date>-<reason>/    step-*, best.* and the curves, as they lay; older ones keep best.* alone
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from pipeline.errors import RequestError
from pipeline.runtime import distributed
from pipeline.runtime.checkpoint import Checkpoints
from pipeline.training.state import Fingerprint, changed_keys, fingerprint_of
from superglue_sift.weights import BadCheckpoint, load_model_file

AUTO, MUST, NEVER = "auto", "must", "never"
CURVES = ("train.csv", "validation.csv")
SUPERSEDED = "superseded"


@dataclasses.dataclass(frozen=True)
class TrainPaths:
    """What the command line of a training names: where it reads and writes, and what it may go on from."""

    keypoints: Path = Path("data/keypoints")
    out: Path = Path("checkpoints")
    reports: Path = Path("reports/train")
    params: Path = Path("params.yaml")
    resume: str = AUTO
    accept: Tuple[str, ...] = ()  # keys of the fingerprint that may differ

    def command(self, place: Path, accept: Sequence[str]) -> str:
        """The command that takes up again what is set aside in `place`."""
        words = ["python", "-m", "pipeline.launch", "pipeline.train"]
        for name in ("keypoints", "out", "reports", "params"):
            given = getattr(self, name)
            words += [f"--{name}", str(given)] if given != getattr(TrainPaths, name) else []
        words += ["--resume", str(place)]
        for key in accept:
            words += ["--accept", key]
        return " ".join(shlex.quote(word) for word in words)


def check(paths: TrainPaths) -> None:
    """Before any process starts. RequestError when --resume names no folder."""
    place = Path(paths.resume)
    named = paths.resume not in (AUTO, MUST, NEVER)
    if named and not _holds_a_training(place) and not _was_taken_up(paths, place):
        raise RequestError(
            f"--resume {paths.resume}: no checkpoints there; give {AUTO}, {MUST}, {NEVER}, or a folder in "
            f"{paths.out / SUPERSEDED}"
        )


def prepare(paths: TrainPaths, ours: Fingerprint, is_main: bool) -> bool:
    """Leave in `paths.out` what this training goes on from, or nothing; True when it is finished.

    Raises:
        RequestError: on rank 0, --resume asks for a checkpoint that does not fit. The other ranks end in silence.
    """
    finished, refusal = False, ""
    if is_main:
        try:
            finished = _Resume(paths, ours).prepare()
        except RequestError as error:
            refusal = str(error)
    finished, refusal = distributed.broadcast((finished, refusal))
    if refusal:
        raise RequestError(refusal) if is_main else SystemExit(2)
    return finished


class Shelf(NamedTuple):
    """Where one training works: the folder of its checkpoints, and that of its curves, which go with them."""

    checkpoints: Path
    curves: Path

    def places(self) -> List[Path]:
        """What has been set aside, newest first."""
        return sorted((self.checkpoints / SUPERSEDED).glob("*/"), reverse=True)

    def set_aside(self, reason: str, best_alone: bool = False, spare: Optional[Path] = None) -> Optional[Path]:
        """Move the checkpoints, the best model and the curves away; the new place, None where there is nothing.

        reason: a few words for its name. best_alone: the checkpoints stay, they belong to another training than the
        best model. spare: a place not to be thinned. Whoever is killed in between has moved some files and lost none;
        the newest checkpoint goes last.
        """
        steps = [] if best_alone else sorted(self.checkpoints.glob("step-*"))
        best = sorted(self.checkpoints.glob("best.*"))
        if not steps and not best:
            return None
        place = self._new_place(reason)
        for file in sorted(self.curves.glob("*.csv")):
            (place / "curves").mkdir(exist_ok=True)
            shutil.move(str(file), str(place / "curves" / file.name))
        for file in (*best, *steps):
            shutil.move(str(file), str(place / file.name))
        if steps:
            kept_whole = {place.resolve(), spare.resolve() if spare else place.resolve()}
            self._thin([older for older in self.places() if older.resolve() not in kept_whole])
        return place

    def bring_back(self, place: Path) -> None:
        """Move the files of `place` to where the training works, which must be empty; newest checkpoint last."""
        self.curves.mkdir(parents=True, exist_ok=True)
        for file in sorted((place / "curves").glob("*.csv")):
            shutil.move(str(file), str(self.curves / file.name))
        for file in (*sorted(place.glob("best.*")), *sorted(place.glob("step-*"))):
            shutil.move(str(file), str(self.checkpoints / file.name))
        for folder in (place / "curves", place):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _new_place(self, reason: str) -> Path:
        name, number = f"{time.strftime('%Y-%m-%d-%H%M%S', time.gmtime())}-{reason}", 1
        place = self.checkpoints / SUPERSEDED / name
        while place.exists():
            number += 1
            place = place.with_name(f"{name}-{number}")
        place.mkdir(parents=True)
        return place

    def _thin(self, places: Sequence[Path]) -> None:
        """Leave the best model of each, and the newest checkpoint where its file is not there."""
        for place in places:
            steps = sorted(place.glob("step-*.safetensors"), reverse=True)
            for step in steps if (place / "best.safetensors").is_file() else steps[1:]:
                step.with_suffix(".json").unlink(missing_ok=True)
                step.unlink()


def _size(place: Path) -> int:
    """Bytes of all files below `place`."""
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())


class _Found(NamedTuple):
    """What lies in a folder: the keys that do not fit (none: it does), each as a text; is the training finished."""

    keys: List[str]
    reasons: List[str]
    finished: bool = False


NOTHING = _Found(["nothing"], ["no checkpoint"])


class _Resume:
    """The decision, on one rank."""

    def __init__(self, paths: TrainPaths, ours: Fingerprint) -> None:
        self.paths, self.ours, self.out = paths, ours, paths.out
        self.shelf = Shelf(paths.out, paths.reports / "curves")

    def prepare(self) -> bool:
        how = self.paths.resume
        if how == NEVER and not _restarted():
            self._set_aside(_Found([f"resume-{NEVER}"], ["--resume never"]))
            return False
        place = Path(how)
        if how not in (AUTO, MUST, NEVER) and _holds_a_training(place):
            found = self._asked_for(place)
        else:
            found = self._look(self.out)
            if found.keys:
                found = self._from_the_shelf(found)
        if not found.finished and not found.keys:
            self._make_room_for_own_best()
        return found.finished

    def _asked_for(self, place: Path) -> _Found:
        """Bring back the folder that --resume names. RequestError when it does not fit."""
        found = self._look(place)
        if found.keys:
            raise RequestError(f"--resume {place}: {'; '.join(found.reasons)}{_fix(found.keys)}")
        self._set_aside(_Found(["resume"], [f"--resume {place}"]), spare=place)
        self.shelf.bring_back(place)
        return found

    def _from_the_shelf(self, misfit: _Found) -> _Found:
        """Bring back what was set aside and fits; else make room for a training from scratch."""
        for place in self.shelf.places():
            found = self._look(place)
            if not found.keys:
                self._set_aside(misfit, spare=place)
                self.shelf.bring_back(place)
                print(f"{place} fits: its training is taken up again")
                return found
        if self.paths.resume not in (AUTO, NEVER):
            raise RequestError(f"{self.out}: cannot resume: {'; '.join(misfit.reasons)}{_fix(misfit.keys)}")
        self._set_aside(misfit)
        return misfit

    def _look(self, folder: Path) -> _Found:
        """What lies there, and does it fit?"""
        best = _read(folder / "best.safetensors")
        curves = self.shelf.curves if folder == self.out else folder / "curves"
        whole = all((curves / name).is_file() for name in CURVES)
        if best and best.get("finished") and whole and not self._misfits(best):
            return _Found([], [], finished=True)
        newest, complaints = Checkpoints(folder).load_newest()
        for complaint in complaints:
            print(f"warning: {complaint}; {'the one before it is used' if newest else 'there is no other'}")
        if newest:
            return self._judged(newest[1])
        if not best:
            return _Found(["damaged"], complaints) if complaints else NOTHING
        keys = self._misfits(best)
        return self._judged(best) if keys else _Found(["best-alone"], ["the best model, and no checkpoint"])

    def _judged(self, info: Dict[str, Any]) -> _Found:
        saved, keys = fingerprint_of(info), self._misfits(info)
        return _Found(keys, [f"{key}: {saved.get(key)} in the checkpoint, {self.ours.get(key)} now" for key in keys])

    def _misfits(self, info: Dict[str, Any]) -> List[str]:
        return [key for key in changed_keys(fingerprint_of(info), self.ours) if key not in self.paths.accept]

    def _set_aside(self, why: _Found, spare: Optional[Path] = None) -> None:
        """Make room, and say in one line what lies where and which command takes it up again."""
        best, newest = _read(self.out / "best.safetensors"), Checkpoints(self.out).load_newest()[0]
        if best and newest and changed_keys(fingerprint_of(best), fingerprint_of(newest[1])):
            self.shelf.set_aside("best-of-another", best_alone=True)
        keys = why.keys if len(why.keys) < 3 else [why.keys[0], f"and-{len(why.keys) - 1}-more"]
        place = self.shelf.set_aside("-".join(keys), spare=spare)
        if place is None:
            return
        held = [_size(each) / 1e6 for each in self.shelf.places()]
        others = f"; {len(held)} of them take {sum(held):.1f} MB" if len(held) > 1 else ""
        line = f"{self.out} held another training ({'; '.join(why.reasons)}). It is set aside in {place}, "
        line += f"{_size(place) / 1e6:.1f} MB{others}. "
        saved = newest[1] if newest else best if best and best.get("finished") else None
        if saved:
            accept = ["code"] if "code" in why.keys else []
            first = _first(why.keys, fingerprint_of(saved))
            line += f"To take it up again{first}: {self.paths.command(place, accept)}"
        else:
            line += "It has no checkpoint to go on from."
        print(line)

    def _make_room_for_own_best(self) -> None:
        """`dvc checkout` may have put another training's best model beside our checkpoints."""
        best = _read(self.out / "best.safetensors")
        if best and self._misfits(best):
            self.shelf.set_aside("best-of-another", best_alone=True)


def _read(path: Path) -> Optional[Dict[str, Any]]:
    try:
        return load_model_file(path)[1]
    except (FileNotFoundError, BadCheckpoint):
        return None


def _first(keys: List[str], saved: Fingerprint) -> str:
    """What has to be done before the command can take a training up again."""
    changes = [f"{key}: {saved.get(key)}" for key in keys if key.startswith("train.")]
    words = [f"set {', '.join(changes)} in params.yaml"] if changes else []
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
