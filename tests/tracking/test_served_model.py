"""The registered model as people use it: loaded by MLflow."""

import base64
from pathlib import Path

import cv2
import numpy as np
import pytest

from pipeline.mlflow_store import save_model
from superglue_sift import Matcher
from superglue_sift.network.weights import shipped_weights


@pytest.fixture(scope="module")
def images():
    """A photograph and the same turned by 15 degrees, (H, W) uint8."""
    skimage = pytest.importorskip("skimage")
    image = cv2.imread(str(Path(skimage.__file__).parent / "data/camera.png"), cv2.IMREAD_GRAYSCALE)
    image = cv2.resize(image, (240, 180), interpolation=cv2.INTER_AREA)
    return image, cv2.warpAffine(image, cv2.getRotationMatrix2D((120, 90), 15, 1), (240, 180))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    save_model(
        folder, "", "", [str(shipped_weights()), str(shipped_weights().parent / "README.md")]
    )
    return folder


def file_text(image):
    return base64.b64encode(cv2.imencode(".png", image)[1].tobytes()).decode()


@pytest.mark.slow
def test_mlflow_loads_it_and_it_says_what_the_matcher_says(model, images):
    from mlflow import pyfunc

    loaded = pyfunc.load_model(str(model))
    assert loaded.metadata.signature.inputs.input_names() == ["image0", "image1"]
    expected = Matcher.load().match(*images)
    assert len(expected.matches) > 50
    rows = [
        {"image0": file_text(images[0]), "image1": file_text(images[1])},
        {"image0": images[0], "image1": images[1]},
    ]
    for found in loaded.predict(rows):
        assert found["matches"] == expected.matches.tolist()
        np.testing.assert_allclose(found["keypoints1"], expected.keypoints1, atol=1e-5)
        np.testing.assert_allclose(found["scores"], expected.scores, atol=1e-5)
    fewer = loaded.predict(rows[:1], params={"threshold": 0.9, "max_keypoints": 100})[0]
    assert len(fewer["keypoints0"]) <= 100 and min(fewer["scores"]) > 0.9
