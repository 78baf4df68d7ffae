"""Keys of older params.yaml files that were removed or renamed, with what to do about each."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Tuple

from pipeline.parameters.schema import TrainOptions

HOMOGRAPHY = ("scale_min", "perspective", "rotation_deg", "tilt_deg", "max_upscale")
PHOTOMETRIC = ("brightness", "contrast", "gamma", "blur", "noise", "jpeg")
SHARED = [f"homography.{name}" for name in HOMOGRAPHY] + [f"photometric.{name}" for name in PHOTOMETRIC]

RENAMED = {
    **{f"keypoints.{name}": f"views.{name}" for name in SHARED},
    "keypoints.views": "keypoints.views_per_image",
    "train.turn_deg": "train.rotation_deg",
    "train.unrelated": "train.negatives",
}
# What replaces each key.
GONE = {
    "fetch.mirror": "set the environment variable COCO_MIRROR instead",
    "fetch.seed": "it is 0",
    "keypoints.homography.translation": "views lie anywhere inside the image",
    "keypoints.difficulty": "it is 1; lower the amounts in views instead",
    "keypoints.max_bad_fraction": "it is 0.1",
    "keypoints.shard_images": "it is 64",
    "keypoints.seed": "it is 0",
    "train.sync_batchnorm": "norm: batch is always synchronized",
    "train.scale_angle": "the extractor of the keypoints decides",
    "train.positive_px": "it is 3",
    "train.negative_px": "it is 5",
    "train.weight_decay": "it is 0; optimizer: adamw has 0.01",
    "train.decay": "it is exp(-0.4 / train.decay_start), as in the paper",
    "train.clip_norm": "it is 1",
    "train.zoom_max": "it is 8",
    "train.max_skipped": "it is 20",
    "evaluate.homography.translation": "views lie anywhere inside the image",
    "evaluate.difficulty": "it is 1; lower the amounts in evaluate.views instead",
    **{f"evaluate.{name}": f"the section views holds; evaluate.views.{name} differs from it" for name in SHARED},
    "evaluate.correct_px": "it is 3",
    "evaluate.ransac_px": "it is 3",
    "evaluate.ransac_iterations": "it is 3000",
    "evaluate.ratio": "it is 0.8",
    "evaluate.threshold": "give `python -m pipeline.evaluate --threshold` instead",
    "evaluate.sinkhorn_iterations": "it is 100",
    "evaluate.refine": "give `python -m pipeline.evaluate --no-refine` instead of false",
    "evaluate.pictures": "give `python -m pipeline.evaluate --pictures` instead",
    "evaluate.seed": "it is 0",
    "export.name": "the model is models/superglue.safetensors",
}


def flag(name: str, value: Any) -> str:
    """An option of a training as on its command line; `no --name` for a flag that is off."""
    option = "--" + name.replace("_", "-")
    return (option if value else f"no {option}") if isinstance(value, bool) else f"{option} {value}"


def advice(tree: Any) -> Iterator[str]:
    """A line for each old key of a params.yaml: its name and what to do."""
    for key, value in _leaves(tree):
        section, _, name = key.partition(".")
        if key in RENAMED:
            yield f"{key}: is now {RENAMED[key]}"
        elif key in GONE:
            yield f"{key}: delete the line; {GONE[key]}"
        elif section == "train" and name in TrainOptions.model_fields:
            default = TrainOptions.model_fields[name].default
            wanted = f'write train.options: "{flag(name, value)}" for it' if value != default else "it is the default"
            yield f"{key}: delete the line; {wanted}"


def _leaves(tree: Any, prefix: Tuple[str, ...] = ()) -> List[Tuple[str, Any]]:
    if not isinstance(tree, Dict) or not tree:
        return [(".".join(prefix), tree)]
    return [leaf for key, value in tree.items() for leaf in _leaves(value, (*prefix, str(key)))]
