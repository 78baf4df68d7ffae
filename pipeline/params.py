"""Load params.yaml, and check the types and limits of its keys.

`presets/sample.yaml` explains each key. A key that decides a result has no default, so that DVC
sees its value. Only `train.model` and `train.augmentation` have the defaults of their classes. In
`run`, keys that decide no result have defaults. All sections are checked, so that a misspelled key
of the last stage is reported before the first stage runs.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Dict, List, Literal, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import RequestError
from superglue_sift import environment
from superglue_sift.errors import Parser
from superglue_sift.network.config import Architecture

# Types of numbers that several keys have
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
FOLDER_KEYS = ("val_path", "root")
# Keys without effect, by source. With a source that is not listed, FOLDER_KEYS has no effect.
UNUSED_KEYS = {"folder": (), "sample": (*FOLDER_KEYS, "path", "limit")}


class FetchParams(Section):
    """The section `fetch`, which says what photographs there are."""

    source: Literal["sample", "folder", "coco2014", "coco2017", "coco2017-val"]
    path: str
    val_path: str
    root: str
    content: str
    limit: CountOrZero
    val_fraction: float = Field(ge=0.0, le=0.9)

    @model_validator(mode="after")
    def _check_source_keys(self) -> FetchParams:
        """Check the one key that a source needs, and the keys that it ignores.

        With a path beside `source: sample`, the user means other images than those of the training.
        """
        if self.source == "folder" and not self.path:
            raise ValueError("path = '': must name the folder of images when source is 'folder'")
        for name in UNUSED_KEYS.get(self.source, FOLDER_KEYS):
            value = getattr(self, name)
            if value:
                raise ValueError(
                    f"{name} = {value!r}: has no effect when source is {self.source!r}"
                )
        return self


class Homography(Section):
    """Limits of the geometry of random views, at difficulty 1."""

    scale_min: float = Field(gt=0.0, le=1.0)
    perspective: float = Field(ge=0.0, le=0.9)
    rotation_deg: float = Field(ge=0.0, le=180.0)
    tilt_deg: float = Field(ge=0.0, le=80.0)
    max_upscale: float = Field(ge=2.0, le=8.0)


class Photometric(Section):
    """Limits of changes of light and camera between views. If a limit is 0, nothing changes."""

    brightness: Fraction
    contrast: Fraction
    gamma: Fraction
    blur: float = Field(ge=0.0, le=10.0)
    noise: Fraction
    jpeg: Fraction


class Views(Section):
    """The limits of random views."""

    homography: Homography
    photometric: Photometric


class KeypointsParams(Section):
    """The section `keypoints`. Its `views` is the section `views`."""

    decoder: Literal["pillow", "torchvision", "dali"]
    extractor: str = Field(pattern=r"^(sift|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    views_per_image: int = Field(ge=2, le=1000)
    width: Side
    height: Side
    smallest: float = Field(ge=0.25, le=1.0)
    max_keypoints: KeypointCount
    difficulty_first: Fraction
    seed: Seed
    views: Views


class RunParams(Section):
    """How a training is computed.

    Keys that decide a result have no default, and dvc.yaml names each of them: a change repeats the
    stage. The other keys change rounding, memory or reports. No stage depends on them.
    """

    # These decide the steps: the pairs, the learning rate, what BatchNorm takes statistics over.
    batch_per_rank: int = Field(ge=0, le=65536)
    lr_scaling: Literal["none", "linear", "sqrt"]
    accumulate: int = Field(ge=1, le=4096)
    # This decides which photographs validate and test.
    allow_training_images: bool
    # Memory, speed and reproducibility
    checkpoint_layers: bool = False
    compile: bool = False
    deterministic: bool = False
    # Reports and checkpoints
    log_every: Count = 10
    save_every: CountOrZero = 0


class Augmentation(Section):
    """How much the keypoints of pairs are changed. By default they are not.

    Attributes:
        keypoint_drop: largest fraction of a view's keypoints to leave out.
        rotation_deg: largest rotation of each view either way. The canvas grows to hold the view.
        negatives: fraction of pairs from different images, which have no match.
        min_keypoints: each view keeps its first n keypoints, with n log-uniform from here to
            `train.max_keypoints`. If 0, n is that limit.
        zoom: fraction of pairs with one view that is shrunk and surrounded by views of other
            images.
        zoom_far: fraction of the zoomed pairs whose view shrinks more.
        score_drop: fraction of pairs whose keypoints all get one score.
    """

    keypoint_drop: float = Field(default=0.0, ge=0.0, le=0.9)
    rotation_deg: float = Field(default=0.0, ge=0.0, le=180.0)
    negatives: Fraction = 0.0
    min_keypoints: CountOrZero = 0
    zoom: Fraction = 0.0
    zoom_far: Fraction = 0.0
    score_drop: Fraction = 0.0

    @model_validator(mode="after")
    def _check_zoom(self) -> Augmentation:
        if self.zoom_far and not self.zoom:
            raise ValueError(f"zoom_far = {self.zoom_far}: has no effect when zoom is 0")
        return self


class TrainParams(Section):
    """The section `train`, which has everything that decides the weights."""

    # How many pairs, and how many keypoints they show
    batch: int = Field(ge=1, le=65536)
    steps: Count
    max_keypoints: KeypointCount
    augmentation: Augmentation
    model: Architecture
    # The optimizer, its learning rate, and the average of the last weights
    optimizer: Literal["adam", "muon", "sgd"]
    lr: float = Field(gt=0.0, le=10.0)
    schedule: Literal["constant_decay", "cosine", "wsd"]
    warmup_steps: CountOrZero
    decay_start: CountOrZero
    average: CountOrZero
    # How a step is computed
    precision: Literal["auto", "portable", "float32", "bfloat16", "float16"]
    # What it starts from, and how the best weights are chosen
    init_from: str
    freeze: List[str]
    val_pairs: Count
    val_every: Count
    seed: Seed

    @model_validator(mode="after")
    def _check_effects(self) -> TrainParams:
        """Reject values that another key makes useless: they train something else than is meant."""
        for name, value, limit_name, limit in (
            ("warmup_steps", self.warmup_steps, "steps", self.steps),
            ("average", self.average, "steps", self.steps),
            (
                "augmentation.min_keypoints",
                self.augmentation.min_keypoints,
                "max_keypoints",
                self.max_keypoints,
            ),
        ):
            if value > limit:
                raise ValueError(f"{name} = {value}: must be at most {limit_name} ({limit})")
        # The decay comes after the warm-up, and wsd is a decay that ends with the last step.
        start = self.decay_start
        if self.schedule != "cosine" and start < self.warmup_steps:
            raise ValueError(
                f"decay_start = {start}: must be at least warmup_steps ({self.warmup_steps})"
            )
        if self.schedule == "constant_decay" and start == 0:
            raise ValueError("decay_start = 0: must be above 0 when schedule is 'constant_decay'")
        if self.schedule == "wsd" and start >= self.steps:
            raise ValueError(
                f"decay_start = {start}: must be below steps ({self.steps}) when schedule is 'wsd'"
            )
        return self


class EvaluateParams(Section):
    """The section `evaluate`. Its `views` is the section `views`, changed by `evaluate.views`."""

    width: Side
    height: Side
    max_keypoints: KeypointCount
    pairs_per_image: Count
    views: Views


class Params(Section):
    """A whole params.yaml."""

    fetch: FetchParams
    views: Views
    keypoints: KeypointsParams
    train: TrainParams
    run: RunParams
    evaluate: EvaluateParams

    @model_validator(mode="after")
    def _check_sections(self) -> Params:
        """Check values of different sections against each other."""
        # A training cannot show more keypoints than a view stores.
        used = self.train.max_keypoints
        stored = self.keypoints.max_keypoints
        if used > stored:
            raise ValueError(
                f"train.max_keypoints = {used}: must be at most keypoints.max_keypoints ({stored}),"
                " what a view stores"
            )
        # Reject `run` settings that would change the result.
        if self.run.checkpoint_layers and self.train.model.norm == "batch":
            raise ValueError(
                "run.checkpoint_layers = true: needs train.model.norm: layer (running statistics"
                " would move twice)"
            )
        if self.run.compile and self.train.precision == "portable":
            raise ValueError(
                "run.compile = true: compiles for this processor, unlike train.precision:"
                " portable; set false, or float32"
            )
        return self


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Dict[str, Any]:
    """Return the values of nested dicts under joined names.

    For example `{"train.lr": 0.0001, "views.homography.scale_min": 0.5, ...}`.

    Args:
        tree: the nested dicts.
        prefix: a text before each name.
    """
    values: Dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            values.update(flatten(value, f"{prefix}{key}."))
        else:
            values[f"{prefix}{key}"] = value
    return values


def load(path: Path) -> Params:
    """Read and check a file of parameters.

    Raises:
        RequestError: If the file cannot be read, or if a key or a value is wrong.
    """
    return parse(_read(path), str(path))


def find_default_file() -> Path:
    """Return params.yaml of the current folder, or of the project if there is none."""
    path = Path("params.yaml")
    return path if path.is_file() else Path(__file__).resolve().parents[1] / "params.yaml"


def is_portable(words: Sequence[str]) -> bool:
    """Return whether `train.precision` is `portable` in the file that --params names.

    A command calls this function before it loads torch. It returns False for a wrong command line
    or file, whose errors `main` reports later, and for a pipe, which can be read only once.

    Args:
        words: the command line.
    """
    parser = Parser(add_help=False)
    parser.add_argument("--params", type=Path, default=find_default_file())
    with contextlib.suppress(RequestError):
        path = parser.parse_known_args(words)[0].params
        return path.is_file() and load(path).train.precision == "portable"
    return False


def require_prepared(sections: Params) -> None:
    """Check that this process is prepared if `train.precision` is `portable`.

    A process is not prepared if torch or numpy was loaded before `environment.prepare_network` was
    called.

    Raises:
        RequestError: If the process is not prepared.
    """
    if sections.train.precision == "portable" and not environment.is_prepared():
        raise RequestError(
            "train.precision = 'portable': torch was loaded without the settings that this needs;"
            " start a new process by `python -m pipeline.launch pipeline.train`, with a file (no"
            " pipe) as --params"
        )


def parse(tree: Any, origin: str) -> Params:
    """Check the plain dicts of a file of parameters.

    Args:
        tree: the content of the file.
        origin: the name of the file in messages.

    Raises:
        RequestError: If keys or values are wrong. The line has pydantic's message for each key.
    """
    try:
        full = _add_views(tree) if isinstance(tree, dict) else tree
        # Strict mode takes a mapping for the dataclass Architecture only from JSON.
        return Params.model_validate_json(json.dumps(full, default=str))
    except ValidationError as error:
        text = "; ".join(map(_describe_error, error.errors()))
        raise RequestError(f"{origin}: {' '.join(text.split())}") from None  # Keys may have breaks


def _describe_error(error: Any) -> str:
    """Return the key, its value unless that is a section, and pydantic's message."""
    key = ".".join(map(str, error["loc"]))
    value = "" if isinstance(error["input"], dict) else f" = {error['input']!r}"
    return f"{key}{value}: {error['msg']}" if key else error["msg"]


def _add_views(tree: Dict[Any, Any]) -> Dict[Any, Any]:
    """Return the tree with the views in the sections `keypoints` and `evaluate`."""
    # A section that is no dict is left as it is, and pydantic reports it.
    full = dict(tree)
    for name in ("keypoints", "evaluate"):
        if isinstance(tree.get(name), dict):
            changes = tree[name].get("views", {})
            full[name] = {**tree[name], "views": _merge(tree.get("views"), changes)}
    return full


def _merge(tree: Any, changes: Any) -> Any:
    """Return a tree in which the values of `changes` replace those of `tree`, at any depth."""
    if not (isinstance(tree, dict) and isinstance(changes, dict)):
        return changes
    return {**tree, **{key: _merge(tree.get(key), value) for key, value in changes.items()}}


def read_preset_name(path: Path) -> str:
    """Read the name of the preset from the first line of a params.yaml, "" if there is none."""
    match = re.match(r"# Preset ([\w.-]+):", path.read_text(encoding="utf-8"))
    return match[1] if match else ""


def name_data(fetch: FetchParams) -> str:
    """Return the name of the training images: their source or folder."""
    return Path(fetch.path).name if fetch.source == "folder" else fetch.source


def _read(path: Path) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        reason = " ".join(str(error).split())  # YAML's has the line and its text
        raise RequestError(f"{path}: cannot be read: {reason}") from None
