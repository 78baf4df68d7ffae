"""Which training a checkpoint belongs to: the parameters, data and code that decide its weights so far.

Parameters that decide no weight may change at any time; those of the schedule while the learning rates of the steps
done stay what they were. Nothing here can change a weight.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

from pipeline.files import file_sha256, json_digest
from pipeline.parameters.schema import TrainParams
from pipeline.provenance import repro
from pipeline.provenance.code import code_digest
from pipeline.train.optimization import learning_rate

Fingerprint = Dict[str, Any]

CODE = ("pipeline.train.trainer",)  # with what it imports: everything that can change a weight
# but for what writes files, whose bytes are verified, what compares and what reports
OUTSIDE = (
    "pipeline.train.checkpoint",
    "pipeline.train.identity",
    "pipeline.train.logger",
    "pipeline.train.resume",
    "pipeline.train.superseded",
    "superglue_sift.weights",
)

# What a fingerprint has beside the parameters; each stands in a best model's JSON under the same name.
OF_THE_RUN = ("world_size", "initial_weights", "data", "code")

# Keys and options of `train` that decide no weight of a step.
OPERATIONAL = (
    "log_every", "profile_steps", "save_every", "superseded_gb", "val_every", "val_pairs",
)  # fmt: skip
# Those that change how a step is computed, and not what: with norm `layer` the same but for rounding.
COMPUTED = ("accumulate", "checkpoint_layers", "compile", "parallel")
# Those that act through the learning rate alone.
SCHEDULE = ("decay_start", "lr", "schedule", "steps", "warmup_steps")


def stated(train: TrainParams) -> Dict[str, Any]:
    """The section as JSON values; of `init_from` the file's name, as `initial_weights` says which one that is."""
    return {**train.model_dump(exclude={"options"}), "init_from": Path(train.init_from).name}


def fingerprint(train: TrainParams, data_digest: str, world_size: int) -> Fingerprint:
    """What two runs of one training are compared by: parameters, data and code.

    The number of processes is no part of it, unless it decides the batch or the learning rate.
    """
    values: Fingerprint = {f"train.{k}": v for k, v in stated(train).items()}
    if train.batch_per_rank or train.lr_scaling != "none":
        values["world_size"] = world_size
    if train.init_from:
        values["initial_weights"] = file_sha256(train.init_from)[:16]
    values["data"] = data_digest
    values["code"] = code_digest(CODE, OUTSIDE)
    return values


def fingerprint_of(info: Dict[str, Any]) -> Fingerprint:
    """The fingerprint of a checkpoint's or a best model's JSON."""
    if "fingerprint" in info:
        return info["fingerprint"]
    values = {f"train.{k}": v for k, v in info.get("train", {}).items()}
    return {**values, **{k: info[k] for k in OF_THE_RUN if k in info}}


def steps_done(info: Dict[str, Any]) -> int:
    """The step whose weights a checkpoint or a best model stands for: of a finished best model the last."""
    return info["train"]["steps"] if info.get("finished") else info["step"]


def identity(values: Fingerprint) -> str:
    """A name for a training begun with this fingerprint, equal wherever it is run, whatever the code has become since.

    A training keeps it, also when its schedule is changed later.
    """
    without = {"code", *(f"train.{key}" for key in OPERATIONAL)}
    return json_digest({key: value for key, value in values.items() if key not in without})


def changed_keys(saved: Fingerprint, ours: Fingerprint) -> List[str]:
    """The keys that differ."""
    return [key for key in sorted(set(saved) | set(ours)) if saved.get(key) != ours.get(key)]


def misfits(saved: Fingerprint, ours: Fingerprint, step: int) -> List[str]:
    """The keys by which the first `step` steps of our training would give other weights than the saved ones."""
    free = {f"train.{key}" for key in OPERATIONAL}
    if saved.get("train.norm") == ours.get("train.norm") == "layer":
        free |= {f"train.{key}" for key in COMPUTED}
    if "initial_weights" in saved and "initial_weights" in ours:
        free.add("train.init_from")  # the name of the file that they were read from
    differ = [key for key in changed_keys(saved, ours) if key not in free]
    scheduled = {f"train.{key}" for key in SCHEDULE}
    if scheduled & set(differ) and _same_rates(saved, ours, step):
        return [key for key in differ if key not in scheduled]
    return differ


def _same_rates(saved: Fingerprint, ours: Fingerprint, step: int) -> bool:
    """Does each of the first `step` steps have one learning rate, and does our training have as many?"""
    if any(f"train.{key}" not in values for key in SCHEDULE for values in (saved, ours)):
        return False
    one, other = (_schedule(values) for values in (saved, ours))
    worlds = saved.get("world_size", 1), ours.get("world_size", 1)
    return step <= other.steps and all(
        learning_rate(one, done, worlds[0]) == learning_rate(other, done, worlds[1]) for done in range(step)
    )


def _schedule(values: Fingerprint) -> Any:
    keys = {key: values[f"train.{key}"] for key in SCHEDULE}
    return SimpleNamespace(lr_scaling=values.get("train.lr_scaling", "none"), **keys)


def changes_said(saved: Fingerprint, ours: Fingerprint) -> List[str]:
    """A line for each key of a training that goes on with another value."""
    lines = []
    for key in changed_keys(saved, ours):
        name, line = key.rpartition(".")[2], f"{key} is {ours.get(key)} from here on, it was {saved.get(key)}"
        if not key.startswith("train.") or name == "init_from" or key not in saved:
            continue
        if name in SCHEDULE:
            line += ": the steps so far have the same learning rates"
        elif name in COMPUTED:
            line += ": the same steps, rounded in another way"
        lines.append(line)
    return lines


def versions() -> Dict[str, str]:
    """Of the packages that compute. Without the build behind a `+`: on one CPU all of a version give the same."""
    return {name: version.partition("+")[0] for name, version in repro.computing_versions().items()}


def other_versions(info: Dict[str, Any]) -> str:
    """How the last `versions` of a checkpoint or best model differ from those of now, "" where they do not.

    In words: `torch 2.4.0 (now 2.13.0)`.
    """
    now = versions()
    before = {**info["versions"][-1]} if info.get("versions") else dict(now)  # an older file does not say
    before.pop("step", None)
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name, 'none')} (now {now.get(name, 'none')})" for name in names)
