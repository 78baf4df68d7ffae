"""The state of a training, its checkpoints, and where a training starts.

checkpoints/<name>/      step-*, best.*: a training. The name is a digest of its parameters and data
checkpoints/<name>-2/    the same training once more, by `--fresh`
checkpoints/best.*       a copy of the best model of the training that ran last, for DVC and the
                         later stages

A training whose folder exists is resumed, or is finished. `--continue FOLDER` begins from the
newest checkpoint of another training, with a longer schedule. Nothing in the folder of another
training is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from pipeline import distributed, provenance
from pipeline.errors import RequestError, read_number
from pipeline.params import RunParams, TrainParams
from pipeline.train.optimizer import optimizer_tensors, restore_optimizer
from superglue_sift import torch_compat
from superglue_sift.files import file_sha256, json_digest, write_atomic
from superglue_sift.network.superglue import SuperGlue
from superglue_sift.network.weights import BadCheckpoint, load_model_file, save_model_file

BEST = "best.safetensors"
# Fields of TrainState that a checkpoint stores as JSON
PLAIN = ("step", "best_step", "best_metrics", "skipped", "averaged")
# Environment variables: how often the launcher, torchrun, or SLURM has started this training again
RESTARTS = ("SG_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
# Keys of `train` that change no weight of a step, and keys that `--continue` may change
FREE = {"train.val_every", "train.val_pairs"}
SCHEDULE = ("average", "decay_start", "lr", "schedule", "steps", "warmup_steps")

Tensors = Dict[str, Tensor]
Info = Dict[str, Any]  # JSON values
Metrics = Dict[str, float]
Saved = Tuple[Tensors, Info]  # a checkpoint


@dataclass
class TrainState:
    """The state of one training: everything that a checkpoint holds."""

    model: SuperGlue
    optimizer: Any
    scaler: Any
    step: int = 0  # optimizer steps done
    best_step: int = 0  # step of the validation with the largest F1, and its metrics
    best_metrics: Metrics = field(default_factory=dict)
    best_weights: Tensors = field(default_factory=dict)  # its weights, in the memory of the host
    average: Tensors = field(default_factory=dict)  # mean of the weights of the last steps
    averaged: int = 0  # number of steps in the average
    skipped: int = 0  # steps not applied because the gradient was not finite

    def tensors(self) -> Tensors:
        """Return everything in the state that is a tensor, by name."""
        kinds = {
            "model.": self.model.state_dict(),
            "optimizer.": optimizer_tensors(self.optimizer),
            "best.": self.best_weights,
            "average.": self.average,
            "rng.": {"cpu": torch.get_rng_state()},
        }
        return {
            prefix + name: value
            for prefix, values in kinds.items()
            for name, value in values.items()
        }

    def info(self) -> Info:
        """Return everything in the state that is no tensor, as JSON values."""
        plain = {name: getattr(self, name) for name in PLAIN}
        return {"model": self.model.config.to_dict(), **plain, "scaler": self.scaler.state_dict()}

    def restore(self, tensors: Tensors, info: Info) -> None:
        """Load the state from what `tensors` and `info` returned."""
        self.model.load_state_dict(part(tensors, "model."))
        restore_optimizer(self.optimizer, part(tensors, "optimizer."))
        torch.set_rng_state(tensors["rng.cpu"])
        if info["scaler"]:  # it is empty if the checkpoint was saved in a precision without scaling
            self.scaler.load_state_dict(info["scaler"])
        self.best_weights = part(tensors, "best.")
        device = self.model.dustbin.device
        self.average = {n: t.to(device) for n, t in part(tensors, "average.").items()}
        for name in PLAIN:
            setattr(self, name, info[name])

    def add_to_average(self) -> None:
        """Add the current weights to the mean of the weights of the last steps."""
        weights = {n: t for n, t in self.model.state_dict().items() if t.is_floating_point()}
        self.averaged += 1
        if self.averaged == 1:
            self.average = {name: tensor.clone() for name, tensor in weights.items()}
        else:
            # look up each name, because a checkpoint gives its tensors back in another order
            means = [self.average[name] for name in weights]
            torch_compat.lerp_(means, list(weights.values()), 1 / self.averaged)

    def begin_average(self, first_step: int, same: bool) -> None:
        """Keep the average of a checkpoint if it is `same`, or begin a new one at `first_step`.

        Of the weights before, only those of the checkpoint's own step are known.
        """
        if same:
            return
        self.average = {}
        self.averaged = 0
        if self.step == first_step:
            self.add_to_average()

    def keep_best(self, metrics: Metrics) -> bool:
        """Keep a copy of the weights if this validation is the best so far, and return whether."""
        if self.best_metrics and metrics["f1"] <= self.best_metrics["f1"]:
            return False
        self.best_step = self.step
        self.best_metrics = metrics
        weights = {**self.model.state_dict(), **self.average}
        self.best_weights = {k: v.detach().cpu().clone() for k, v in weights.items()}
        return True


def part(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with `prefix`. Remove the prefix from the names."""
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


# --- the files of a training


def save(folder: Path, step: int, tensors: Tensors, info: Info) -> None:
    """Write the checkpoint of `step`, then delete all but the newest two checkpoints.

    Only one process at a time may write in the folder.
    """
    save_model_file(folder / f"step-{step:08d}.safetensors", tensors, info)
    for old in _newest_first(folder)[2:]:
        _delete(old)


def load_newest(folder: Path, repair: bool = False) -> Optional[Saved]:
    """Return the newest undamaged checkpoint, or None if there is no checkpoint.

    With `repair`, newer checkpoints that are damaged are deleted, so that they do not count among
    the newest two that stay. Files that could not be read stay, since they may be whole.

    Raises RequestError if all are damaged.
    """
    paths = _newest_first(folder)
    damaged: List[Path] = []
    for path in paths:
        try:
            saved = load_model_file(path)
        except BadCheckpoint as error:
            print(f"warning: {error}")
            if not isinstance(error.__cause__, (OSError, MemoryError)):
                damaged.append(path)
        else:
            for other in damaged if repair else ():
                _delete(other)
                print(f"deleted {other}, and starting from {path.name}")
            return saved
    if paths:
        raise RequestError(f"{folder}: all checkpoints are damaged; --fresh trains in a new folder")
    return None


def _delete(path: Path) -> None:
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _newest_first(folder: Path) -> List[Path]:
    """Return the checkpoints in a folder, from the last step to the first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def save_best(folder: Path, out: Path, tensors: Tensors, info: Info) -> None:
    """Replace the best model in `folder` by these tensors, described by `info`, and publish it."""
    save_model_file(folder / BEST, tensors, info)
    publish(folder, out)


def publish(folder: Path, out: Path) -> None:
    """Copy the best model in `folder`, its description and its list of photographs to `out`."""
    best = folder / BEST
    for source in (provenance.photographs_file(best), best.with_suffix(".json"), best):
        write_atomic(out / source.name, source.read_bytes())


# --- which training it is: parameters and data name its folder


def describe(train: TrainParams) -> Info:
    """Return the section as JSON values.

    `init_from` becomes the name of the file. The fingerprint has the digest of its content as well.
    """
    return {**train.model_dump(), "init_from": Path(train.init_from).name}


def fingerprint(train: TrainParams, run: RunParams, data: str, world_size: int) -> Info:
    """Return the parameters and the digest of the data, which tell one training from another.

    A key of `run` is included only if it decides more than rounding. Such a key determines the
    pairs of a step and the learning rate (together with the number of processes), or the parts over
    which BatchNorm takes its statistics.
    """
    # include all keys of `train`, and the content of the data and of the initial weights
    values = {f"train.{key}": value for key, value in describe(train).items()}
    values["data"] = data
    if train.init_from:
        values["initial_weights"] = file_sha256(train.init_from)[:16]
    # include keys of `run` that decide the steps
    if run.batch_per_rank or run.lr_scaling != "none":
        values.update(
            batch_per_rank=run.batch_per_rank, lr_scaling=run.lr_scaling, world_size=world_size
        )
    if train.norm == "batch":
        values["accumulate"] = run.accumulate
    return values


def name_of(values: Info) -> str:
    """Return the name of a training, the same on any machine and for any version of the code."""
    return json_digest({key: value for key, value in values.items() if key not in FREE})


def changed_keys(saved: Info, ours: Info) -> List[str]:
    """Return the keys whose values differ between the two fingerprints, sorted."""
    return [key for key in sorted({*saved, *ours}) if saved.get(key) != ours.get(key)]


def agree(ours: Info, is_main: bool) -> None:
    """Check that parameters, data and code of all ranks are equal.

    If they differ, raises RequestError on rank 0 and SystemExit on the other ranks.
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


# --- where a training starts


def find_start(
    args: argparse.Namespace, ours: Info, writes: bool
) -> Tuple[Path, Optional[Info], Optional[Saved]]:
    """Find the folder of the training that `args` ask for, and what the training starts from.

    All ranks call this together. Nodes may have folders of their own: all ranks take the
    checkpoint with the most steps.

    Args:
        ours: the fingerprint of the training.
        writes: whether this rank writes the checkpoints in `args.out`.

    Returns:
        The folder, the description of its best model if the training is finished, or None, and the
        checkpoint to start from, or None.
    """
    # find the folder; a restarted training has its new folder, so `--fresh` makes no other one
    name = name_of(ours)
    number = max(distributed.all_gather(_last_number(args.out, name)))
    restarted = any(read_number(count, 0) for count in RESTARTS)
    fresh = args.fresh and not distributed.any_rank(restarted)
    number = number + 1 if fresh else max(number, 1)
    folder = args.out / (name if number == 1 else f"{name}-{number}")
    best = distributed.broadcast(None if fresh else _find_finished(folder, args, name))
    if best:
        return folder, best, None

    # load the newest checkpoint, or the newest checkpoint of the training to continue
    saved = load_newest(folder, repair=True) if writes else None
    if args.continued and not distributed.any_rank(saved is not None):
        saved = load_to_continue(args.continued, ours) if writes else None
    if writes:
        # The folder is made before the first checkpoint, so that a restart finds it
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder, args.out):  # a killed writer leaves files that would fill the disk
            for partial in place.glob(".*.tmp"):
                partial.unlink(missing_ok=True)
    steps = distributed.all_gather(saved[1]["step"] if saved else -1)
    if max(steps) < 0:
        return folder, None, None

    # send all ranks the checkpoint with the most steps
    tensors, info = saved or ({}, {})
    # Clone the tensors, since sending one sends all of its memory, which may be that whole file
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors, info = distributed.broadcast((tensors, info), steps.index(max(steps)))
    if writes and not (folder / f"step-{info['step']:08d}.safetensors").is_file():
        # The checkpoint belongs to another training, or it is missing in this node's own folder
        save(folder, info["step"], tensors, info)
    return folder, None, (tensors, info)


def load_to_continue(folder: Path, ours: Info) -> Saved:
    """Return the newest checkpoint in the folder of another training, which `ours` continues.

    Raises RequestError if there is no checkpoint, or if more than the schedule differs.
    """
    saved = load_newest(folder)
    if saved is None:
        raise RequestError(f"--continue {folder}: there is no checkpoint step-*")
    info = saved[1]
    # a longer training may have another schedule, and nothing else
    allowed = FREE | {f"train.{key}" for key in SCHEDULE}
    wrong = [key for key in changed_keys(info["fingerprint"], ours) if key not in allowed]
    if wrong:
        before = info["fingerprint"].get(wrong[0])
        raise RequestError(
            f"--continue {folder}: it was trained with {wrong[0]}: {before}, not"
            f" {ours.get(wrong[0])}; only"
            f" train.{', '.join(SCHEDULE)} may differ"
        )
    if info["step"] >= ours["train.steps"]:
        raise RequestError(
            f"--continue {folder}: it has {info['step']} steps; raise train.steps above them"
        )
    # The average of the last steps can begin with the weights of the checkpoint, not before them
    first = first_averaged(ours)
    if first < info["step"] and first != first_averaged(info["fingerprint"]):
        most = ours["train.steps"] - info["step"] + 1
        raise RequestError(
            f"--continue {folder}: train.average = {ours['train.average']} needs weights of steps"
            f" before its last one, {info['step']}; set it to at most {most}, or raise train.steps"
        )
    return saved


def first_averaged(values: Info) -> int:
    """Return the first step whose weights are averaged, from the fingerprint of a training."""
    return values["train.steps"] - values["train.average"] + 1


def _last_number(out: Path, name: str) -> int:
    """Return the number of the training's newest folder in `out`, or 0 if it has none."""
    found = [re.fullmatch(rf"{name}(?:-(\d+))?", path.name) for path in out.glob(f"{name}*/")]
    return max((int(match.group(1) or 1) for match in found if match), default=0)


def _find_finished(folder: Path, args: argparse.Namespace, name: str) -> Optional[Info]:
    """Return the description of the finished best model, or None.

    It is searched in `folder`, or among the published files if that folder does not exist.
    """
    if not folder.is_dir():  # after `dvc pull` the outputs are there, but the checkpoints are not
        if not (args.reports / "curves").is_dir():
            return None
        folder = args.out
    with contextlib.suppress(FileNotFoundError, BadCheckpoint):
        info = load_model_file(folder / BEST)[1]
        if info.get("finished") and info["training"] == name:
            return info
    return None
