"""Save and load the state of a training, and find where a training starts.

checkpoints/<name>/      step-*, best.*: a training. The name is a digest of its parameters and data
checkpoints/<name>-2/    the same training once more, by `--fresh` or with other code
checkpoints/best.*       a copy of the best model of the training that ran last, for DVC and the
                         later stages

A training whose folder exists is resumed, whatever the code. One that is finished is published
again, or trained in a new folder if the code has changed. `--continue FOLDER` begins from the
newest checkpoint of another training, with another schedule. Nothing in the folder of another
training changes.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, FrozenSet, List, Optional, Tuple

import torch

from pipeline import distributed, provenance
from pipeline.errors import RESTARTS, RequestError, WorkError, read_environment_number
from pipeline.params import Params, TrainParams, flatten
from pipeline.train.optimizer import collect_optimizer_tensors, restore_optimizer
from superglue_sift import torch_compat
from superglue_sift.files import compute_file_sha256, compute_json_digest, write_atomically
from superglue_sift.network.superglue import SuperGlue
from superglue_sift.network.weights import (
    BadCheckpoint,
    ModelFile,
    Tensors,
    load_model_file,
    save_model_file,
    select_by_prefix,
)

BEST = "best.safetensors"
# Fields of TrainState that a checkpoint stores as JSON
PLAIN_FIELDS = ("step", "best_step", "best_metrics", "skipped", "averaged")
# Keys that `--continue` may change: on what and when the weights are validated, and the schedule
VALIDATION = ("validation", "train.val_every", "train.val_pairs")
SCHEDULE = ("average", "decay_start", "lr", "schedule", "steps", "warmup_steps")

Info = Dict[str, Any]  # JSON values
Metrics = Dict[str, float]


@dataclass
class TrainState:
    """The state of one training, which a checkpoint holds.

    Attributes:
        model: the network.
        optimizer: its optimizer.
        scaler: torch's GradScaler.
        step: number of steps so far.
        best_step: step of the validation with the largest F1.
        best_metrics: metrics of that validation.
        best_weights: weights of that validation, in the memory of the host.
        average: mean of the weights of the last steps.
        averaged: number of steps in `average`.
        skipped: number of steps that were not applied because the gradient was not finite, without
            those in which GradScaler only lowered its scale.
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

    def compute_sha256(self) -> str:
        """Return the SHA-256 of all that the ranks have to share: weights, optimizer, counts.

        The state of the random generator is left out, and so is `best_weights`, which has weights
        that were compared before.
        """
        sha256 = hashlib.sha256(json.dumps(self.collect_info(), sort_keys=True).encode())
        for name, tensor in sorted(self.collect_tensors().items()):
            if not name.startswith(("best.", "rng.")):
                sha256.update(name.encode())
                sha256.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return sha256.hexdigest()

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


def check_replicas(state: TrainState, context: distributed.Context) -> None:
    """Check that all ranks have the same weights and the same state of the optimizer, to the bit.

    All ranks call this together, before anything of a step is saved.

    Args:
        state: the state of the training.
        context: this process among the ranks.

    Raises:
        WorkError: If the ranks differ. The error names them. On other ranks than 0 this is
            SystemExit.
    """
    digests = distributed.gather_objects(state.compute_sha256())
    # If there are two ranks, the digest of rank 0 counts as the common one.
    common_digest = max(digests, key=digests.count)
    differing_ranks = [rank for rank, digest in enumerate(digests) if digest != common_digest]
    if differing_ranks and not context.is_main:
        raise SystemExit(1)
    if differing_ranks:
        raise WorkError(
            f"step {state.step}: other weights or values of the optimizer than most of"
            f" {len(digests)} ranks: rank {', '.join(map(str, differing_ranks))}; nothing of this"
            " step is saved. The same command resumes from the newest checkpoint. All ranks need"
            " devices of one kind, which round alike"
        )


# --- the files of a training


def save(folder: Path, step: int, tensors: Tensors, info: Info) -> None:
    """Write the checkpoint of a step, then delete all but the newest two checkpoints.

    Args:
        folder: the folder of the training.
        step: number of steps so far, which names the file.
        tensors: the tensors to save.
        info: everything else, as JSON values.
    """
    save_model_file(get_path(folder, step), tensors, info)
    for path in _list_newest_first(folder)[2:]:
        _delete_checkpoint(path)


def get_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}.safetensors"


def load_newest(folder: Path, repair: bool = False) -> Optional[ModelFile]:
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


def save_best(
    folder: Path, tensors: Tensors, info: Info, photographs: Optional[FrozenSet[str]]
) -> None:
    """Write the best model of a training, and the files that describe it.

    Args:
        folder: the folder of the training.
        tensors: the weights.
        info: the description of the model, as JSON values.
        photographs: identifiers of the photographs that it was trained on, or None if they are not
            known.
    """
    provenance.write_photographs(folder / BEST, photographs)
    save_model_file(folder / BEST, tensors, info)


def publish_best(folder: Path, out: Path) -> None:
    """Copy the best model in `folder`, with the files that describe it, to `out`."""
    best = folder / BEST
    for source in (provenance.get_photographs_path(best), best.with_suffix(".json"), best):
        write_atomically(out / source.name, source.read_bytes())


def read_finished_best(folder: Path) -> Optional[Info]:
    """Read the description of the best model of a finished training.

    The result is None if the training is not finished.
    """
    try:
        info = load_model_file(folder / BEST).info
    except (FileNotFoundError, BadCheckpoint):
        return None
    return info if info["finished"] else None


# --- which training it is: parameters and data name its folder


def describe_parameters(train: TrainParams) -> Info:
    """Return the section `train` as JSON values, with the file name of `init_from` alone.

    The fingerprint has the digest of the content of that file.
    """
    return {**train.model_dump(), "init_from": Path(train.init_from).name}


def make_fingerprint(params: Params, data: str, validation: str, world_size: int) -> Info:
    """Return the parameters and the digests of the data, which tell one training from another.

    They decide the weights of every step, and which of these weights are kept. A key of `run` is
    included only if it decides more than rounding: the pairs of a step, the learning rate, or the
    parts over which BatchNorm takes its statistics. What `run.allow_training_images` decides is in
    the validation pairs.

    Args:
        params: all parameters.
        data: digest of the training keypoints.
        validation: digest of the validation pairs.
        world_size: number of processes.
    """
    train, run = params.train, params.run
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


def check_ranks_agree(request: Info, context: distributed.Context) -> None:
    """Check that parameters, data and code of all ranks are equal. All ranks call this together.

    Args:
        request: the parameters and the digests of data and code of this rank.
        context: this process among the ranks.

    Raises:
        RequestError: If they differ. On other ranks than 0 this is SystemExit.
    """
    main_request, *other_requests = distributed.gather_objects(request)
    for rank, rank_request in enumerate(other_requests, 1):
        for key in list_changed_keys(main_request, rank_request):
            if not context.is_main:
                raise SystemExit(2)
            raise RequestError(
                f"rank {rank} has {key}: {rank_request.get(key)}, rank 0 {main_request.get(key)};"
                " give every node the same parameters, keypoints and code"
            )


# --- where a training starts


def is_restart() -> bool:
    """Return whether the launcher or torchrun has started this training again after a fault."""
    names = (RESTARTS, "TORCHELASTIC_RESTART_COUNT")
    return any(read_environment_number(name, 0) for name in names)


def find_start(
    out: Path, name: str, code: str, fresh: bool, context: distributed.Context
) -> Tuple[Path, Optional[ModelFile], bool]:
    """Find the folder of a training, and the checkpoint to start from. All ranks call this.

    Nodes may share `out`, or have folders of their own: all ranks take the checkpoint with the most
    steps. The first rank of each node also deletes what a killed process has left.

    Args:
        out: the folder of all trainings.
        name: the name of the training.
        code: the digest of the code.
        fresh: whether to begin again in a new folder (`--fresh`). A training that was started again
            after a fault has its new folder already, and so has an unfinished one in a job that
            SLURM has started again.
        context: this process among the ranks.

    Returns:
        The folder, the checkpoint or None, and whether rank 0 can publish the finished training.
        Then there is nothing else to do.
    """
    number = max(distributed.gather_objects(_find_last_number(out, name)))
    folder = _name_folder(out, name, max(number, 1))
    best = None
    if context.is_first_of_node:
        # A killed writer leaves files that would fill the disk.
        for partial in (*folder.glob(".*.tmp"), *out.glob(".*.tmp")):
            partial.unlink(missing_ok=True)
        best = read_finished_best(folder)
    is_finished = distributed.is_true_on_any_rank(best is not None)
    is_requeued = read_environment_number("SLURM_RESTART_COUNT", 0) > 0  # By SLURM
    begins_again = fresh and not distributed.is_true_on_any_rank(
        is_restart() or (is_requeued and not is_finished)
    )
    if not begins_again:
        saved = _load_newest_of_nodes(folder, context)
        if not is_finished or (saved and saved.info["history"][-1]["code"] == code):
            # Rank 0 publishes, so its node needs the files.
            return folder, saved, distributed.broadcast(best is not None)
    new_folder = _name_folder(out, name, number + 1)
    if context.is_main and not begins_again:
        print(
            f"{folder}: finished, and no checkpoint of it is of this code. Training again in"
            f" {new_folder}. To keep the model, stop, and type `dvc checkout --force` and"
            " `dvc commit -f train`"
        )
    return new_folder, None, False


def _find_last_number(out: Path, name: str) -> int:
    """Return the number of the newest folder of a training in `out`, or 0 if it has none."""
    matches = [re.fullmatch(rf"{name}(?:-(\d+))?", path.name) for path in out.glob(f"{name}*/")]
    return max((int(match.group(1) or 1) for match in matches if match), default=0)


def _name_folder(out: Path, name: str, number: int) -> Path:
    return out / (name if number == 1 else f"{name}-{number}")


def _load_newest_of_nodes(folder: Path, context: distributed.Context) -> Optional[ModelFile]:
    """Load the checkpoint with the most steps of all nodes. All ranks call this together."""
    saved = load_newest(folder, repair=True) if context.is_first_of_node else None
    steps = distributed.gather_objects(saved.info["step"] if saved else -1)
    if max(steps) < 0:
        return None
    tensors, info = saved or ({}, {})
    # Sending a tensor sends all of the memory that it is part of, which may be the whole file.
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return distributed.broadcast(ModelFile(tensors, info), steps.index(max(steps)))


def load_to_continue(folder: Path, fingerprint: Info) -> ModelFile:
    """Load the newest checkpoint of a training that another one continues, and return it.

    Args:
        folder: the folder of the training to continue.
        fingerprint: the fingerprint of the training that continues it.

    Raises:
        RequestError: If there is no checkpoint, if it has too many steps, or if more than the
            schedule and the validation differs.
    """
    saved = load_newest(folder)
    if saved is None:
        raise RequestError(f"--continue {folder}: there is no checkpoint step-*")
    info = saved.info
    allowed = {*VALIDATION, *(f"train.{key}" for key in SCHEDULE)}
    for key in list_changed_keys(info["fingerprint"], fingerprint):
        if key not in allowed:
            raise RequestError(
                f"--continue {folder}: it was trained with {key}: {info['fingerprint'].get(key)},"
                f" not {fingerprint.get(key)}; only train.{', '.join(SCHEDULE)} and the validation"
                " may differ"
            )
    if info["step"] > fingerprint["train.steps"]:
        raise RequestError(
            f"--continue {folder}: it has {info['step']} steps; set train.steps to them, or above"
        )
    return saved


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
