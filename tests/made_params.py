"""A params.yaml from whole sections, which tests change by the name of any field."""

from pipeline.params import RunParams


def keys_of(section, name):
    """Each key of a section that a file may hold: {"views.homography.tilt_deg": its field, ...}."""
    keys = {}
    for key, field in section.model_fields.items():
        full = f"{name}.{key}"
        if full == "keypoints.views":
            continue
        keys[full] = field
        if hasattr(field.annotation, "model_fields"):
            keys.update(keys_of(field.annotation, full))
    return keys


def file_of(sections):
    """The tree of a file with these sections: views in one place. Keys of `run` may stand in
    `train`.
    """
    tree = {name: dict(values) for name, values in sections.items()}
    train = tree.get("train", {})
    for name in set(train) & set(RunParams.model_fields):
        tree.setdefault("run", {})[name] = train.pop(name)
    for name in ("keypoints", "evaluate"):
        if name in tree:
            tree.setdefault("views", tree[name]["views"])
    tree.get("keypoints", {}).pop("views", None)
    return tree
