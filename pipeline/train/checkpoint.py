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
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, FrozenSet, List, Optional, Tuple

import torch
from torch import Tensor

from pipeline import distributed, provenance
from pipeline.errors import RequestError, read_environment_number
from pipeline.params import RunParams, TrainParams
from pipeline.train.optimizer import collect_optimizer_tensors, restore_optimizer
from superglue_sift import torch_compat
from superglue_sift.files import compute_file_sha256, compute_json_digest, write_atomic, write_json
from superglue_sift.network.superglue import SuperGlue
from superglue_sift.network.weights import BadCheckpoint, load_model_file, save_model_file

BEST = "best.safetensors"
# Fields of TrainState that a checkpoint stores as JSON
PLAIN_FIELDS = ("step", "best_step", "best_metrics", "skipped", "averaged")
# Environment variables: how often the launcher, torchrun, or SLURM has started this training again.
RESTART_VARIABLES = ("SG_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
# Keys that `--continue` may change: when and on what the weights are validated, and the schedule.
VALIDATION = ("validation", "train.val_every", "train.val_pairs")
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

    def compute_digests(self) -> Dict[str, str]:
        """Return a SHA-256 of each part of the state, which is the same on every rank.

        The best weights are a copy of weights that were compared before.
        """
        plain = {name: getattr(self, name) for name in PLAIN_FIELDS}
        return {
            "weights": hash_tensors(self.model.state_dict()),
            "values of the optimizer": hash_tensors(collect_optimizer_tensors(self.optimizer)),
            "averaged weights": hash_tensors(self.average),
            "counts of steps": compute_json_digest({**plain, "scaler": self.scaler.state_dict()}),
        }

    def collect_changing_tensors(self) -> Tensors:
        """Return the optimizer's values and the average, which a change in place changes."""
        values = {
            f"{index}.{name}": value
            for index, state in enumerate(self.optimizer.state.values())
            for name, value in state.items()
            if torch.is_tensor(value) and value.dim()
        }
        return {**values, **self.average}

    def collect_tensors(self) -> Tensors:
        """Return everything in the state that is a tensor, by name."""
        kinds = {
            "model.": self.model.state_dict(),
            "optimizer.": collect_optimizer_tensors(self.optimizer),
            "best.": self.best_weights,
            "average.": self.average,
            "rng.": {"cpu": torch.get_rng_state()},
        }
        return {
            prefix + name: value
            for prefix, values in kinds.items()
            for name, value in values.items()
        }

    def collect_info(self) -> Info:
        """Return everything in the state that is no tensor, as JSON values."""
        plain = {name: getattr(self, name) for name in PLAIN_FIELDS}
        return {"model": self.model.config.to_dict(), **plain, "scaler": self.scaler.state_dict()}

    def restore(self, tensors: Tensors, info: Info) -> None:
        """Load the state from what `collect_tensors` and `collect_info` returned."""
        self.model.load_state_dict(select_by_prefix(tensors, "model."))
        restore_optimizer(self.optimizer, select_by_prefix(tensors, "optimizer."))
        torch.set_rng_state(tensors["rng.cpu"])
        if info["scaler"]:  # it is empty if the checkpoint was saved in a precision without scaling
            self.scaler.load_state_dict(info["scaler"])
        self.best_weights = select_by_prefix(tensors, "best.")
        device = self.model.dustbin.device
        self.average = {n: t.to(device) for n, t in select_by_prefix(tensors, "average.").items()}
        for name in PLAIN_FIELDS:
            setattr(self, name, info[name])

    def add_to_average(self) -> None:
        """Add the current weights to the mean of the weights of the last steps."""
        weights = {n: t for n, t in self.model.state_dict().items() if t.is_floating_point()}
        self.averaged += 1
        if self.averaged == 1:
            self.average = {name: tensor.clone() for name, tensor in weights.items()}
        else:
            # Look up each name, because a checkpoint gives its tensors back in another order.
            means = [self.average[name] for name in weights]
            torch_compat.interpolate_in_place(means, list(weights.values()), 1 / self.averaged)

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

    def keep_if_best(self, metrics: Metrics) -> bool:
        """Keep a copy of the weights if this validation is the best so far, and return whether."""
        if self.best_metrics and metrics["f1"] <= self.best_metrics["f1"]:
            return False
        self.best_step = self.step
        self.best_metrics = metrics
        weights = {**self.model.state_dict(), **self.average}
        self.best_weights = {k: v.detach().cpu().clone() for k, v in weights.items()}
        return True


def hash_tensors(tensors: Tensors) -> str:
    """Return the SHA-256 of the names and the bytes of tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def select_by_prefix(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with `prefix`. Remove the prefix from the names."""
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


# --- the files of a training


def save(folder: Path, step: int, tensors: Tensors, info: Info) -> None:
    """Write the checkpoint of `step`, then delete all but the newest two checkpoints.

    Only one process at a time may write in the folder.
    """
    save_model_file(folder / f"step-{step:08d}.safetensors", tensors, info)
    for old in _list_newest_first(folder)[2:]:
        _delete_checkpoint(old)


def load_newest(folder: Path, repair: bool = False) -> Optional[Saved]:
    """Return the newest undamaged checkpoint, or None if there is no checkpoint.

    The newest two checkpoints stay in the folder. With `repair`, damaged checkpoints newer than the
    returned one are deleted, so that they do not count as one of the two. Files that could not be
    read stay, since they may be whole.

    Raises:
        RequestError: If all are damaged.
    """
    paths = _list_newest_first(folder)
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
                _delete_checkpoint(other)
                print(f"deleted {other}, and starting from {path.name}")
            return saved
    if paths:
        raise RequestError(f"{folder}: all checkpoints are damaged; --fresh trains in a new folder")
    return None


def _delete_checkpoint(path: Path) -> None:
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _list_newest_first(folder: Path) -> List[Path]:
    """Return the checkpoints in a folder, from the last step to the first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def save_and_publish_best(
    folder: Path,
    out: Path,
    tensors: Tensors,
    info: Info,
    photographs: Optional[FrozenSet[str]],
    origin: Info,
) -> None:
    """Replace the best model in `folder` by these tensors, described by `info`, and publish it.

    `photographs` are those that it was trained on. `origin` has what no later stage depends on: the
    digests of the code, and of the curves of a finished training.
    """
    best = folder / BEST
    provenance.write_photographs(best, photographs)
    write_json(get_origin_path(best), origin)
    save_model_file(best, tensors, info)
    publish_best(folder, out)


def get_origin_path(model: Path) -> Path:
    """Return the file that says by what code a model was trained, next to the file of the model."""
    return model.with_suffix(".origin.json")


def publish_best(folder: Path, out: Path) -> None:
    """Copy the best model in `folder`, with the files that describe it, to `out`."""
    best = folder / BEST
    files = (
        provenance.get_photographs_path(best),
        get_origin_path(best),
        best.with_suffix(".json"),
        best,
    )
    for source in files:
        write_atomic(out / source.name, source.read_bytes())


# --- which training it is: parameters and data name its folder


def describe_parameters(train: TrainParams) -> Info:
    """Return the section as JSON values.

    `init_from` becomes the name of the file. The fingerprint has the digest of its content as well.
    """
    return {**train.model_dump(), "init_from": Path(train.init_from).name}


def make_fingerprint(
    train: TrainParams, run: RunParams, data: str, validation: str, world_size: int
) -> Info:
    """Return the parameters and the digests of the data, which tell one training from another.

    They decide the weights of every step, and which of these weights are kept. A key of `run` is
    included only if it decides more than rounding. Such a key determines the pairs of a step and
    the learning rate (together with the number of processes), or the parts over which BatchNorm
    takes its statistics. What `run.allow_training_images` decides is in the validation pairs.

    Args:
        data: digest of the training keypoints.
        validation: digest of the validation pairs.
    """
    # Include all keys of `train`, and the content of the data and of the initial weights.
    values = {f"train.{key}": value for key, value in describe_parameters(train).items()}
    values.update(data=data, validation=validation)
    if train.init_from:
        values["initial_weights"] = compute_file_sha256(train.init_from)[:16]
    # Include keys of `run` that decide the steps.
    if run.batch_per_rank or run.lr_scaling != "none":
        values.update(
            batch_per_rank=run.batch_per_rank, lr_scaling=run.lr_scaling, world_size=world_size
        )
    if train.norm == "batch":
        values["accumulate"] = run.accumulate
    return values


def name_training(values: Info) -> str:
    """Return the name of a training, the same on any machine and for any version of the code."""
    return compute_json_digest(values)


def list_changed_keys(saved: Info, ours: Info) -> List[str]:
    """Return the keys whose values differ between the two fingerprints, sorted."""
    return [key for key in sorted({*saved, *ours}) if saved.get(key) != ours.get(key)]


def check_ranks_agree(ours: Info, is_main: bool) -> None:
    """Check that parameters, data and code of all ranks are equal.

    If they differ, raises RequestError on rank 0 and SystemExit on the other ranks.
    """
    first, *others = distributed.all_gather(ours)
    for rank, other in enumerate(others, 1):
        for key in list_changed_keys(first, other):
            if not is_main:
                raise SystemExit(2)
            raise RequestError(
                f"rank {rank} has {key}: {other.get(key)}, rank 0 {first.get(key)}; give every node"
                " the same parameters, keypoints and code"
            )


# --- where a training starts


def is_restart() -> bool:
    """Return whether the launcher, torchrun or SLURM has started this training again."""
    return any(read_environment_number(name, 0) for name in RESTART_VARIABLES)


def find_folder(args: argparse.Namespace, ours: Info) -> Path:
    """Return the folder of the training whose fingerprint is `ours`. All ranks call this together.

    With `--fresh` it is a new one.
    """
    # A training that was started again has its new folder, so `--fresh` makes no other one.
    name = name_training(ours)
    number = max(distributed.all_gather(_find_last_number(args.out, name)))
    number = number + 1 if is_fresh(args) else max(number, 1)
    return args.out / (name if number == 1 else f"{name}-{number}")


def is_fresh(args: argparse.Namespace) -> bool:
    """Return whether a training begins again by `--fresh`. All ranks call this together."""
    return args.fresh and not distributed.is_true_on_any_rank(is_restart())


def load_start(args: argparse.Namespace, folder: Path, ours: Info, writes: bool) -> Optional[Saved]:
    """Return the checkpoint that the training in `folder` starts from, or None.

    All ranks call this together. Nodes may have folders of their own: all ranks take the checkpoint
    with the most steps.

    Args:
        ours: the fingerprint of the training.
        writes: whether this rank writes the checkpoints in `args.out`.
    """
    # Load the newest checkpoint, or the newest checkpoint of the training to continue.
    saved = load_newest(folder, repair=True) if writes else None
    if args.continued and not distributed.is_true_on_any_rank(saved is not None):
        saved = load_to_continue(args.continued, ours) if writes else None
    if writes:
        # The folder is made before the first checkpoint, so that a restart finds it.
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder, args.out):  # a killed writer leaves files that would fill the disk
            for partial in place.glob(".*.tmp"):
                partial.unlink(missing_ok=True)
    steps = distributed.all_gather(saved[1]["step"] if saved else -1)
    if max(steps) < 0:
        return None

    # Send all ranks the checkpoint with the most steps.
    tensors, info = saved or ({}, {})
    # Clone the tensors, since sending one sends all of its memory, which may be that whole file.
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors, info = distributed.broadcast((tensors, info), steps.index(max(steps)))
    if writes and not (folder / f"step-{info['step']:08d}.safetensors").is_file():
        # The checkpoint belongs to another training, or it is missing in this node's own folder.
        save(folder, info["step"], tensors, info)
    return tensors, info


def find_related_training(out: Path, ours: Info) -> str:
    """Return a line about a training in `out` that only is validated otherwise, or "".

    A user who edits `val_every` during a training may want to go on, and not to begin again.
    """
    for folder in sorted(path.parent for path in out.glob("*/step-*.json")):
        path = max(folder.glob("step-*.json"))
        info = json.loads(path.read_text(encoding="utf-8"))
        changed = list_changed_keys(info.get("fingerprint", {}), ours)
        if set(changed) <= set(VALIDATION) and info["step"] < ours["train.steps"]:
            names = ", ".join(changed)
            return (
                f"{folder} differs only in {names}: --continue {folder} goes on from its step"
                f" {info['step']}"
            )
    return ""


def load_to_continue(folder: Path, ours: Info) -> Saved:
    """Return the newest checkpoint in the folder of another training, which `ours` continues.

    Raises:
        RequestError: If there is no checkpoint, or if more than the schedule differs.
    """
    saved = load_newest(folder)
    if saved is None:
        raise RequestError(f"--continue {folder}: there is no checkpoint step-*")
    info = saved[1]
    # A longer training may have another schedule, and nothing else.
    if "history" not in info:
        raise RequestError(f"--continue {folder}: an earlier version of this program wrote it")
    allowed = {*VALIDATION, *(f"train.{key}" for key in SCHEDULE)}
    wrong = [key for key in list_changed_keys(info["fingerprint"], ours) if key not in allowed]
    if wrong:
        before = info["fingerprint"].get(wrong[0])
        raise RequestError(
            f"--continue {folder}: it was trained with {wrong[0]}: {before}, not"
            f" {ours.get(wrong[0])}; only"
            f" train.{', '.join(SCHEDULE)} and the validation may differ"
        )
    if info["step"] >= ours["train.steps"]:
        raise RequestError(
            f"--continue {folder}: it has {info['step']} steps; raise train.steps above them"
        )
    # The average of the last steps can begin with the weights of the checkpoint, not before them.
    first = compute_first_averaged_step(ours)
    if first < info["step"] and first != compute_first_averaged_step(info["fingerprint"]):
        most = ours["train.steps"] - info["step"] + 1
        raise RequestError(
            f"--continue {folder}: train.average = {ours['train.average']} needs weights of steps"
            f" before its last one, {info['step']}; set it to at most {most}, or raise train.steps"
        )
    return saved


def compute_first_averaged_step(values: Info) -> int:
    """Return the first step whose weights are averaged, from the fingerprint of a training."""
    return values["train.steps"] - values["train.average"] + 1


def _find_last_number(out: Path, name: str) -> int:
    """Return the number of the training's newest folder in `out`, or 0 if it has none."""
    found = [re.fullmatch(rf"{name}(?:-(\d+))?", path.name) for path in out.glob(f"{name}*/")]
    return max((int(match.group(1) or 1) for match in found if match), default=0)


def find_finished_training(args: argparse.Namespace, folder: Path, ours: Info) -> Optional[Info]:
    """Return the description of the best model if the training in `folder` is finished, or None.

    It is searched in `folder`, or among the published files if that folder does not exist.

    Raises:
        RequestError: other code trained it, or its curves are gone. One entry of dvc.lock, which
            has the digests of the code and of the curves, must stand for one model.
    """
    # After `dvc pull` the outputs are there, but the checkpoints are not.
    home = folder if folder.is_dir() else args.out
    try:
        info = load_model_file(home / BEST)[1]
    except (FileNotFoundError, BadCheckpoint):
        return None
    if not info.get("finished") or info["training"] != name_training(ours):
        return None
    # Compare the code.
    path = get_origin_path(home / BEST)
    origin = json.loads(path.read_text()) if path.is_file() else {"code": {}, "curves": {}}
    again = "`python -m pipeline.launch pipeline.train --fresh` trains again"
    files = list_changed_keys(origin["code"], provenance.compute_code_digests("train"))
    if files:
        names = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        raise RequestError(
            f"{home / BEST}: this training is finished, and its code has changed since: {names}."
            f" {again}, `dvc commit -f train` keeps the model if the change alters no output"
        )
    # Compare the curves that are there, if no checkpoint has them.
    if not any(folder.glob("step-*.safetensors")):
        present = {
            name: compute_file_sha256(args.reports / "curves" / name)
            for name in origin["curves"]
            if (args.reports / "curves" / name).is_file()
        }
        if present != origin["curves"]:
            raise RequestError(
                f"{args.reports / 'curves'}: not those of the finished training in {home / BEST},"
                f" whose checkpoints are gone; `dvc checkout` restores them, {again}"
            )
    return info


def list_package_versions(history: List[Info]) -> List[Info]:
    """Return the versions of packages from the history of a training, an entry for each change."""
    versions: List[Info] = []
    for entry in history:
        packages = {k: v for k, v in entry.items() if k not in ("precision", "processes", "code")}
        changed = list_changed_keys(versions[-1], packages) if versions else packages
        if set(changed) - {"step"}:
            versions.append(packages)
    return versions
