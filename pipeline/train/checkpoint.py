"""Save and load the state of a training, and find where a training starts.

checkpoints/<name>/      step-*, best.*: a training. The name is a digest of its parameters and data
checkpoints/<name>-2/    the same training once more, by `--fresh`
checkpoints/best.*       a copy of the best model of the training that ran last, for DVC and the
                         later stages

A training whose folder exists is resumed, unless it is finished. `--continue FOLDER` begins from
the newest checkpoint of another training, with a longer schedule. Nothing in the folder of another
training changes.
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
from pipeline.errors import RequestError, WorkError, read_environment_number
from pipeline.params import RunParams, TrainParams, flatten
from pipeline.train.optimizer import collect_optimizer_tensors, restore_optimizer
from superglue_sift import torch_compat
from superglue_sift.files import compute_file_sha256, compute_json_digest, write_atomic, write_json
from superglue_sift.network.superglue import SuperGlue
from superglue_sift.network.weights import BadCheckpoint, load_model_file, save_model_file

BEST = "best.safetensors"
# Fields of TrainState that a checkpoint stores as JSON
PLAIN_FIELDS = ("step", "best_step", "best_metrics", "skipped", "averaged")
# Environment variables that say how often the launcher, torchrun, or SLURM has started this
# training again.
RESTART_VARIABLES = ("SG_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
# Keys that `--continue` may change: on what and when the weights are validated, and the schedule
VALIDATION = ("validation", "train.val_every", "train.val_pairs")
SCHEDULE = ("average", "decay_start", "lr", "schedule", "steps", "warmup_steps")

# Largest relative difference between the weights of ranks on unlike devices
DRIFT = 0.01

Tensors = Dict[str, Tensor]
Info = Dict[str, Any]  # JSON values
Metrics = Dict[str, float]
Saved = Tuple[Tensors, Info]  # A checkpoint


@dataclass
class TrainState:
    """The state of one training, which a checkpoint holds.

    Attributes:
        model: the network.
        optimizer: its optimizer.
        scaler: torch's GradScaler.
        step: number of steps of the optimizer so far.
        best_step: step of the validation with the largest F1.
        best_metrics: metrics of that validation.
        best_weights: weights of that validation, in the memory of the host.
        average: mean of the weights of the last steps.
        averaged: number of steps in `average`.
        skipped: number of steps that were not applied because the gradient was not finite.
    """

    model: SuperGlue
    optimizer: Any
    scaler: Any
    step: int = 0
    best_step: int = 0
    best_metrics: Metrics = field(default_factory=dict)
    best_weights: Tensors = field(default_factory=dict)
    average: Tensors = field(default_factory=dict)
    averaged: int = 0
    skipped: int = 0

    def compute_digests(self) -> Dict[str, str]:
        """Return the SHA-256 of each part of the state that all ranks have to share, by its name.

        The best weights are not among them: they are a copy of weights that were compared before.
        """
        plain = {name: getattr(self, name) for name in PLAIN_FIELDS}
        return {
            "weights": hash_tensors(self.model.state_dict()),
            "values of the optimizer": hash_tensors(collect_optimizer_tensors(self.optimizer)),
            "averaged weights": hash_tensors(self.average),
            "counts of steps": compute_json_digest({**plain, "scaler": self.scaler.state_dict()}),
        }

    def collect_changing_tensors(self) -> Tensors:
        """Return the tensors of the optimizer and of the average. They are no copies."""
        values = {
            f"{index}.{name}": value
            for index, state in enumerate(self.optimizer.state.values())
            for name, value in state.items()
            if torch.is_tensor(value) and value.dim()
        }
        return {**values, **self.average}

    def collect_tensors(self) -> Tensors:
        """Return all tensors of the state, by name."""
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
        """Return all of the state that is no tensor, as JSON values."""
        plain = {name: getattr(self, name) for name in PLAIN_FIELDS}
        return {"model": self.model.config.to_dict(), **plain, "scaler": self.scaler.state_dict()}

    def restore(self, tensors: Tensors, info: Info) -> None:
        """Set the state to what `collect_tensors` and `collect_info` returned."""
        self.model.load_state_dict(select_by_prefix(tensors, "model."))
        restore_optimizer(self.optimizer, select_by_prefix(tensors, "optimizer."))
        torch.set_rng_state(tensors["rng.cpu"])
        if info["scaler"]:  # Empty if the checkpoint was saved in a precision without scaling
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

    def begin_average(self, first_step: int, is_same_average: bool) -> None:
        """Keep the average of a checkpoint, or begin a new one.

        Args:
            first_step: the first step whose weights are averaged. If it is the step of the
                checkpoint, its weights begin the average. Weights of earlier steps are gone.
            is_same_average: whether the checkpoint has the average from that step on.
        """
        if is_same_average:
            return
        self.average = {}
        self.averaged = 0
        if self.step == first_step:
            self.add_to_average()

    def keep_if_best(self, metrics: Metrics) -> bool:
        """Keep a copy of the weights if their validation is the best so far, and return whether.

        Args:
            metrics: metrics of the current weights, or of their average.
        """
        if self.best_metrics and metrics["f1"] <= self.best_metrics["f1"]:
            return False
        self.best_step = self.step
        self.best_metrics = metrics
        weights = {**self.model.state_dict(), **self.average}
        self.best_weights = {k: v.detach().cpu().clone() for k, v in weights.items()}
        return True


def hash_tensors(tensors: Tensors) -> str:
    """Return the SHA-256 of the names and the bytes of tensors, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def select_by_prefix(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with `prefix`, by their names without the prefix."""
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


def align_and_check_replicas(state: TrainState, is_main: bool, alike: bool = True) -> None:
    """Check that all ranks have the same weights and the same state of the optimizer, to the bit.

    All ranks call this together, before anything of a step is saved. Unlike devices round
    differently. On these, rank 0's values replace those of the other ranks first, and only a
    difference above DRIFT is an error.

    Args:
        state: the state of the training.
        is_main: whether this is rank 0.
        alike: whether the ranks have devices of one kind.

    Raises:
        WorkError: If the ranks differ. The error names them. On other ranks than 0 this is
            SystemExit.
    """
    has_drifted = False
    if not alike:
        has_drifted = distributed.copy_from_main(state.model.state_dict()) > DRIFT
        distributed.copy_from_main(state.collect_changing_tensors())
    digests = state.compute_digests()
    if has_drifted:
        digests["weights"] = "far from those of rank 0"
    rank_digests = distributed.all_gather(digests)
    for part_name in rank_digests[0]:
        digests = [digests[part_name] for digests in rank_digests]
        # If there are two ranks, the digest of rank 0 counts as the common one.
        common_digest = max(digests, key=digests.count)
        differing_ranks = [
            str(rank) for rank, digest in enumerate(digests) if digest != common_digest
        ]
        if differing_ranks and not is_main:
            raise SystemExit(1)
        if differing_ranks:
            several = len(differing_ranks) > 1
            who = f"{'ranks' if several else 'rank'} {' and '.join(differing_ranks)}"
            raise WorkError(
                f"step {state.step}: {who} of {len(rank_digests)} {'have' if several else 'has'}"
                f" other {part_name} than most ranks, so nothing of this step is saved; the same"
                " command resumes from the newest checkpoint"
            )


# --- the files of a training


def save(folder: Path, step: int, tensors: Tensors, info: Info) -> None:
    """Write the checkpoint of a step, then delete all but the newest two checkpoints.

    Only one process at a time may write in the folder.

    Args:
        folder: the folder of the training.
        step: number of steps so far, which names the file.
        tensors: the tensors to save.
        info: everything else, as JSON values.
    """
    save_model_file(folder / f"step-{step:08d}.safetensors", tensors, info)
    for path in _list_newest_first(folder)[2:]:
        _delete_checkpoint(path)


def load_newest(folder: Path, repair: bool = False) -> Optional[Saved]:
    """Load the newest undamaged checkpoint, and return it, or None if there is no checkpoint.

    Args:
        folder: the folder of the training.
        repair: whether to delete damaged checkpoints that are newer than the returned one, so that
            they do not count as one of the two that `save` keeps. Files that could not be read
            stay, since they may be whole.

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
            for damaged_path in damaged if repair else ():
                _delete_checkpoint(damaged_path)
                print(f"deleted {damaged_path}, and starting from {path.name}")
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
    """Write the best model and the files that describe it, and copy them to `out`.

    Args:
        folder: the folder of the training.
        out: the folder of the published files, for DVC and the later stages.
        tensors: the weights.
        info: the description of the model, as JSON values.
        photographs: identifiers of the photographs that it was trained on, or None if they are not
            known.
        origin: what no later stage depends on, as JSON values: the digests of the code, and of the
            curves of a finished training.
    """
    best = folder / BEST
    provenance.write_photographs(best, photographs)
    write_json(get_origin_path(best), origin)
    save_model_file(best, tensors, info)
    publish_best(folder, out)


def get_origin_path(model: Path) -> Path:
    """Return the path of the file that says by what code a model was trained, next to the model."""
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
    """Return the section `train` as JSON values, with the file name of `init_from` alone.

    The fingerprint has the digest of the content of that file.
    """
    return {**train.model_dump(), "init_from": Path(train.init_from).name}


def make_fingerprint(
    train: TrainParams, run: RunParams, data: str, validation: str, world_size: int
) -> Info:
    """Return the parameters and the digests of the data, which tell one training from another.

    They decide the weights of every step, and which of these weights are kept. A key of `run` is
    included only if it decides more than rounding: the pairs of a step, the learning rate, or the
    parts over which BatchNorm takes its statistics. What `run.allow_training_images` decides is in
    the validation pairs.

    Args:
        train: the section `train`.
        run: the section `run`.
        data: digest of the training keypoints.
        validation: digest of the validation pairs.
        world_size: number of processes.
    """
    values = flatten(describe_parameters(train), "train.")
    values.update(data=data, validation=validation)
    if train.init_from:
        values["initial_weights"] = compute_file_sha256(train.init_from)[:16]
    if run.batch_per_rank or run.lr_scaling != "none":
        values.update(
            batch_per_rank=run.batch_per_rank, lr_scaling=run.lr_scaling, world_size=world_size
        )
    if train.model.norm == "batch":
        values["accumulate"] = run.accumulate
    return values


def name_training(fingerprint: Info) -> str:
    """Return the name of a training, which is the same on any machine and for any code."""
    return compute_json_digest(fingerprint)


def list_changed_keys(before: Info, after: Info) -> List[str]:
    """Return the keys whose values differ between two records of JSON values, sorted."""
    return [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]


def check_ranks_agree(request: Info, is_main: bool) -> None:
    """Check that parameters, data and code of all ranks are equal. All ranks call this together.

    Args:
        request: the parameters and the digests of data and code of this rank.
        is_main: whether this is rank 0.

    Raises:
        RequestError: If they differ. On other ranks than 0 this is SystemExit.
    """
    main_request, *other_requests = distributed.all_gather(request)
    for rank, rank_request in enumerate(other_requests, 1):
        for key in list_changed_keys(main_request, rank_request):
            if not is_main:
                raise SystemExit(2)
            raise RequestError(
                f"rank {rank} has {key}: {rank_request.get(key)}, rank 0 {main_request.get(key)};"
                " give every node the same parameters, keypoints and code"
            )


# --- where a training starts


def is_restart() -> bool:
    """Return whether the launcher, torchrun or SLURM has started this training again."""
    return any(read_environment_number(name, 0) for name in RESTART_VARIABLES)


def find_folder(args: argparse.Namespace, fingerprint: Info) -> Path:
    """Return the folder of a training, a new one with `--fresh`. All ranks call this together.

    Args:
        args: the command line.
        fingerprint: the fingerprint of the training.
    """
    name = name_training(fingerprint)
    number = max(distributed.all_gather(_find_last_number(args.out, name)))
    number = number + 1 if is_fresh(args) else max(number, 1)
    return args.out / (name if number == 1 else f"{name}-{number}")


def is_fresh(args: argparse.Namespace) -> bool:
    """Return whether a training begins again by `--fresh`. All ranks call this together.

    A training that the launcher has started again has its new folder already, and so does not.
    """
    return args.fresh and not distributed.is_true_on_any_rank(is_restart())


def load_start(
    args: argparse.Namespace, folder: Path, fingerprint: Info, is_writer: bool
) -> Optional[Saved]:
    """Load the checkpoint that a training starts from, on every rank, and return it or None.

    All ranks call this together. Nodes may have folders of their own: all ranks take the checkpoint
    with the most steps. A rank that writes also creates the folder, deletes what a killed writer
    has left, and saves the checkpoint if its folder lacks it.

    Args:
        args: the command line.
        folder: the folder of the training.
        fingerprint: the fingerprint of the training.
        is_writer: whether this rank writes the checkpoints in `args.out`.

    Raises:
        RequestError: If all checkpoints are damaged, or if the one to continue does not fit.
    """
    saved = load_newest(folder, repair=True) if is_writer else None
    if args.continued and not distributed.is_true_on_any_rank(saved is not None):
        saved = load_to_continue(args.continued, fingerprint) if is_writer else None
    if is_writer:
        # The folder is made before the first checkpoint, so that a restart finds it.
        folder.mkdir(parents=True, exist_ok=True)
        # A killed writer leaves files that would fill the disk.
        for directory in (folder, args.out):
            for partial in directory.glob(".*.tmp"):
                partial.unlink(missing_ok=True)
    steps = distributed.all_gather(saved[1]["step"] if saved else -1)
    if max(steps) < 0:
        return None

    # Send all ranks the checkpoint with the most steps.
    tensors, info = saved or ({}, {})
    # Sending a tensor sends all of the memory that it is part of, which may be the whole file.
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors, info = distributed.broadcast((tensors, info), steps.index(max(steps)))
    if is_writer and not (folder / f"step-{info['step']:08d}.safetensors").is_file():
        # The checkpoint belongs to another training, or it is missing in this node's own folder.
        save(folder, info["step"], tensors, info)
    return tensors, info


def find_related_training(out: Path, fingerprint: Info) -> str:
    """Return a line about a training in `out` that differs in its validation only, or "".

    A user who edits `val_every` during a training may want to go on, and not to begin again.

    Args:
        out: the folder of all trainings.
        fingerprint: the fingerprint of the training that begins.
    """
    for folder in sorted(path.parent for path in out.glob("*/step-*.json")):
        path = max(folder.glob("step-*.json"))
        info = json.loads(path.read_text(encoding="utf-8"))
        changed = list_changed_keys(info.get("fingerprint", {}), fingerprint)
        if set(changed) <= set(VALIDATION) and info["step"] < fingerprint["train.steps"]:
            names = ", ".join(changed)
            return (
                f"{folder} differs only in {names}: --continue {folder} goes on from its step"
                f" {info['step']}"
            )
    return ""


def load_to_continue(folder: Path, fingerprint: Info) -> Saved:
    """Load the newest checkpoint of a training that another one continues, and return it.

    Args:
        folder: the folder of the training to continue.
        fingerprint: the fingerprint of the training that continues it.

    Raises:
        RequestError: If there is no checkpoint, or if more than the schedule differs.
    """
    saved = load_newest(folder)
    if saved is None:
        raise RequestError(f"--continue {folder}: there is no checkpoint step-*")
    info = saved[1]
    if "history" not in info:
        raise RequestError(f"--continue {folder}: an earlier version of this program wrote it")
    allowed = {*VALIDATION, *(f"train.{key}" for key in SCHEDULE)}
    forbidden = [
        key for key in list_changed_keys(info["fingerprint"], fingerprint) if key not in allowed
    ]
    if forbidden:
        before = info["fingerprint"].get(forbidden[0])
        raise RequestError(
            f"--continue {folder}: it was trained with {forbidden[0]}: {before}, not"
            f" {fingerprint.get(forbidden[0])}; only"
            f" train.{', '.join(SCHEDULE)} and the validation may differ"
        )
    if info["step"] > fingerprint["train.steps"]:
        raise RequestError(
            f"--continue {folder}: it has {info['step']} steps; set train.steps to them, or above"
        )
    # The average can begin with the weights of the checkpoint. Earlier weights are gone.
    first_step = compute_first_averaged_step(fingerprint)
    if first_step < info["step"] and first_step != compute_first_averaged_step(info["fingerprint"]):
        max_average = fingerprint["train.steps"] - info["step"] + 1
        raise RequestError(
            f"--continue {folder}: train.average = {fingerprint['train.average']} needs weights of"
            f" steps before its last one, {info['step']}; set it to at most {max_average}, or raise"
            " train.steps"
        )
    return saved


def compute_first_averaged_step(fingerprint: Info) -> int:
    """Return the first step whose weights are averaged, for the fingerprint of a training."""
    return fingerprint["train.steps"] - fingerprint["train.average"] + 1


def _find_last_number(out: Path, name: str) -> int:
    """Return the number of the newest folder of a training in `out`, or 0 if it has none."""
    matches = [re.fullmatch(rf"{name}(?:-(\d+))?", path.name) for path in out.glob(f"{name}*/")]
    return max((int(match.group(1) or 1) for match in matches if match), default=0)


def find_finished_training(
    args: argparse.Namespace, folder: Path, fingerprint: Info
) -> Optional[Info]:
    """Return the description of the best model if a training is finished, or None.

    The model is searched in `folder`, or among the published files if that folder does not exist.

    Args:
        args: the command line.
        folder: the folder of the training.
        fingerprint: the fingerprint of the training.

    Raises:
        RequestError: If other code trained it, or if its curves are gone. One entry of dvc.lock,
            which has the digests of the code and of the curves, must stand for one model.
    """
    # After `dvc pull` the outputs are there, but the checkpoints are not.
    model_folder = folder if folder.is_dir() else args.out
    try:
        info = load_model_file(model_folder / BEST)[1]
    except (FileNotFoundError, BadCheckpoint):
        return None
    if not info.get("finished") or info["training"] != name_training(fingerprint):
        return None
    path = get_origin_path(model_folder / BEST)
    origin = json.loads(path.read_text()) if path.is_file() else {"code": {}, "curves": {}}
    advice = "`python -m pipeline.launch pipeline.train --fresh` trains again"
    files = list_changed_keys(origin["code"], provenance.compute_code_digests("train"))
    if files:
        names = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        raise RequestError(
            f"{model_folder / BEST}: this training is finished, and its code has changed since:"
            f" {names}. {advice}, `dvc commit -f train` keeps the model if the change alters no"
            " output"
        )
    # Without a checkpoint, which has the curves, their files must be those of the training.
    if not any(folder.glob("step-*.safetensors")):
        present = {
            name: compute_file_sha256(args.reports / "curves" / name)
            for name in origin["curves"]
            if (args.reports / "curves" / name).is_file()
        }
        if present != origin["curves"]:
            raise RequestError(
                f"{args.reports / 'curves'}: not those of the finished training in"
                f" {model_folder / BEST}, whose checkpoints are gone; `dvc checkout` restores"
                f" them, {advice}"
            )
    return info


def list_package_versions(history: List[Info]) -> List[Info]:
    """Return the versions of packages during a training, an entry for each change.

    Args:
        history: an entry for the start of the training, and one for each change on resume.
    """
    versions: List[Info] = []
    for entry in history:
        packages = {k: v for k, v in entry.items() if k not in ("precision", "processes", "code")}
        changed = list_changed_keys(versions[-1], packages) if versions else packages
        if set(changed) - {"step"}:
            versions.append(packages)
    return versions
