"""Fixtures shared by all tests: small photographs, sections of params.yaml, real data where it is
at hand. Tests are not type-checked, so they and their helpers have no annotations.
"""

import os

# before torch is loaded: on the small tensors of tests the threads of several processes only fight
# for the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

# No deadline: how long an example takes on a busy machine says nothing about the code. The same
# examples in each run: a failure must not go away by running again.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

# `make test` must not reach into the makes that tests start: they would print what the outer one
# asks for, such as the folder that they enter.
for name in ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "GNUMAKEFLAGS"):
    os.environ.pop(name, None)

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


@pytest.fixture(autouse=True)
def same_environment():
    """Restore the environment after each test: a RANK left in it would make the next test wait for
    peers.
    """
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def root():
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data():
    """`../shared/data`: real photographs and image pairs next to the clone; skips without them."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the real images in {folder}")
    return folder


@pytest.fixture(scope="session")
def photo():
    """A real gray photograph, uint8 (H, W) = (400, 600), one that ships inside scikit-image."""
    from skimage import color, data

    return (color.rgb2gray(data.coffee()) * 255).round().astype(np.uint8)


@pytest.fixture(scope="session")
def color_photo():
    """A real color photograph, uint8 RGB (300, 451, 3), one that ships inside scikit-image."""
    from skimage import data

    return data.chelsea()


@pytest.fixture(scope="session")
def turned(photo):
    """`photo` as seen by a camera that turned and moved, by the homography `made_scenes.TURN`."""
    import cv2
    from made_scenes import TURN

    return cv2.warpPerspective(photo, TURN, photo.shape[::-1])


@pytest.fixture
def image_folder(tmp_path, photo, color_photo):
    """A folder of four readable images: JPEG, PNG and WebP, gray and color, one of them nested."""
    import cv2

    folder = tmp_path / "images"
    (folder / "nested").mkdir(parents=True)
    bgr = color_photo[:, :, ::-1]
    for name, image in (
        ("coffee.png", photo),
        ("chelsea.jpg", bgr),
        ("flipped.webp", bgr[:, ::-1]),
        ("nested/turned.JPG", np.rot90(photo)),
    ):
        assert cv2.imwrite(str(folder / name), np.ascontiguousarray(image))
    return folder


@pytest.fixture(scope="session")
def make_params():
    """`make_params("train", steps=3)`: a checked section, the sample preset with these keys
    changed.

    A training starts from no weights, is in float32 on every machine, and has a warm-up of at most
    its steps. Keys of `nest` may stand in `train`. A nested section is changed key by key:
    `make_params("keypoints", views={"homography": {"scale_min": 0.8}})`.
    """
    from made_params import make_tree, nest

    from pipeline import params

    def changed(tree, changes):
        merged = dict(tree)
        for key, value in changes.items():
            nested = isinstance(value, dict) and isinstance(tree.get(key), dict)
            merged[key] = changed(tree[key], value) if nested else value
        return merged

    def make(section, **changes):
        sample = make_tree({})
        tree = make_tree({section: sample[section]})
        if section == "train":
            changes = {"init_from": "", "precision": "float32", **changes}
            warmup = min(tree[section]["warmup_steps"], changes.get("steps", 10**9))
            changes = nest({"warmup_steps": warmup, **changes})
        if section != "views" and "views" in changes:
            tree["views"] = changed(tree["views"], changes.pop("views"))
        tree[section] = changed(tree[section], changes)
        return getattr(params.parse(tree, "params"), section)

    return make


@pytest.fixture(scope="session")
def empty_mlflow_store(tmp_path_factory):
    """An MLflow store with tables, to be copied: creating one takes seconds."""
    from pipeline.tracking import create_database

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    create_database(path)
    return path


@pytest.fixture
def mlflow_store(empty_mlflow_store, tmp_path, monkeypatch):
    """Address of a new local MLflow store."""
    (tmp_path / "mlflow.db").write_bytes(empty_mlflow_store.read_bytes())
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


def pytest_collection_modifyitems(items):
    """Skip tests marked `gpu` where no CUDA device is, with the reason."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The file of an untrained network of two layers."""
    from made_scenes import write_model

    return write_model(tmp_path_factory.mktemp("model") / "m.safetensors", layers=2)


@pytest.fixture(scope="session")
def untrained(model):
    """A matcher with that network."""
    from superglue_sift import Matcher

    return Matcher.load(model, "cpu", max_keypoints=1000, network_keypoints=400)
