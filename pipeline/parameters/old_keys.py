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
# Keys that are constants now, with the value (tests compare it with the code's) or what happens.
FIXED = {
    "fetch.seed": 0,
    "keypoints.homography.translation": 1.0,
    "keypoints.difficulty": 1.0,
    "keypoints.max_bad_fraction": 0.1,
    "keypoints.shard_images": 64,
    "keypoints.seed": 0,
    "train.sync_batchnorm": "true, except with --bitwise-elastic: each of its micro-batches has its own statistics",
    "train.scale_angle": "true, if the extractor gives scales and angles",
    "train.positive_px": 3.0,
    "train.negative_px": 5.0,
    "train.weight_decay": "0, with optimizer: adamw 0.01",
    "train.decay": "exp(-0.4) in each decay_start steps, as in the paper",
    "train.clip_norm": 1.0,
    "train.zoom_max": 8.0,
    "train.max_skipped": 20,
    "evaluate.homography.translation": 1.0,
    "evaluate.difficulty": 1.0,
    "evaluate.correct_px": 3.0,
    "evaluate.ransac_px": 3.0,
    "evaluate.ransac_iterations": 3000,
    "evaluate.ratio": 0.8,
    "evaluate.sinkhorn_iterations": 100,
    "evaluate.seed": 0,
    "export.name": "superglue",
}
# What replaces each key.
GONE = {
    **{key: f"it is always {value}" for key, value in FIXED.items()},
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
