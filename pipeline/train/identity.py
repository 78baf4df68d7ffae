"""Identity of a training: the parameters and data that determine its weights, and the name of its
folder.

Parameters that affect no weight of a step, only which step is the best, may change at any time.
Those of the schedule give another training, which begins from the other's checkpoint if the
learning rates of the steps done are the same. Nothing here can change a weight.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Set

from pipeline import provenance
from pipeline.files import file_sha256, json_digest
from pipeline.params import TrainParams
from pipeline.train.optimization import learning_rate

Fingerprint = Dict[str, Any]

# Keys of a fingerprint besides the parameters; a best model's JSON has the same.
OF_THE_RUN = ("world_size", "initial_weights", "data")
CODE = "code"  # the commit, among the versions of a checkpoint

PREFIX = "train."
# Keys and options of `train` that affect no weight of a step.
OPERATIONAL = {"train.log_every", "train.save_every", "train.val_every", "train.val_pairs"}
# These change how a step is computed: with norm `layer` the same up to rounding.
COMPUTED = {"train.accumulate", "train.checkpoint_layers", "train.compile", "train.parallel"}
# These act only through the learning rate.
SCHEDULE = {"train.decay_start", "train.lr", "train.schedule", "train.steps", "train.warmup_steps"}


def describe(train: TrainParams) -> Dict[str, Any]:
    """The section as JSON values; of `init_from` the file name: `initial_weights` is its digest."""
    return {**train.model_dump(), "init_from": Path(train.init_from).name}


def fingerprint(train: TrainParams, data_digest: str, world_size: int) -> Fingerprint:
    """Parameters and data, by which runs of one training are compared.

    It includes the number of processes only if that determines the batch or the learning rate.
    """
    about: Dict[str, Any] = {"train": describe(train), "data": data_digest}
    if train.batch_per_rank or train.lr_scaling != "none":
        about["world_size"] = world_size
    if train.init_from:
        about["initial_weights"] = file_sha256(train.init_from)[:16]
    return fingerprint_of(about)


def fingerprint_of(best: Dict[str, Any]) -> Fingerprint:
    """The fingerprint in the JSON of a best model."""
    values = {f"{PREFIX}{key}": value for key, value in best["train"].items()}
    return {**values, **{key: best[key] for key in OF_THE_RUN if key in best}}


def name_of(values: Fingerprint) -> str:
    """The name of a training, on any machine and for any version of the code."""
    free = _free_keys(values, values)
    return json_digest({key: value for key, value in values.items() if key not in free})


def changed_keys(saved: Fingerprint, ours: Fingerprint) -> List[str]:
    """The keys that differ."""
    return [key for key in sorted({*saved, *ours}) if saved.get(key) != ours.get(key)]


def misfits(saved: Fingerprint, ours: Fingerprint, step: int) -> List[str]:
    """The keys that make the first `step` steps of our training differ from the saved ones."""
    free = _free_keys(saved, ours)
    differ = [key for key in changed_keys(saved, ours) if key not in free]
    if SCHEDULE.issuperset(differ) and step <= ours["train.steps"]:
        return [] if _rates(saved, step) == _rates(ours, step) else differ
    return differ


def _free_keys(one: Fingerprint, other: Fingerprint) -> Set[str]:
    """The keys that may differ at any time."""
    free = set(OPERATIONAL)
    if one.get("train.norm") == other.get("train.norm") == "layer":
        free |= COMPUTED
    if "initial_weights" in one and "initial_weights" in other:
        free.add("train.init_from")  # only a file name
    return free


def _rates(values: Fingerprint, steps: int) -> List[float]:
    """Learning rates of the first steps of a training."""
    keys = {key[len(PREFIX) :]: each for key, each in values.items() if key.startswith(PREFIX)}
    train: Any = SimpleNamespace(**keys)
    return [learning_rate(train, step, values.get("world_size", 1)) for step in range(steps)]


def changes(saved: Fingerprint, ours: Fingerprint) -> List[str]:
    """A line for each parameter of a resumed training that has another value."""
    return [
        f"{key} changed on resume: {saved.get(key)} -> {ours.get(key)}"
        for key in changed_keys(saved, ours)
        if key.startswith(PREFIX) and key != "train.init_from"
    ]


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
