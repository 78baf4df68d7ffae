"""The registered model as people use it: `mlflow models serve`, asked over HTTP."""

import base64
import os
import signal
import subprocess
import sys

import cv2
import numpy as np
import pytest
import requests
from waiting import wait_until

from pipeline.distributed import free_port
from pipeline.mlflow_store import save_model
from superglue_sift import Matcher
from superglue_sift.network.weights import shipped_weights

THRESHOLD = 0.35  # the model's own, in this test


@pytest.fixture(scope="module")
def images():
    """A photograph and the same turned by 15 degrees, (H, W) uint8."""
    data = pytest.importorskip("skimage.data")
    image = cv2.resize(data.camera(), (240, 180), interpolation=cv2.INTER_AREA)
    return image, cv2.warpAffine(image, cv2.getRotationMatrix2D((120, 90), 15, 1), (240, 180))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    weights = shipped_weights()
    files = [str(weights), str(weights.with_suffix(".trained_on.txt"))]
    save_model(folder, "", "", files, THRESHOLD)
    return folder


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """The address of a running server."""
    port = free_port()
    words = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(model)]
    words += ["--env-manager", "local", "--port", str(port), "--workers", "1"]
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    log = tmp_path_factory.mktemp("served") / "log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            words,
            env={**os.environ, "PATH": path},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )

    def is_up():
        assert process.poll() is None, log.read_text()
        try:
            return requests.get(f"http://127.0.0.1:{port}/ping", timeout=5).ok
        except requests.RequestException:
            return False

    wait_until(is_up, 300)
    yield f"http://127.0.0.1:{port}/invocations"
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=60)


def as_text(image):
    return base64.b64encode(cv2.imencode(".png", image)[1].tobytes()).decode()


def ask(served, row, **params):
    body = {"dataframe_records": [row], "params": params}
    return requests.post(served, json=body, timeout=120)


@pytest.mark.slow
def test_a_server_answers_what_the_matcher_finds(served, images):
    expected = Matcher.load(threshold=THRESHOLD, max_keypoints=4096).match(*images)
    assert len(expected.matches) > 50
    for row in (
        {"image0": as_text(images[0]), "image1": as_text(images[1])},
        {"image0": images[0].tolist(), "image1": images[1].tolist()},
    ):
        answer = ask(served, row)
        assert answer.ok, answer.text
        (found,) = answer.json()["predictions"]
        assert found["matches"] == np.asarray(expected.matches).tolist()
        np.testing.assert_allclose(found["keypoints1"], expected.keypoints1, atol=1e-5)
        np.testing.assert_allclose(found["scores"], expected.scores, atol=1e-5)
        assert min(found["scores"]) > THRESHOLD and len(found["aligned1"]) == len(found["matches"])
    (fewer,) = ask(served, row, threshold=0.9, max_keypoints=100, refine=False).json()[
        "predictions"
    ]
    assert len(fewer["keypoints0"]) <= 100 and min(fewer["scores"]) > 0.9
    assert fewer["aligned1"] is None


@pytest.mark.slow
def test_a_wrong_request_is_answered_with_the_reason(served, images):
    good = as_text(images[1])
    for image, params, said in (
        ("holiday", {}, "image1: neither base64 nor pixels"),
        ([[1, 2], [3]], {}, "image1: must be base64 of an image file, or pixels"),
        (base64.b64encode(b"GIF89a").decode(), {}, "image1"),
        (good, {"max_keypoints": 0}, "max_keypoints: must be 1 to 4096"),
    ):
        answer = ask(served, {"image0": as_text(images[0]), "image1": image}, **params)
        assert answer.status_code == 400
        assert said in answer.json()["message"].splitlines()[-1]  # MLflow quotes the request first
