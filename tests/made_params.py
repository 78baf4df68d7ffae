"""A params.yaml from whole sections, which tests change by the name of any field."""

from pipeline.params import TrainOptions, TrainParams, flag


def keys_of(section, name):
    """Each key of a section that a file may hold: {"views.homography.tilt_deg": its field, ...}."""
    keys = {}
    for key, field in section.model_fields.items():
        full = f"{name}.{key}"
        is_option = section is TrainParams and key in TrainOptions.model_fields
        if is_option or full == "keypoints.views":
            continue
        keys[full] = field
        if hasattr(field.annotation, "model_fields"):
            keys.update(keys_of(field.annotation, full))
    return keys


def file_of(sections):
    """The tree of a file with these sections: views in one place, no options of the training."""
    tree = {name: dict(values) for name, values in sections.items()}
    for name in TrainOptions.model_fields:
        tree.get("train", {}).pop(name, None)
    for name in ("keypoints", "evaluate"):
        if name in tree:
            tree.setdefault("views", tree[name]["views"])
    tree.get("keypoints", {}).pop("views", None)
    return tree


def words_of(train):
    """The options among these values of the section `train`, as on a command line."""
    usual = {name: field.default for name, field in TrainOptions.model_fields.items()}
    changed = [name for name in usual if train.get(name, usual[name]) != usual[name]]
    words = []
    for name in changed:
        words += [flag(name), *([] if train[name] is True else [str(train[name])])]
    return words
