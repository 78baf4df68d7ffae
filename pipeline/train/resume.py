"""The folder of a training, and the checkpoint from which it starts.

checkpoints/<name>/      step-*, best.*: a training; the name is a digest of its parameters and data
checkpoints/<name>-2/    the same training once more, by `--fresh`
checkpoints/best.*       a copy of the best model of the training that ran last, for DVC and the
                         later stages

A training whose folder exists is resumed or finished. Otherwise it may begin from the checkpoint of
another one that had the same steps so far (a longer schedule). Nothing in the folder of another
training is changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from pipeline import distributed
from pipeline.errors import RequestError
from pipeline.train.checkpoint import BEST, Checkpoints, Saved
from pipeline.train.curves import CURVES
from pipeline.train.identity import Fingerprint, changed_keys, fingerprint_of, misfits, name_of
from superglue_sift.network.weights import BadCheckpoint, load_model_file

# How often the launcher, torchrun, or SLURM's requeue, has started this training again
RESTARTS = ("SG_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


class TrainPaths(NamedTuple):
    """Paths and options on the command line of a training."""

    keypoints: Path
    out: Path
    reports: Path
    params: Path
    fresh: bool  # begin anew, in a new folder
    keep_seen: bool  # validate also on photographs that the initial weights were trained on
    options: Mapping[str, Any]  # the `TrainOptions` given


class Start(NamedTuple):
    """How a training starts, the same on every rank.

    folder: of its checkpoints. best: description of its best model if it is finished. saved: the
    checkpoint to start from; None: from scratch.
    """

    folder: Path
    best: Optional[Dict[str, Any]] = None
    saved: Optional[Saved] = None


def agree(ours: Fingerprint, is_main: bool) -> None:
    """Compare parameters, data and code of all ranks.

    Raises RequestError on rank 0, SystemExit on the others, if they differ.
    """
    first, *others = distributed.all_gather(ours)
    for rank, other in enumerate(others, 1):
        for key in changed_keys(first, other):
            if not is_main:
                raise SystemExit(2)
            raise RequestError(
                f"rank {rank} has {key}: {other.get(key)}, rank 0 {first.get(key)}; give every node"
                " the same parameters, keypoints and code"
            )


def prepare(paths: TrainPaths, ours: Fingerprint, writes: bool) -> Start:
    """Find the folder of a training and what it starts from; all ranks call it.

    Nodes may have folders of their own: all ranks take the checkpoint of most steps.
    writes: whether this rank writes the checkpoints in `paths.out`.
    """
    name = name_of(ours)
    last = max(distributed.all_gather(_last_number(paths.out, name)))
    # In a restarted training `--fresh` has taken effect already
    restarted = any(int(os.environ.get(count, "0")) for count in RESTARTS)
    fresh = paths.fresh and not distributed.any_rank(restarted)
    folder = _folder(paths.out, name, last + 1 if fresh else max(last, 1))
    best = distributed.broadcast(None if fresh else _find_finished(folder, paths, name))
    if best:
        return Start(folder, best)
    saved = None
    damaged = False
    if writes and not fresh:
        saved, damaged = _load_newest(folder)
    source = _find_furthest(saved)
    if source is None and distributed.any_rank(damaged):
        folder = _folder(paths.out, name, last + 1)  # the damaged files stay as they are
    if source is None and not fresh:
        saved = _load_of_another(paths.out, name, ours) if writes else None
        source = _find_furthest(saved)
    if writes:
        # Also before the first checkpoint: a restart goes on in it
        folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        return Start(folder)
    tensors, info = saved or ({}, {})
    # copies: what is sent of a tensor is all of its memory, which may be the whole file's
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors, info = distributed.broadcast((tensors, info), source)
    if writes and not (folder / f"step-{info['step']:08d}.safetensors").is_file():
        # Of another training, or a node with a folder of its own that lacks it
        Checkpoints(folder).save(info["step"], tensors, info)
    return Start(folder, saved=(tensors, info))


def _folder(out: Path, name: str, number: int) -> Path:
    return out / (name if number == 1 else f"{name}-{number}")


def _last_number(out: Path, name: str) -> int:
    """How often the training was begun in `out`."""
    found = [re.fullmatch(rf"{name}(?:-(\d+))?", path.name) for path in out.glob(f"{name}*/")]
    return max((int(match.group(1) or 1) for match in found if match), default=0)


def _find_finished(folder: Path, paths: TrainPaths, name: str) -> Optional[Dict[str, Any]]:
    """Description of the finished best model in `folder`, or of the published one; None without."""
    if not folder.is_dir():  # as after `dvc pull`: outputs are there, checkpoints are not
        if not all((paths.reports / "curves" / curve).is_file() for curve in CURVES.values()):
            return None
        folder = paths.out
    with contextlib.suppress(FileNotFoundError, BadCheckpoint):
        info = load_model_file(folder / BEST)[1]
        if info.get("finished") and name_of(fingerprint_of(info)) == name:
            return info
    return None


def _find_furthest(saved: Optional[Saved]) -> Optional[int]:
    """The first rank with the checkpoint of most steps; None if no rank has one."""
    steps = distributed.all_gather(saved[1]["step"] if saved else -1)
    return steps.index(max(steps)) if max(steps) >= 0 else None


def _load_newest(folder: Path) -> Tuple[Optional[Saved], bool]:
    """The newest undamaged checkpoint, and whether there are damaged ones, which are printed."""
    saved, warnings = Checkpoints(folder).load_newest()
    for warning in warnings:
        print(f"warning: {warning}; {'the previous one is used' if saved else 'there is no other'}")
    return saved, bool(warnings)


def _load_of_another(out: Path, name: str, ours: Fingerprint) -> Optional[Saved]:
    """The undamaged checkpoint of most steps of another training that had the same steps so far."""
    fitting = []
    for path in out.glob("*/step-*.json"):
        if path.parent.name.partition("-")[0] == name:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError):
            info = json.loads(path.read_text(encoding="utf-8"))
            if not misfits(info["fingerprint"], ours, info["step"]):
                fitting.append((info["step"], path.with_suffix(".safetensors")))
    for _, path in sorted(fitting, reverse=True):
        with contextlib.suppress(FileNotFoundError, BadCheckpoint):
            return load_model_file(path)
    return None
