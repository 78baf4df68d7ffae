"""What a training goes on from: its newest checkpoint, one that was set aside, or nothing.

Nothing here can change a weight: it moves files, compares fingerprints and says what it did. Rank 0 decides for all.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from pipeline.errors import RequestError
from pipeline.runtime import distributed, superseded
from pipeline.runtime.checkpoint import Checkpoints
from pipeline.runtime.superseded import Shelf
from pipeline.training.state import Fingerprint, changed_keys, fingerprint_of
from superglue_sift.weights import BadCheckpoint, load_model_file

AUTO, MUST, NEVER = "auto", "must", "never"
CURVES = ("train.csv", "validation.csv")
DEFAULTS = {
    "keypoints": "data/keypoints",
    "out": "checkpoints",
    "reports": "reports/train",
    "params": "params.yaml",
}


def check(args: argparse.Namespace) -> None:
    """Before any process starts. RequestError when --resume names no folder."""
    place = Path(args.resume)
    if (
        args.resume not in (AUTO, MUST, NEVER)
        and not _holds_a_training(place)
        and not _was_taken_up(args, place)
    ):
        raise RequestError(
            f"--resume {args.resume}: no checkpoints there; give {AUTO}, {MUST}, {NEVER}, or a folder in "
            f"{args.out / superseded.FOLDER}"
        )


def prepare(args: argparse.Namespace, ours: Fingerprint, is_main: bool) -> bool:
    """Leave in `args.out` what this training goes on from, or nothing; True when it is finished.

    Raises:
        RequestError: on rank 0, --resume asks for a checkpoint that does not fit. The other ranks end in silence.
    """
    finished, refusal = False, ""
    if is_main:
        try:
            finished = _Resume(args, ours).prepare()
        except RequestError as error:
            refusal = str(error)
    finished, refusal = distributed.broadcast((finished, refusal))
    if refusal and not is_main:
        raise SystemExit(2)
    if refusal:
        raise RequestError(refusal)
    return finished


class _Found(NamedTuple):
    """What lies in a folder: the keys that do not fit (none: it does), each as a text; is the training finished."""

    keys: List[str]
    reasons: List[str]
    finished: bool = False


NOTHING = _Found(["nothing"], ["no checkpoint"])


class _Resume:
    """The decision, on one rank."""

    def __init__(self, args: argparse.Namespace, ours: Fingerprint) -> None:
        self.args, self.ours = args, ours
        self.out: Path = args.out
        self.shelf = Shelf(args.out, args.reports / "curves")

    def prepare(self) -> bool:
        how = self.args.resume
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
            raise RequestError(f"--resume {place}: {'; '.join(found.reasons)}{_mend(found.keys)}")
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
        if self.args.resume != AUTO and self.args.resume != NEVER:
            raise RequestError(f"{self.out}: cannot resume: {'; '.join(misfit.reasons)}{_mend(misfit.keys)}")
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
        saved = fingerprint_of(info)
        keys = self._misfits(info)
        return _Found(
            keys, [f"{key}: {saved.get(key)} in the checkpoint, {self.ours.get(key)} now" for key in keys]
        )

    def _misfits(self, info: Dict[str, Any]) -> List[str]:
        return [key for key in changed_keys(fingerprint_of(info), self.ours) if key not in self.args.accept]

    def _set_aside(self, why: _Found, spare: Optional[Path] = None) -> None:
        """Make room, and say in one line what lies where and which command takes it up again."""
        best, newest = _read(self.out / "best.safetensors"), Checkpoints(self.out).load_newest()[0]
        if best and newest and changed_keys(fingerprint_of(best), fingerprint_of(newest[1])):
            self.shelf.set_aside("best-of-another", best_alone=True)
        keys = why.keys if len(why.keys) < 3 else [why.keys[0], f"and-{len(why.keys) - 1}-more"]
        place = self.shelf.set_aside("-".join(keys), spare=spare)
        if place is None:
            return
        held = [superseded.size(each) / 1e6 for each in self.shelf.places()]
        others = f"; {len(held)} of them take {sum(held):.1f} MB" if len(held) > 1 else ""
        line = f"{self.out} held another training ({'; '.join(why.reasons)}). It is set aside in {place}, "
        line += f"{superseded.size(place) / 1e6:.1f} MB{others}. "
        saved = newest[1] if newest else best if best and best.get("finished") else None
        if saved:
            first = _first(why.keys, fingerprint_of(saved))
            line += f"To take it up again{first}: {self._command(place, why.keys)}"
        else:
            line += "It has no checkpoint to go on from."
        print(line)

    def _command(self, place: Path, keys: List[str]) -> str:
        words = ["python", "-m", "pipeline.launch", "pipeline.train"]
        for name, default in DEFAULTS.items():
            if str(getattr(self.args, name)) != default:
                words += [f"--{name}", str(getattr(self.args, name))]
        words += ["--resume", str(place), *(["--accept", "code"] if "code" in keys else [])]
        return " ".join(shlex.quote(word) for word in words)

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


def _mend(keys: List[str]) -> str:
    if keys == ["code"]:
        return "; --accept code goes on with the code as it is now"
    return "; make them equal again to go on" if NOTHING.keys != keys else ""


def _restarted() -> bool:
    """Has the launcher, or torchrun, started us again after a rank was lost? Then `never` has been obeyed already."""
    return "SG_RESTARTED" in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _holds_a_training(place: Path) -> bool:
    return any(place.glob("*.safetensors"))


def _was_taken_up(args: argparse.Namespace, place: Path) -> bool:
    """The command given again, or a restart after a lost rank: the folder's files are in `args.out` now."""
    return place.resolve().parent == (args.out / superseded.FOLDER).resolve() and _holds_a_training(args.out)
