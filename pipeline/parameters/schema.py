"""The sections of params.yaml: every key a stage may be asked with, its type and its limits.

Units, meaning and default of each key stand in `presets/sample.yaml`; `pipeline.parameters.params` loads them.
"""

from __future__ import annotations

from typing import Annotated, Dict, List, Literal, Type

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seed = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Pixels = Annotated[float, Field(gt=0.0, le=100.0)]
Side = Annotated[int, Field(ge=64, le=8192, multiple_of=8)]
KeypointCount = Annotated[int, Field(ge=1, le=16384)]


class Section(BaseModel):
    """Base of all sections: nothing is coerced, nothing unknown is let through, nothing changes later."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Homography(Section):
    """How far a view may stand from the image it is cut from (all amounts before `difficulty`)."""

    scale_min: Annotated[float, Field(gt=0.0, le=1.0)]
    perspective: Annotated[float, Field(ge=0.0, le=0.9)]
    rotation_deg: Annotated[float, Field(ge=0.0, le=180.0)]
    tilt_deg: Annotated[float, Field(ge=0.0, le=80.0)]
    translation: Fraction
    max_upscale: Annotated[float, Field(ge=2.0, le=8.0)]


class Photometric(Section):
    """How far the light and the camera may change between views; 0 switches a distortion off."""

    brightness: Fraction
    contrast: Fraction
    gamma: Fraction
    blur: Annotated[float, Field(ge=0.0, le=10.0)]
    noise: Fraction
    jpeg: Fraction


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
    mirror: str
    seed: Seed

    @model_validator(mode="after")
    def _folder_has_a_path(self) -> FetchParams:
        if self.source == "folder" and not self.path:
            raise ValueError("path = '': must name the folder of images when source is 'folder'")
        return self


class KeypointsParams(Section):
    decoder: Literal["opencv", "torchvision", "dali"]
    extractor: Annotated[str, Field(pattern=r"^(sift|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")]
    views: Annotated[int, Field(ge=2, le=1000)]
    width: Side
    height: Side
    max_keypoints: KeypointCount
    difficulty: Fraction
    difficulty_first: Fraction
    homography: Homography
    photometric: Photometric
    max_bad_fraction: Fraction
    shard_images: Annotated[int, Field(ge=1, le=4096)]
    seed: Seed


class TrainParams(Section):
    parallel: Literal["ddp", "dp", "single"]
    bitwise_elastic: bool
    batch: Annotated[int, Field(ge=1, le=65536)]
    batch_per_rank: Annotated[int, Field(ge=0, le=65536)]
    accumulate: Annotated[int, Field(ge=1, le=4096)]
    loader: Literal["plain", "dali", "synthetic"]
    steps: Count
    max_keypoints: KeypointCount
    min_keypoints: CountOrZero
    keypoint_drop: Annotated[float, Field(ge=0.0, le=0.9)]
    turn_deg: Annotated[float, Field(ge=0.0, le=180.0)]
    window: Annotated[float, Field(gt=0.0, le=1.0)]
    unrelated: Fraction
    zoom: Fraction
    zoom_max: Annotated[float, Field(ge=1.5, le=16.0)]
    dim: Annotated[int, Field(ge=8, le=1024)]
    layers: Annotated[int, Field(ge=1, le=64)]
    heads: Annotated[int, Field(ge=1, le=64)]
    norm: Literal["layer", "batch"]
    sync_batchnorm: bool
    scale_angle: bool
    neighbours: bool
    rotary: bool
    sinkhorn_iterations: Annotated[int, Field(ge=1, le=1000)]
    positive_px: Pixels
    negative_px: Pixels
    optimizer: Literal["adam", "adamw", "muon", "sgd"]
    lr: Annotated[float, Field(gt=0.0, le=10.0)]
    lr_scaling: Literal["none", "linear", "sqrt"]
    weight_decay: Fraction
    schedule: Literal["constant_decay", "cosine", "wsd"]
    warmup_steps: CountOrZero
    decay_start: CountOrZero
    decay: Annotated[float, Field(gt=0.0, le=1.0)]
    clip_norm: Annotated[float, Field(ge=0.0)]
    precision: Literal["auto", "float32", "bfloat16", "float16"]
    ema: Annotated[float, Field(ge=0.0, lt=1.0)]
    init_from: str
    freeze: List[str]
    deterministic: bool
    checkpoint_layers: bool
    compile: bool
    profile_steps: CountOrZero
    max_skipped: CountOrZero
    log_every: Count
    val_pairs: Count
    val_every: Count
    save_every: Count
    superseded_gb: Annotated[float, Field(ge=0.0)]
    seed: Seed

    @model_validator(mode="after")
    def _keys_agree(self) -> TrainParams:
        if self.negative_px < self.positive_px:
            raise ValueError(f"negative_px = {self.negative_px}: must be positive_px ({self.positive_px}) or more")
        if self.checkpoint_layers and self.norm == "batch":
            raise ValueError("checkpoint_layers = True: needs norm: layer (running statistics would move twice)")
        if self.neighbours and not self.scale_angle:
            raise ValueError("neighbours = True: needs scale_angle: true (it compares scales and angles)")
        if self.bitwise_elastic and self.accumulate > 1:
            raise ValueError("accumulate > 1: bitwise_elastic cuts the batch itself; set accumulate: 1")
        if self.dim % self.heads:
            raise ValueError(f"heads = {self.heads}: must divide dim ({self.dim})")
        if self.rotary and self.dim // self.heads % 2:
            raise ValueError(f"rotary = True: needs an even dim / heads, not {self.dim // self.heads}")
        return self


class EvaluateParams(Section):
    width: Side
    height: Side
    pairs_per_image: Count
    max_keypoints: KeypointCount
    difficulty: Fraction
    homography: Homography
    photometric: Photometric
    correct_px: Pixels
    ransac_px: Pixels
    ransac_iterations: Annotated[int, Field(ge=1, le=1_000_000)]
    ratio: Annotated[float, Field(gt=0.0, le=1.0)]
    threshold: Fraction
    sinkhorn_iterations: Annotated[int, Field(ge=1, le=1000)]
    refine: bool = True
    pictures: CountOrZero
    seed: Seed


class ExportParams(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


SECTIONS: Dict[str, Type[Section]] = {
    "fetch": FetchParams,
    "keypoints": KeypointsParams,
    "train": TrainParams,
    "evaluate": EvaluateParams,
    "export": ExportParams,
}
