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
import os
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch import Tensor

from pipeline import compat, distributed, provenance, trained_on
from pipeline.errors import RequestError, WorkError
from pipeline.files import file_sha256, json_digest, write_atomic
from pipeline.params import RunParams, TrainParams
from pipeline.train.optimizer import optimizer_tensors, restore_optimizer
from superglue_sift.network.superglue import SuperGlue
from superglue_sift.network.weights import BadCheckpoint, load_model_file, save_model_file

BEST = "best.safetensors"
PLAIN = ("step", "best", "best_step", "best_metrics", "skipped", "validated", "averaged")
CODE = "code"  # the commit, among the versions of a checkpoint
# How often the launcher, torchrun, or SLURM's requeue, has started this training again
RESTARTS = ("SG_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
# Keys of `train` that change no weight of a step, and those that `--continue` may change
FREE = {"train.val_every", "train.val_pairs"}
SCHEDULE = ("average", "decay_start", "lr", "schedule", "steps", "warmup_steps")

Saved = Tuple[Dict[str, Tensor], Dict[str, Any]]  # tensors and JSON of a checkpoint
Fingerprint = Dict[str, Any]


@dataclass
class TrainState:
    """Model, optimiser, scaler, position and best score of one training."""

    model: SuperGlue
    optimizer: Any
    scaler: Any
    step: int = 0  # optimiser steps done
    best: Optional[float] = None  # best validation f1 so far
    best_step: int = 0
    best_metrics: Dict[str, float] = field(default_factory=dict)  # of that validation
    best_weights: Dict[str, Tensor] = field(default_factory=dict)  # on the host
    average: Dict[str, Tensor] = field(default_factory=dict)  # mean of the last weights
    averaged: int = 0  # steps in the average
    validated: int = -1  # step of the last validation
    skipped: int = 0  # steps not applied because the gradient was not finite

    def tensors(self) -> Dict[str, Tensor]:
        """Everything that is a tensor, by name."""
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

    def info(self) -> Dict[str, Any]:
        """Everything else, as JSON values."""
        plain = {name: getattr(self, name) for name in PLAIN}
        return {"model": self.model.config.to_dict(), **plain, "scaler": self.scaler.state_dict()}

    def restore(self, tensors: Dict[str, Tensor], info: Dict[str, Any]) -> None:
        """Load a saved state."""
        self.model.load_state_dict(part(tensors, "model."))
        restore_optimizer(self.optimizer, part(tensors, "optimizer."))
        torch.set_rng_state(tensors["rng.cpu"])
        if info["scaler"]:  # empty if saved in a precision without scaling
            self.scaler.load_state_dict(info["scaler"])
        self.best_weights = part(tensors, "best.")
        device = self.model.dustbin.device
        self.average = {n: t.to(device) for n, t in part(tensors, "average.").items()}
        for name in PLAIN:
            setattr(self, name, info[name])

    def add_to_average(self) -> None:
        """Add the weights to the mean of the last weights."""
        weights = {n: t for n, t in self.model.state_dict().items() if t.is_floating_point()}
        self.averaged += 1
        if self.averaged == 1:
            self.average = {name: tensor.clone() for name, tensor in weights.items()}
        else:
            compat.lerp_(list(self.average.values()), list(weights.values()), 1 / self.averaged)

    def drop_average(self) -> None:
        self.average = {}
        self.averaged = 0

    def keep_best(self, metrics: Dict[str, float]) -> bool:
        """Keep a copy of the weights if this validation is the best so far. Returns whether it
        is.
        """
        if self.best is not None and metrics["f1"] <= self.best:
            return False
        self.best = metrics["f1"]
        self.best_step = self.step
        self.best_metrics = metrics
        weights = {**self.model.state_dict(), **self.average}
        self.best_weights = {k: v.detach().cpu().clone() for k, v in weights.items()}
        return True

    def compare_ranks(self, is_main: bool) -> None:
        """Compare weights and optimiser of all ranks, to the bit. All ranks call it.

        Raises WorkError on rank 0, SystemExit on the others, if they differ.
        """
        own = self._checksum() if distributed.several() else 0
        first, *others = distributed.all_gather(own)
        wrong = [f"rank {rank}" for rank, other in enumerate(others, 1) if other != first]
        if wrong and not is_main:
            raise SystemExit(1)
        if wrong:
            raise WorkError(
                f"step {self.step}: weights or optimiser of {', '.join(wrong)} differ from those of"
                " rank 0: memory or network may be at fault. No checkpoint of this step was saved;"
                " the same command resumes from the previous one"
            )

    def _checksum(self) -> int:
        """CRC-32 of parameters and optimiser. Buffers may differ: statistics are not always
        synchronised.
        """
        tensors = {**dict(self.model.named_parameters()), **optimizer_tensors(self.optimizer)}
        crc = 0
        for _, tensor in sorted(tensors.items()):
            crc = zlib.crc32(tensor.detach().cpu().contiguous().numpy().data, crc)
        return crc


def part(tensors: Mapping[str, Tensor], prefix: str) -> Dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


# The files of a training: step-00000100.safetensors, of which the newest two stay, and best.


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write the checkpoint of `step`, then delete all but the newest two.

    One process at a time writes in the folder.
    """
    for partial in folder.glob(".*.tmp"):  # killed writers leave these, which would fill the disk
        partial.unlink(missing_ok=True)
    save_model_file(folder / f"step-{step:08d}.safetensors", tensors, info)
    for old in _newest_first(folder)[2:]:
        old.with_suffix(".json").unlink(missing_ok=True)
        old.unlink(missing_ok=True)


def save_best(folder: Path, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Replace the best model."""
    save_model_file(folder / BEST, tensors, info)


def load_newest(folder: Path) -> Tuple[Optional[Saved], List[str]]:
    """The newest undamaged checkpoint, or None, and one line for each newer damaged one."""
    warnings: List[str] = []
    for path in _newest_first(folder):
        try:
            return load_model_file(path), warnings
        except BadCheckpoint as error:
            warnings.append(str(error))
    return None, warnings


def _newest_first(folder: Path) -> List[Path]:
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def publish(folder: Path, out: Path) -> None:
    """Copy the best model in `folder`, its description and list of photographs, to `out`."""
    for partial in out.glob(".*.tmp"):
        partial.unlink(missing_ok=True)
    best = folder / BEST
    for source in (trained_on.list_of(best), best.with_suffix(".json"), best):
        target = out / source.name
        content = source.read_bytes()
        if not target.is_file() or target.read_bytes() != content:
            write_atomic(target, content)


# Which training it is: parameters and data, which name its folder.


def describe(train: TrainParams) -> Dict[str, Any]:
    """The section as JSON values. `init_from` is the name of the file, whose digest is beside it in
    the fingerprint.
    """
    return {**train.model_dump(), "init_from": Path(train.init_from).name}


def fingerprint(train: TrainParams, run: RunParams, data: str, world_size: int) -> Fingerprint:
    """Parameters and data (their digest), by which runs of one training are compared.

    Keys of `run` are included only where they decide more than rounding: those that determine the
    pairs of a step and the learning rate, with the number of processes, and the parts over which
    BatchNorm takes its statistics.
    """
    values = {f"train.{key}": value for key, value in describe(train).items()}
    values["data"] = data
    if train.init_from:
        values["initial_weights"] = file_sha256(train.init_from)[:16]
    if run.batch_per_rank or run.lr_scaling != "none":
        by_process = {"batch_per_rank": run.batch_per_rank, "lr_scaling": run.lr_scaling}
        values.update(by_process, world_size=world_size)
    if train.norm == "batch":
        values["accumulate"] = run.accumulate
    return values


def name_of(values: Fingerprint) -> str:
    """The name of a training, on any machine and for any version of the code."""
    return json_digest({key: value for key, value in values.items() if key not in FREE})


def changed_keys(saved: Fingerprint, ours: Fingerprint) -> List[str]:
    """The keys that differ."""
    return [key for key in sorted({*saved, *ours}) if saved.get(key) != ours.get(key)]


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


def versions() -> Dict[str, str]:
    """Versions of the packages that compute, and of this code."""
    return {**provenance.pin(provenance.COMPUTING), CODE: provenance.code_version()}


def without_code(versions: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Versions of the packages alone: the best model is the same file at any commit that computes
    the same.
    """
    kept: List[Dict[str, Any]] = []
    for each in versions:
        packages = {name: version for name, version in each.items() if name != CODE}
        if not kept or {**packages, "step": 0} != {**kept[-1], "step": 0}:
            kept.append(packages)
    return kept


def other_versions(info: Dict[str, Any]) -> str:
    """How the last `versions` of a checkpoint or best model differ from ours: `torch 2.4.0 (now
    2.13.0)`, or "".
    """
    now = versions()
    before = info["versions"][-1]
    names = [name for name in sorted(now) if name in before and before[name] != now[name]]
    return ", ".join(f"{name} {before[name]} (now {now[name]})" for name in names)


# Where a training starts.


def find_start(
    args: argparse.Namespace, ours: Fingerprint, writes: bool
) -> Tuple[Path, Optional[Dict[str, Any]], Optional[Saved]]:
    """The folder of the training that `args` ask for, and what it starts from. All ranks call it.

    Nodes may have folders of their own: all ranks take the checkpoint of most steps.

    Args:
        writes: whether this rank writes the checkpoints in `args.out`.

    Returns:
        The folder; the description of its best model if it is finished; and the checkpoint to start
        from, or None.
    """
    name = name_of(ours)
    number = max(distributed.all_gather(_last_number(args.out, name)))
    # In a restarted training `--fresh` has taken effect already
    restarted = any(int(os.environ.get(count, "0")) for count in RESTARTS)
    fresh = args.fresh and not distributed.any_rank(restarted)
    number = number + 1 if fresh else max(number, 1)
    folder = _folder(args.out, name, number)
    best = distributed.broadcast(None if fresh else _find_finished(folder, args, name))
    if best:
        return folder, best, None
    saved, warnings = load_newest(folder) if writes else (None, [])
    for warning in warnings:
        print(f"warning: {warning}; {'the previous one is used' if saved else 'there is no other'}")
    source = _find_furthest(saved)
    if source is None and distributed.any_rank(bool(warnings)):
        folder = _folder(args.out, name, number + 1)  # the damaged files stay as they are
    if source is None and args.continued:
        saved = load_to_continue(args.continued, ours) if writes else None
        source = _find_furthest(saved)
    if writes:
        # also before the first checkpoint: a restart goes on in it
        folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        return folder, None, None
    tensors, info = saved or ({}, {})
    # copies: what is sent of a tensor is all of its memory, which may be the whole file's
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors, info = distributed.broadcast((tensors, info), source)
    if writes and not (folder / f"step-{info['step']:08d}.safetensors").is_file():
        # the checkpoint is another training's, or this node with a folder of its own lacks it
        save(folder, info["step"], tensors, info)
    return folder, None, (tensors, info)


def load_to_continue(folder: Path, ours: Fingerprint) -> Saved:
    """The newest checkpoint in the folder of another training, which ours continues.

    Raises RequestError if there is none, or if more than the schedule differs.
    """
    saved, _ = load_newest(folder)
    if saved is None:
        raise RequestError(f"--continue {folder}: there is no undamaged checkpoint step-*")
    info = saved[1]
    allowed = FREE | {f"train.{key}" for key in SCHEDULE}
    wrong = [key for key in changed_keys(info["fingerprint"], ours) if key not in allowed]
    if wrong:
        before = info["fingerprint"].get(wrong[0])
        raise RequestError(
            f"--continue {folder}: it was trained with {wrong[0]}: {before}, not"
            f" {ours.get(wrong[0])}; only"
            f" train.{', '.join(SCHEDULE)} may differ"
        )
    if info["step"] > ours["train.steps"]:
        raise RequestError(
            f"--continue {folder}: it has {info['step']} steps; raise train.steps above them"
        )
    return saved


def _folder(out: Path, name: str, number: int) -> Path:
    return out / (name if number == 1 else f"{name}-{number}")


def _last_number(out: Path, name: str) -> int:
    """How often the training was begun in `out`."""
    found = [re.fullmatch(rf"{name}(?:-(\d+))?", path.name) for path in out.glob(f"{name}*/")]
    return max((int(match.group(1) or 1) for match in found if match), default=0)


def _find_finished(folder: Path, args: argparse.Namespace, name: str) -> Optional[Dict[str, Any]]:
    """Description of the finished best model in `folder`, or of the published one, or None."""
    if not folder.is_dir():  # as after `dvc pull`: outputs are there, checkpoints are not
        if not (args.reports / "curves").is_dir():
            return None
        folder = args.out
    with contextlib.suppress(FileNotFoundError, BadCheckpoint):
        info = load_model_file(folder / BEST)[1]
        if info.get("finished") and info["training"] == name:
            return info
    return None


def _find_furthest(saved: Optional[Saved]) -> Optional[int]:
    """The first rank with the checkpoint of most steps; None if no rank has one."""
    steps = distributed.all_gather(saved[1]["step"] if saved else -1)
    return steps.index(max(steps)) if max(steps) >= 0 else None
