"""An older params.yaml: the error names each removed or renamed key and says what to do."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any, Callable, Dict

import pytest
from ruamel.yaml import YAML

from pipeline import errors, export, presets
from pipeline.evaluate import heldout, matchers, scoring
from pipeline.fetch import splits
from pipeline.keypoints import __main__ as keypoints
from pipeline.keypoints import image as keypoints_image
from pipeline.keypoints import shards
from pipeline.parameters import old_keys, params
from pipeline.parameters.schema import flatten
from pipeline.train import optimization, setup, step, trainer
from pipeline.train.pairs import augmentation
from pipeline.views import homography
from superglue_sift import classical

# The file of preset sample in version 0.1.0.
OLD = """
fetch:
  {source: "sample", path: "", val_path: "", root: "", categories: "", min_side: 0, content: "", limit: 0,
  val_fraction: 0.34, test_fraction: 0.5, mirror: "", seed: 0}
keypoints:
  {decoder: "opencv", extractor: "sift", views: 12, width: 320, height: 240, max_keypoints: 256, difficulty: 1.0,
  difficulty_first: 1.0, homography: {scale_min: 0.5, perspective: 0.3, rotation_deg: 45.0, tilt_deg: 0.0,
  translation: 1.0, max_upscale: 2.0}, photometric: {brightness: 0.2, contrast: 0.3, gamma: 0.2, blur: 0.8, noise:
  0.02, jpeg: 0.3}, max_bad_fraction: 0.1, shard_images: 64, seed: 0}
train:
  {parallel: "ddp", bitwise_elastic: false, batch: 8, batch_per_rank: 0, accumulate: 1, loader: "plain", steps: 30,
  max_keypoints: 256, keypoint_drop: 0.3, min_keypoints: 0, turn_deg: 180.0, window: 1.0, unrelated: 0.0, zoom: 0.0,
  zoom_max: 7.0, dim: 128, layers: 9, heads: 4, norm: "layer", sync_batchnorm: true, scale_angle: true, neighbours:
  true, rotary: false, sinkhorn_iterations: 30, positive_px: 3.0, negative_px: 5.0, optimizer: "muon", lr: 0.0002,
  lr_scaling: "none", weight_decay: 0.0, schedule: "cosine", warmup_steps: 5, decay_start: 20, decay: 0.999,
  clip_norm: 1.0, precision: "auto", ema: 0.0, init_from: "pretrained/superglue-sift.safetensors", freeze: [],
  deterministic: false, checkpoint_layers: false, compile: false, profile_steps: 0, max_skipped: 20, log_every: 10,
  val_pairs: 64, val_every: 15, save_every: 15, superseded_gb: 0.0, seed: 0}
evaluate:
  {width: 320, height: 240, pairs_per_image: 40, max_keypoints: 256, difficulty: 1.0, homography: {scale_min: 0.5,
  perspective: 0.3, rotation_deg: 45.0, tilt_deg: 0.0, translation: 1.0, max_upscale: 2.0}, photometric:
  {brightness: 0.2, contrast: 0.3, gamma: 0.2, blur: 0.8, noise: 0.02, jpeg: 0.3}, correct_px: 3.0, ransac_px: 3.0,
  ransac_iterations: 3000, ratio: 0.8, threshold: 0.0, sinkhorn_iterations: 100, refine: true, pictures: 8, seed: 0}
export:
  {name: "superglue"}
"""


@pytest.fixture
def tree() -> Dict[str, Any]:
    return YAML(typ="safe", pure=True).load(OLD)


def test_each_old_key_is_known_or_named_with_what_to_do(tree: Dict[str, Any]) -> None:
    old, new = flatten(tree), flatten(YAML(typ="safe", pure=True).load(presets.render("sample")))
    kept = {"train.max_keypoints", "evaluate.width", "evaluate.height", "evaluate.max_keypoints"}
    said = dict(line.split(": ", 1) for line in old_keys.advice(tree))
    assert len(old) == 112
    for key in old:
        assert (key in said) != (key in new or key in kept), key
    assert set(old_keys.RENAMED) | set(old_keys.GONE) <= set(old)
    assert set(old_keys.RENAMED.values()) <= set(new)
    assert said["train.turn_deg"] == "is now train.rotation_deg"
    assert said["train.save_every"] == 'delete the line; write train.options: "--save-every 15" for it'
    assert said["train.compile"] == "delete the line; it is the default"
    assert said["train.max_skipped"] == "delete the line; it is always 20"


def test_the_constants_named_are_those_of_the_code() -> None:
    fixed = old_keys.FIXED
    seeds = "fetch.seed", "keypoints.seed", "evaluate.seed"
    assert [fixed[key] for key in seeds] == [splits.SEED, keypoints_image.SEED, heldout.SEED]
    bad, size = fixed["keypoints.max_bad_fraction"], fixed["keypoints.shard_images"]
    assert (bad, size) == (keypoints.MAX_BAD_FRACTION, shards.SHARD_IMAGES)
    distances = fixed["train.positive_px"], fixed["train.negative_px"]
    assert distances == (setup.POSITIVE_PX, setup.NEGATIVE_PX)
    assert (fixed["train.clip_norm"], fixed["train.max_skipped"]) == (step.CLIP_NORM, trainer.MAX_SKIPPED)
    assert fixed["train.zoom_max"] == augmentation.MAX_ZOOM
    assert fixed["train.weight_decay"].endswith(f"adamw {optimization.ADAMW_DECAY}")
    assert fixed["train.decay"].startswith("exp(-0.4)") and math.exp(-0.4) == optimization.DECAY
    scored = [fixed[f"evaluate.{name}"] for name in ("correct_px", "ransac_px", "ransac_iterations", "ratio")]
    assert scored == [scoring.CORRECT_PX, scoring.RANSAC_PX, scoring.RANSAC_ITERATIONS, classical.RATIO]
    assert fixed["evaluate.sinkhorn_iterations"] == matchers.SINKHORN_ITERATIONS
    assert fixed["export.name"] == export.OURS
    for section in ("keypoints", "evaluate"):
        assert fixed[f"{section}.difficulty"] == _default(homography.sample_view, "difficulty")
        assert fixed[f"{section}.homography.translation"] == _default(homography._place, "strength")


def _default(function: Callable, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def test_a_file_without_what_is_named_is_right(tree: Dict[str, Any], tmp_path: Path) -> None:
    """Whoever does what the lines say has a file that the stages take."""
    named = {line.split(": ", 1)[0] for line in old_keys.advice(tree)}
    # The preset's own values have changed since 0.1.0.
    today = flatten(YAML(typ="safe", pure=True).load(presets.render("sample")))
    left: Dict[str, Any] = {}
    for key, value in flatten(tree).items():
        place = left
        new = old_keys.RENAMED.get(key, key)
        *path, last = new.split(".")
        if key in named and key not in old_keys.RENAMED:
            continue
        for name in path:
            place = place.setdefault(name, {})
        place[last] = today.get(new, value)
    left["train"]["options"] = ""
    (tmp_path / "params.yaml").write_text(presets.render("sample"), encoding="utf-8")
    assert params.parse_file(left, "params.yaml") == params.load_all(tmp_path / "params.yaml")


def test_every_key_has_one_line_and_the_code_is_2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "params.yaml").write_text(OLD, encoding="utf-8")
    assert errors.run(presets.main, ["--params", str(tmp_path / "params.yaml"), "refresh"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and "params.yaml: train.turn_deg: is now train.rotation_deg\n" in error
    assert error.endswith("or write a new file: `make repro PRESET=sample`\n")


def test_options_are_written_as_on_the_command_line() -> None:
    said = list(old_keys.advice({"train": {"ema": 0.9, "compile": True, "parallel": "dp", "sinkhorn_iterations": 50}}))
    words = [line.partition('options: "')[2].partition('"')[0] for line in said]
    assert words == ["--ema 0.9", "--compile", "--parallel dp", "--sinkhorn-iterations 50"]
    train = params.option_parser().parse_args(" ".join(words).split())
    assert vars(train) == {"ema": 0.9, "compile": True, "parallel": "dp", "sinkhorn_iterations": 50}
