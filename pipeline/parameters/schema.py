"""The sections of params.yaml: keys with types and limits; `presets/sample.yaml` documents each
key.

A key has no default, so that DVC sees every value that a result depends on. How a training is
computed (`TrainOptions`) is no key: options of the command have defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Dict, List, Literal, Mapping, Type

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seed = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Side = Annotated[int, Field(ge=64, le=8192, multiple_of=8)]
KeypointCount = Annotated[int, Field(ge=1, le=16384)]


class Section(BaseModel):
    """Base of all sections: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# Keys that choose among the user's own images
OF_A_FOLDER = ("val_path", "root", "categories", "min_side")
# Keys without effect; other sources: those of a folder
UNUSED = {"folder": (), "sample": (*OF_A_FOLDER, "path", "limit")}


class FetchParams(Section):
    source: Literal["sample", "folder", "coco2014", "coco2017", "coco2017-val"]
    path: str
    val_path: str
    root: str
    categories: str
    min_side: CountOrZero
    content: str
    limit: CountOrZero
    val_fraction: Annotated[float, Field(ge=0.0, le=0.9)]
    test_fraction: Fraction

    @model_validator(mode="after")
    def _keys_are_those_of_the_source(self) -> FetchParams:
        """A path left beside `source: sample` would train on other images than meant."""
        if self.source == "folder" and not self.path:
            raise ValueError("path = '': must name the folder of images when source is 'folder'")
        unused = UNUSED.get(self.source, OF_A_FOLDER)
        reasons = dict.fromkeys(unused, f"when source is {self.source!r}")
        if not any(path.lower().endswith(".json") for path in (self.path, self.val_path)):
            for name in ("categories", "min_side"):
                reasons.setdefault(name, "without a .json of COCO annotations in path")
        for name, reason in reasons.items():
            value = getattr(self, name)
            if value:
                raise ValueError(f"{name} = {value!r}: has no effect {reason}")
        return self


class Homography(Section):
    """Limits of the geometry of random views, at difficulty 1."""

    scale_min: Annotated[float, Field(gt=0.0, le=1.0)]
    perspective: Annotated[float, Field(ge=0.0, le=0.9)]
    rotation_deg: Annotated[float, Field(ge=0.0, le=180.0)]
    tilt_deg: Annotated[float, Field(ge=0.0, le=80.0)]
    max_upscale: Annotated[float, Field(ge=2.0, le=8.0)]


class Photometric(Section):
    """Limits of changes of light and camera between views; 0: no change."""

    brightness: Fraction
    contrast: Fraction
    gamma: Fraction
    blur: Annotated[float, Field(ge=0.0, le=10.0)]
    noise: Fraction
    jpeg: Fraction


class Views(Section):
    """The limits of random views."""

    homography: Homography
    photometric: Photometric


class KeypointsParams(Section):
    """views: the section `views`."""

    decoder: Literal["pillow", "torchvision", "dali"]
    extractor: Annotated[str, Field(pattern=r"^(sift|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")]
    views_per_image: Annotated[int, Field(ge=2, le=1000)]
    width: Side
    height: Side
    smallest: Annotated[float, Field(ge=0.25, le=1.0)]
    max_keypoints: KeypointCount
    difficulty_first: Fraction
    views: Views


class TrainOptions(Section):
    """Options of `python -m pipeline.train`, also in the environment variable TRAIN_OPTIONS."""

    parallel: Literal["ddp", "dp", "single"] = Field(
        "ddp",
        description=(
            "ddp: a process for each device, gradients averaged; dp: one process, torch's"
            " DataParallel; single: one process, one device"
        ),
    )
    batch_per_rank: int = Field(
        0,
        ge=0,
        le=65536,
        description="pairs of each process and step, instead of train.batch; 0: train.batch",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description=(
            "how the learning rate grows with the number of processes, for --batch-per-rank"
        ),
    )
    accumulate: int = Field(
        1,
        ge=1,
        le=4096,
        description="parts of a process's pairs, one after the other: less memory, the same steps",
    )
    checkpoint_layers: bool = Field(
        False,
        description=(
            "recompute activations in the backward pass: less memory, about a third more time"
        ),
    )
    compile: bool = Field(
        False,
        description=(
            "compile the layers, on a GPU as CUDA graphs, for views padded to max_keypoints"
            " (torch 2)"
        ),
    )
    deterministic: bool = Field(
        False, description="use deterministic kernels only; slower on a GPU"
    )
    log_every: int = Field(10, ge=1, description="steps between points of the training curves")
    save_every: int = Field(0, ge=0, description="steps between checkpoints; 0: train.val_every")


class TrainParams(TrainOptions):
    """The keys of the section `train`, and the options of its command."""

    batch: Annotated[int, Field(ge=1, le=65536)]
    steps: Count
    max_keypoints: KeypointCount
    min_keypoints: CountOrZero
    keypoint_drop: Annotated[float, Field(ge=0.0, le=0.9)]
    rotation_deg: Annotated[float, Field(ge=0.0, le=180.0)]
    negatives: Fraction
    zoom: Fraction
    score_drop: Fraction
    dim: Annotated[int, Field(ge=8, le=1024)]
    layers: Annotated[int, Field(ge=1, le=64)]
    heads: Annotated[int, Field(ge=1, le=64)]
    norm: Literal["layer", "batch"]
    neighbours: bool
    rotary: bool
    optimizer: Literal["adam", "muon", "sgd"]
    lr: Annotated[float, Field(gt=0.0, le=10.0)]
    schedule: Literal["constant_decay", "cosine", "wsd"]
    warmup_steps: CountOrZero
    decay_start: CountOrZero
    sinkhorn_iterations: Annotated[int, Field(ge=1, le=1000)]
    precision: Literal["auto", "portable", "float32", "bfloat16", "float16"]
    init_from: str
    freeze: List[str]
    val_pairs: Count
    val_every: Count
    seed: Seed

    @model_validator(mode="after")
    def _keys_agree(self) -> TrainParams:
        if self.checkpoint_layers and self.norm == "batch":
            raise ValueError(
                "norm = 'batch': --checkpoint-layers needs layer (running statistics would move"
                " twice)"
            )
        if self.compile and self.precision == "portable":
            raise ValueError(
                "precision = 'portable': --compile compiles for this processor; leave it out, or"
                " set float32"
            )
        if self.dim % self.heads:
            raise ValueError(f"heads = {self.heads}: must divide dim ({self.dim})")
        if self.rotary and self.dim // self.heads % 2:
            raise ValueError(
                f"rotary = True: needs an even dim / heads, not {self.dim // self.heads}"
            )
        return self


class EvaluateParams(Section):
    """views: the section `views` with the changes of `evaluate.views`."""

    width: Side
    height: Side
    max_keypoints: KeypointCount
    pairs_per_image: Count
    views: Views


SECTIONS: Dict[str, Type[Section]] = {
    "fetch": FetchParams,
    "views": Views,
    "keypoints": KeypointsParams,
    "train": TrainParams,
    "evaluate": EvaluateParams,
}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Dict[str, Any]:
    """`{"train.lr": 0.0001, "views.homography.scale_min": 0.5, ...}` of sections, or of plain
    dicts, by name.
    """
    flat: Dict[str, Any] = {}
    for key, value in tree.items():
        value = value.model_dump() if isinstance(value, Section) else value
        flat.update(
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat
