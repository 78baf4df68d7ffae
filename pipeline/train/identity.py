"""Identity of a training: the parameters and data that determine its weights, and the name of its
folder.

Parameters that affect no weight may change at any time. Those of the schedule give another
training, which begins from the other's checkpoint if the learning rates of the steps done are the
same. Nothing here can change a weight.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Set

from pipeline.files import file_sha256, json_digest
from pipeline.parameters.schema import TrainParams
from pipeline.provenance import repro
from pipeline.train.optimization import learning_rate

Fingerprint = Dict[str, Any]

# Keys of a fingerprint besides the parameters; a best model's JSON has the same.
OF_THE_RUN = ("world_size", "initial_weights", "data")
CODE = "code"  # the commit, among the versions of a checkpoint

# Keys and options of `train` that affect no weight.
OPERATIONAL = (
    "log_every", "profile_steps", "save_every", "val_every", "val_pairs",
)  # fmt: skip
# These change how a step is computed: with norm `layer` the same up to rounding.
COMPUTED = ("accumulate", "checkpoint_layers", "compile", "parallel")
# These act only through the learning rate.
SCHEDULE = ("decay_start", "lr", "schedule", "steps", "warmup_steps")


def stated(train: TrainParams) -> Dict[str, Any]:
    """The section as JSON values; of `init_from` only the file name, since `initial_weights` has
    the digest.
    """
    return {**train.model_dump(), "init_from": Path(train.init_from).name}


def fingerprint(train: TrainParams, data_digest: str, world_size: int) -> Fingerprint:
    """Parameters and data, by which runs of one training are compared.

    It includes the number of processes only if that determines the batch or the learning rate.
    """
    values: Fingerprint = {f"train.{k}": v for k, v in stated(train).items()}
    if train.batch_per_rank or train.lr_scaling != "none":
        values["world_size"] = world_size
    if train.init_from:
        values["initial_weights"] = file_sha256(train.init_from)[:16]
    values["data"] = data_digest
    return values


def fingerprint_of(info: Dict[str, Any]) -> Fingerprint:
    """The fingerprint of a checkpoint's or a best model's JSON."""
    if "fingerprint" in info:
        return info["fingerprint"]
    values = {f"train.{k}": v for k, v in info.get("train", {}).items()}
    return {**values, **{k: info[k] for k in OF_THE_RUN if k in info}}


def name_of(values: Fingerprint) -> str:
    """The name of a training with this fingerprint, on any machine and for any version of the
    code.
    """
    free = _free_keys(values, values)
    return json_digest({key: value for key, value in values.items() if key not in free})


def changed_keys(saved: Fingerprint, ours: Fingerprint) -> List[str]:
    """The keys that differ."""
    return [key for key in sorted(set(saved) | set(ours)) if saved.get(key) != ours.get(key)]


def misfits(saved: Fingerprint, ours: Fingerprint, step: int) -> List[str]:
    """The keys that make the first `step` steps of our training differ from the saved ones."""
    free = _free_keys(saved, ours)
    differ = [key for key in changed_keys(saved, ours) if key not in free]
    scheduled = {f"train.{key}" for key in SCHEDULE}
    if scheduled & set(differ) and _same_rates(saved, ours, step):
        return [key for key in differ if key not in scheduled]
    return differ


def _free_keys(one: Fingerprint, other: Fingerprint) -> Set[str]:
    """The keys that may differ at any time."""
    free = {f"train.{key}" for key in OPERATIONAL}
    if one.get("train.norm") == other.get("train.norm") == "layer":
        free |= {f"train.{key}" for key in COMPUTED}
    if "initial_weights" in one and "initial_weights" in other:
        free.add("train.init_from")  # only a file name
    return free


def _same_rates(saved: Fingerprint, ours: Fingerprint, step: int) -> bool:
    """Whether the learning rates of the first `step` steps are equal, and our training has as many
    steps.
    """
    if any(f"train.{key}" not in values for key in SCHEDULE for values in (saved, ours)):
        return False
    one, other = (_schedule(values) for values in (saved, ours))
    worlds = saved.get("world_size", 1), ours.get("world_size", 1)
    return step <= other.steps and all(
        learning_rate(one, done, worlds[0]) == learning_rate(other, done, worlds[1])
        for done in range(step)
    )


def _schedule(values: Fingerprint) -> Any:
    keys = {key: values[f"train.{key}"] for key in SCHEDULE}
    return SimpleNamespace(lr_scaling=values.get("train.lr_scaling", "none"), **keys)


def changes(saved: Fingerprint, ours: Fingerprint) -> List[str]:
    """A line for each key of a resumed training that has another value."""
    lines = []
    for key in changed_keys(saved, ours):
        name = key.rpartition(".")[2]
        line = f"{key} changed on resume: {saved.get(key)} -> {ours.get(key)}"
        if not key.startswith("train.") or name == "init_from" or key not in saved:
            continue
        if name in SCHEDULE:
            line += ": earlier steps have the same learning rates"
        elif name in COMPUTED:
            line += ": the same steps up to rounding"
        lines.append(line)
    return lines


def versions() -> Dict[str, str]:
    """Versions of the packages that compute, and of this code."""
    return {**repro.pinned(repro.COMPUTING), CODE: repro.code_version()}


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
