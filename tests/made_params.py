"""A params.yaml from whole sections, which tests change by the name of any field."""

import copy
import dataclasses
import functools
import io
from pathlib import Path

from pydantic import Field
from reading import read_yaml
from ruamel.yaml import YAML

from pipeline.params import Augmentation, RunParams
from superglue_sift.network.config import Architecture

ROOT = Path(__file__).resolve().parents[1]


def list_keys(section, name):
    """Each key of a section that a file may hold: {"views.homography.tilt_deg": its field, ...}."""
    keys = {}
    for key, field in section.model_fields.items():
        full = f"{name}.{key}".lstrip(".")
        if full == "keypoints.views":
            continue
        keys[full] = field
        if hasattr(field.annotation, "model_fields"):
            keys.update(list_keys(field.annotation, full))
        if dataclasses.is_dataclass(field.annotation):
            inner = dataclasses.fields(field.annotation)
            keys.update({f"{full}.{entry.name}": Field(entry.default) for entry in inner})
    return keys


@functools.lru_cache(maxsize=1)
def read_sample():
    return read_yaml(ROOT / "presets/sample.yaml")


def nest(train):
    """A section `train` whose keys of the network and of the augmentation may stand at its top."""
    nested = {
        "augmentation": set(Augmentation.model_fields),
        "model": {field.name for field in dataclasses.fields(Architecture)},
    }
    section = {key: value for key, value in train.items() if key not in set.union(*nested.values())}
    for name, keys in nested.items():
        section[name] = {**train.get(name, {}), **{key: train[key] for key in keys & {*train}}}
    return section


def make_tree(sections):
    """The tree of a whole file: the sample preset with these sections in place of its own.

    The views stand in one place. Keys of `run`, and those of `nest`, may stand in `train`.
    """
    tree = copy.deepcopy(read_sample())
    tree.update({name: dict(values) for name, values in sections.items()})
    tree["run"] = {**read_sample()["run"], **tree["run"]}
    tree["train"] = nest(tree["train"])
    for name in set(tree["train"]) & set(RunParams.model_fields):
        tree["run"][name] = tree["train"].pop(name)
    if "train" not in sections and "keypoints" in sections:
        tree["train"]["max_keypoints"] = 1  # at most what a view stores
    if "train" in sections and "keypoints" not in sections:
        tree["keypoints"]["max_keypoints"] = 16384
    for name in ("evaluate", "keypoints"):
        tree["views"] = tree[name].pop("views", tree["views"])
    return tree


def format_tree(sections):
    """`make_tree` as the text of a file."""
    stream = io.StringIO()
    YAML(typ="safe", pure=True).dump(make_tree(sections), stream)
    return stream.getvalue()
