"""Checkpoints whose place another training takes: set aside, thinned, brought back. None is deleted.

checkpoints/superseded/<date>-<reason>/    step-*, best.* and the curves, as they lay; older ones keep best.* alone
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from pipeline.runtime.checkpoint import BEST_PREFIX, save_model_file
from superglue_sift.weights import BadCheckpoint, load_model_file

FOLDER = "superseded"


class Shelf(NamedTuple):
    """Where one training works: the folder of its checkpoints, and that of its curves, which go with them."""

    checkpoints: Path
    curves: Path

    def places(self) -> List[Path]:
        """What has been set aside, newest first."""
        return sorted((self.checkpoints / FOLDER).glob("*/"), reverse=True)

    def set_aside(
        self, reason: str, best_alone: bool = False, spare: Optional[Path] = None
    ) -> Optional[Path]:
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
        stem = f"{time.strftime('%Y-%m-%d-%H%M%S', time.gmtime())}-{reason}"
        for name in (stem, *(f"{stem}-{number}" for number in range(2, 1000))):
            place = self.checkpoints / FOLDER / name
            if not place.exists():
                place.mkdir(parents=True)
                return place
        raise FileExistsError(17, "too many of this name", str(self.checkpoints / FOLDER / stem))

    def _thin(self, places: Sequence[Path]) -> None:
        """Leave the best model of each, and the newest checkpoint where there is no best one yet."""
        for place in places:
            steps = sorted(place.glob("step-*.safetensors"), reverse=True)
            keep = [] if _keep_best(place, steps) else steps[:1]
            for step in steps:
                if step not in keep:
                    step.with_suffix(".json").unlink(missing_ok=True)
                    step.unlink()


def _keep_best(place: Path, steps: Sequence[Path]) -> bool:
    """Is the best model of these checkpoints here as a file of its own? Takes it out of them where it is not."""
    best = place / "best.safetensors"
    if best.is_file():
        return True
    for step in steps:
        try:
            tensors, info = load_model_file(step)
        except BadCheckpoint:
            continue
        weights = {k[len(BEST_PREFIX) :]: v for k, v in tensors.items() if k.startswith(BEST_PREFIX)}
        if weights:
            save_model_file(best, weights, {**info, "step": info.get("best_step")})
            return True
    return False


def size(place: Path) -> int:
    """Bytes of all files below `place`."""
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
