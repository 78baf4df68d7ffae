"""Custom features: the return value of an extractor, distances, and the stages from photographs to
matches.
"""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from made_params import make_tree
from made_scenes import write_model
from made_trainings import leave_records_out
from reading import read_json

from pipeline import export
from pipeline.errors import RequestError
from pipeline.evaluate import __main__ as evaluate
from pipeline.fetch import __main__ as fetch
from pipeline.keypoints import __main__ as keypoints
from pipeline.keypoints.store import KeypointStore
from pipeline.train import __main__ as train
from superglue_sift import opencv_features
from superglue_sift.features import extractors, sift
from superglue_sift.features.features import Features
from superglue_sift.interop.convert import to_lightglue
from superglue_sift.matcher import Matcher

KAZE = "superglue_sift.opencv_features:kaze"
UPRIGHT = "features.test_extractors:upright"
needs_kaze = pytest.mark.skipif(not hasattr(cv2, "KAZE_create"), reason="OpenCV 5 has no KAZE")


def upright(gray, max_keypoints):
    """Corners with the pixels around them: no scale, no angle, 9 floats, as tensors."""
    corners = cv2.goodFeaturesToTrack(gray, max_keypoints, 0.01, 4)
    places = np.zeros((0, 2), np.float32) if corners is None else corners[:, 0]
    patches = [cv2.getRectSubPix(gray, (3, 3), (float(x), float(y))).ravel() for x, y in places]
    return {
        "keypoints": torch.from_numpy(places),
        "scores": torch.ones(len(places)),
        "descriptors": torch.from_numpy(np.array(patches, np.float32).reshape(-1, 9)),
    }


@needs_kaze
@pytest.mark.parametrize(("name", "dim", "scale_angle"), [(KAZE, 64, True), (UPRIGHT, 9, False)])
def test_keypoints_are_strongest_first_and_of_distinct_positions(name, dim, scale_angle, photo):
    extractor = extractors.load_extractor(name)
    features = extractor(photo, 200)
    count = len(features.keypoints)
    assert (extractor.descriptor, extractor.descriptor_dim) == ("float", dim)
    assert features.descriptors.shape == (count, 1, dim) and not features.is_sift
    assert extractor.scale_angle == scale_angle == bool(features.scales.all())
    assert 100 < count <= 200
    assert (np.diff(features.scores) <= 0).all()
    assert len(np.unique(features.keypoints, axis=0)) == count
    for array, again in zip(features[:5], extractor(photo, 200)):
        assert array.tobytes() == again.tobytes()
    empty = extractor(np.zeros((64, 64), np.uint8), 10)
    assert empty.descriptors.shape == (0, 1, dim)


def make_arrays(**changes):
    """What an extractor returns for three keypoints, with these entries changed, or without one."""
    arrays = {
        "keypoints": np.arange(6.0).reshape(3, 2),
        "scores": np.ones(3),
        "descriptors": np.ones((3, 8), np.float32),
    }
    return {name: value for name, value in {**arrays, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    "changes",
    [
        {"descriptors": None},
        {"descriptors": np.ones((2, 8), np.float32)},
        {"descriptors": np.ones((3, 8), np.uint8)},
        {"descriptors": np.full((3, 8), np.nan, np.float32)},
        {"scales": np.ones(3)},  # without orientations
    ],
)
def test_wrong_arrays_are_refused_by_the_extractors_name(changes):
    extractor = extractors.Extractor("x:y", "float", 8, False, lambda *_: make_arrays(**changes))
    with pytest.raises(RequestError, match="x:y"):
        extractor(np.zeros((9, 9), np.uint8), 10)


@pytest.mark.parametrize("name", ["nowhere_at_all:f", "math:sqrt"])
def test_an_extractor_that_cannot_be_run_is_refused_in_one_line(name):
    with pytest.raises(RequestError, match=name) as caught:
        extractors.load_extractor(name)
    assert "\n" not in str(caught.value)


@needs_kaze
def test_no_keypoint_lies_under_a_mask(photo):
    mask = np.zeros_like(photo)
    mask[:, 300:] = 1
    for name in (KAZE, "sift"):
        extractor = extractors.load_extractor(name)
        keypoints = extractor(photo, 200, mask).keypoints
        assert 50 < len(keypoints) <= 200 and keypoints[:, 0].min() > 299.4
        assert len(extractor(photo, 200, np.zeros_like(photo)).keypoints) == 0


def write_untrained(path, name, **changes):
    dim = extractors.load_extractor(name).descriptor_dim
    extractor = {"extractor": name, "descriptor": "float", "descriptor_dim": dim}
    return write_model(path, dim=16, **extractor, **changes)


@needs_kaze
def test_a_model_file_does_not_run_the_code_it_names(tmp_path, photo):
    path = write_untrained(tmp_path / "kaze.safetensors", KAZE)
    matcher = Matcher.load(path, "cpu", threshold=0.0)
    with pytest.raises(RequestError, match=KAZE):
        matcher.match(photo, photo)
    with pytest.raises(RequestError, match="sift"):
        Matcher.load(path, "cpu", extractor="sift")
    arrays = opencv_features.kaze(photo, 100)
    features = Features.from_dict(arrays, (600, 400))
    assert len(matcher.match(features, features).matches)
    assert len(Matcher.load(path, "cpu", extractor=KAZE, threshold=0.0).match(photo, photo).matches)


@needs_kaze
def test_keypoints_of_other_descriptors_are_refused(tmp_path, photo):
    kaze_matcher = Matcher.load(write_untrained(tmp_path / "kaze.safetensors", KAZE), "cpu")
    sift_features = sift.extract(photo, 50)
    with pytest.raises(RequestError, match="sift"):
        kaze_matcher.match(sift_features, sift_features)
    path = write_untrained(tmp_path / "with.safetensors", UPRIGHT)
    with pytest.raises(RequestError, match="scale"):
        Matcher.load(path, "cpu", extractor=UPRIGHT).match(photo, photo)
    path = write_untrained(tmp_path / "without.safetensors", UPRIGHT, scale_angle=False)
    assert len(Matcher.load(path, "cpu", extractor=UPRIGHT).match(photo, photo).matches)


@needs_kaze
def test_only_features_of_sift_become_features_of_lightglue(photo):
    with pytest.raises(RequestError):
        to_lightglue(extractors.load_extractor(KAZE)(photo, 10))


@pytest.mark.slow
def test_a_network_is_trained_on_another_extractor(tmp_path, make_params, monkeypatch, photo, root):
    from ruamel.yaml import YAML

    leave_records_out(monkeypatch)
    monkeypatch.chdir(tmp_path)
    few = {"max_keypoints": 128}
    training = {"dim": 32, "layers": 1, "steps": 6, "batch": 4, "val_every": 3, "val_pairs": 8}
    without_scale_angle = {"neighbours": False, "rotation_deg": 0.0}
    tree = {
        "fetch": make_params("fetch"),
        "keypoints": make_params("keypoints", extractor=UPRIGHT, views_per_image=4, **few),
        "train": make_params("train", **training, **without_scale_angle, **few),
        "evaluate": make_params("evaluate", pairs_per_image=3, **few),
    }
    sections = {section: values.model_dump() for section, values in tree.items()}
    with Path("params.yaml").open("w") as stream:
        YAML(typ="safe").dump(make_tree(sections), stream)
    fetch.main([])
    keypoints.main(["--workers", "1"])
    store = KeypointStore("data/keypoints/train")
    assert (store.extractor, store.descriptor, store.descriptor_dim) == (UPRIGHT, "float", 9)
    assert train.main([]) == 0
    shipped = root / "pretrained/superglue-sift.safetensors"
    words = ["--model", "checkpoints/best.safetensors", "--also", f"sift={shipped}"]
    assert evaluate.main(words) == 0
    metrics = read_json(Path("reports/evaluate/metrics.json"))
    assert metrics["mutual_nn.precision"] > 0.01  # nine raw pixels tell little apart
    # a matcher of other keypoints is not scored
    assert not any(key.startswith("sift.") for key in metrics)
    export.main([])
    assert read_json(Path("models/superglue.json"))["model"]["extractor"] == UPRIGHT
    matcher = Matcher.load("models/superglue.safetensors", "cpu", extractor=UPRIGHT, threshold=0.0)
    matches = matcher.match(photo, photo).matches
    assert (matches[:, 0] == matches[:, 1]).mean() > 0.9
    assert len(matches) > 50
