"""Keys of older params.yaml files that were removed or renamed, with what to do about each."""

from __future__ import annotations

from typing import Any, Iterator

from pipeline.parameters.schema import TrainOptions, flatten

HOMOGRAPHY = ("scale_min", "perspective", "rotation_deg", "tilt_deg", "max_upscale")
PHOTOMETRIC = ("brightness", "contrast", "gamma", "blur", "noise", "jpeg")
SHARED = [f"homography.{name}" for name in HOMOGRAPHY] + [f"photometric.{name}" for name in PHOTOMETRIC]

RENAMED = {
    **{f"keypoints.{name}": f"views.{name}" for name in SHARED},
    "keypoints.views": "keypoints.views_per_image",
    "train.turn_deg": "train.rotation_deg",
    "train.unrelated": "train.negatives",
}
# Keys that are constants now, by section.
FIXED = {
    "fetch": "seed",
    "keypoints": "homography.translation difficulty max_bad_fraction shard_images seed",
    "train": "sync_batchnorm scale_angle positive_px negative_px weight_decay decay clip_norm zoom_max max_skipped",
    "evaluate": "homography.translation difficulty correct_px ransac_px ransac_iterations ratio sinkhorn_iterations "
    "seed",
    "export": "name",
}
# What replaces each key.
GONE = {
    **{f"{section}.{name}": "it is a constant now" for section, names in FIXED.items() for name in names.split()},
    **{f"evaluate.{name}": f"the section views holds; evaluate.views.{name} differs from it" for name in SHARED},
    "fetch.mirror": "set the environment variable COCO_MIRROR instead",
    "evaluate.threshold": "give `python -m pipeline.evaluate --threshold` instead",
    "evaluate.refine": "give `python -m pipeline.evaluate --no-refine` instead of false",
    "evaluate.pictures": "give `python -m pipeline.evaluate --pictures` instead",
}


def flag(name: str, value: Any) -> str:
    """An option of a training as on its command line; `no --name` for a flag that is off."""
    option = "--" + name.replace("_", "-")
    return (option if value else f"no {option}") if isinstance(value, bool) else f"{option} {value}"


def advice(tree: Any) -> Iterator[str]:
    """A line for each old key of a params.yaml: its name and what to do."""
    for key, value in (flatten(tree) if isinstance(tree, dict) else {}).items():
        section, _, name = key.partition(".")
        if key in RENAMED:
            yield f"{key}: is now {RENAMED[key]}"
        elif key in GONE:
            yield f"{key}: delete the line; {GONE[key]}"
        elif section == "train" and name in TrainOptions.model_fields:
            default = TrainOptions.model_fields[name].default
            wanted = f'write train.options: "{flag(name, value)}" for it' if value != default else "it is the default"
            yield f"{key}: delete the line; {wanted}"
