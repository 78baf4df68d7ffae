"""A params.yaml from whole sections, which tests change by the name of any field."""

from __future__ import annotations

from typing import Any, Dict

from pipeline.parameters.params import flag
from pipeline.parameters.schema import TrainOptions


def file_of(sections: Dict[str, Dict[str, Any]]) -> Dict[str, Any]:
    """The tree of a file with these sections and all their fields: options as text, views in one place."""
    tree = {name: dict(values) for name, values in sections.items()}
    train = tree.get("train", {})
    given = {name: train.pop(name) for name in TrainOptions.model_fields if name in train}
    words = [flag(name, value) for name, value in given.items() if value != TrainOptions.model_fields[name].default]
    if train:
        train["options"] = " ".join(words)
    for name in ("keypoints", "evaluate"):
        if name in tree:
            tree.setdefault("views", tree[name]["views"])
    tree.get("keypoints", {}).pop("views", None)
    return tree
