"""The outputs of the stage: checkpoints/best.* and reports/train, of the training that ran last."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, FrozenSet, Optional

from pipeline import tracking, trained_on
from pipeline.errors import RequestError
from pipeline.files import write_atomic
from pipeline.train import curves, identity
from pipeline.train.checkpoint import BEST, Checkpoints
from pipeline.train.resume import TrainPaths


def publish(folder: Path, out: Path) -> None:
    """Copy the best model in `folder`, its description and list of photographs, to `out`."""
    for partial in out.glob(".*.tmp"):  # of killed writers
        partial.unlink(missing_ok=True)
    best = folder / BEST
    for source in (trained_on.list_of(best), best.with_suffix(".json"), best):
        target = out / source.name
        content = source.read_bytes()
        if not target.is_file() or target.read_bytes() != content:
            write_atomic(target, content)


def publish_finished(
    paths: TrainPaths,
    folder: Path,
    best: Dict[str, Any],
    ours: identity.Fingerprint,
    photographs: Optional[FrozenSet[str]],
) -> None:
    """Publish a training that is finished already, and say so.

    Args:
        folder: of its checkpoints, which need not exist if `paths.out` has its best model.
        best: the JSON of its best model.
        ours: fingerprint of what is asked for, which may validate otherwise.
        photographs: that it was trained on; None: unknown.

    Raises:
        RequestError: its curves are deleted.
    """
    out = paths.out
    reports = paths.reports
    done = f"{folder}: trained with these parameters and data, to the last step"
    saved = Checkpoints(folder).load_newest()[0]
    if saved:
        curves.write_curves(reports, saved[0])
    elif folder.is_dir() and not curves.has_metrics(reports, best):
        raise RequestError(
            f"{done}, but its checkpoints step-*, which held its curves, are deleted, and"
            f" {reports} is of another training; --fresh trains it anew, in a new folder"
        )
    if folder.is_dir():
        publish(folder, out)
    if not trained_on.list_of(out / BEST).is_file():
        trained_on.write(out / BEST, photographs)
    curves.write_metrics(reports, best)
    print(f"{done}: nothing to do")
    for line in identity.changes(identity.fingerprint_of(best), ours):
        print(f"{line}: its best model is kept; --fresh chooses among new ones")
    other = identity.other_versions(saved[1] if saved else best)
    if other:
        print(f"it was trained under {other}; --fresh trains it anew, in a new folder")
    tracking.attach(reports / "log.jsonl", best["training"]).close()
