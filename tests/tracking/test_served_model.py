"""The registered model as people use it: `mlflow models serve`, asked over HTTP."""

import base64
import os
import subprocess
import sys

import cv2
import numpy as np
import pytest
import requests
from waiting import wait_until

from pipeline.distributed import free_port
from pipeline.mlflow_store import describe_model
from superglue_sift import Matcher
from superglue_sift.network.weights import shipped_weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def images():
    """A photograph and the same turned by 15 degrees, (H, W) uint8."""
    data = pytest.importorskip("skimage.data")
    image = cv2.resize(data.camera(), (240, 180), interpolation=cv2.INTER_AREA)
    return image, cv2.warpAffine(image, cv2.getRotationMatrix2D((120, 90), 15, 1), (240, 180))


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """A running server: `ask(image0, image1, **params)` is its answer."""
    from mlflow import pyfunc

    folder = tmp_path_factory.mktemp("served")
    weights = shipped_weights()
    files = [str(weights), str(weights.with_suffix(".trained_on.txt"))]
    pyfunc.save_model(folder / "model", **describe_model(files))
    port = free_port()
    words = f"models serve -m {folder / 'model'} --env-manager local --port {port} --workers 1"
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    log = folder / "log"
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words.split()],
        env={**os.environ, "PATH": path},
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
    )

    def is_up():
        assert process.poll() is None, log.read_text()
        try:
            return requests.get(f"http://127.0.0.1:{port}/ping", timeout=5).ok
        except requests.RequestException:
            return False

    def ask(image0, image1, **params):
        body = {"dataframe_records": [{"image0": image0, "image1": image1}], "params": params}
        return requests.post(f"http://127.0.0.1:{port}/invocations", json=body, timeout=120)

    wait_until(is_up, 300)
    yield ask
    process.terminate()
    process.wait(timeout=60)


def as_text(image):
    return base64.b64encode(cv2.imencode(".png", image)[1].tobytes()).decode()


def test_a_server_answers_what_the_matcher_finds(ask, images):
    expected = Matcher.load(max_keypoints=4096).match(*images)
    assert len(expected.matches) > 50
    for row in (map(as_text, images), (image.tolist() for image in images)):
        answer = ask(*row)
        assert answer.ok, answer.text
        (found,) = answer.json()["predictions"]
        assert found["matches"] == np.asarray(expected.matches).tolist()
        np.testing.assert_allclose(found["keypoints1"], expected.keypoints1, atol=1e-5)
        np.testing.assert_allclose(found["scores"], expected.scores, atol=1e-5)
        assert len(found["aligned1"]) == len(found["matches"])
    answer = ask(*map(as_text, images), threshold=0.9, max_keypoints=100, refine=False)
    (fewer,) = answer.json()["predictions"]
    assert len(fewer["keypoints0"]) <= 100 and min(fewer["scores"]) > 0.9
    assert fewer["aligned1"] is None


def test_a_wrong_request_is_answered_with_the_reason(ask, images):
    good = as_text(images[1])
    for image, params, said in (
        ("holiday", {}, "image1: neither base64 nor pixels"),
        ([[1, 2], [3]], {}, "image1: must be base64 of an image file, or pixels"),
        (base64.b64encode(b"GIF89a").decode(), {}, "image1"),
        (good, {"max_keypoints": 0}, "max_keypoints: must be 1 to 4096"),
    ):
        answer = ask(good, image, **params)
        assert answer.status_code == 400
        assert said in answer.json()["message"].splitlines()[-1]  # MLflow quotes the request first
