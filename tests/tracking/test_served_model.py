"""The registered model: its answers, and the server that `mlflow models serve` starts."""

import base64
import dataclasses
import os
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pandas
import pytest
import requests
from PIL import Image
from waiting import wait_until

from pipeline.distributed import find_free_port
from pipeline.tracking import describe_model
from superglue_sift import Matcher
from superglue_sift.features import images as image_files
from superglue_sift.network.weights import find_shipped_weights


@pytest.fixture(scope="module")
def images():
    """A photograph and the same turned by 15 degrees, (H, W) uint8."""
    data = pytest.importorskip("skimage.data")
    image = cv2.resize(data.camera(), (240, 180), interpolation=cv2.INTER_AREA)
    return image, cv2.warpAffine(image, cv2.getRotationMatrix2D((120, 90), 15, 1), (240, 180))


@pytest.fixture(scope="module")
def post(tmp_path_factory):
    """A running server: `post(image0, image1, **params)` is its response."""
    from mlflow import pyfunc

    folder = tmp_path_factory.mktemp("served")
    weights = find_shipped_weights()
    files = [str(weights), str(weights.with_suffix(".trained_on.txt"))]
    pyfunc.save_model(folder / "model", **describe_model(files))
    port = find_free_port()
    model = shlex.quote(str(folder / "model"))
    words = f"models serve -m {model} --env-manager local --port {port} --workers 1"
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    log = folder / "log"
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *shlex.split(words)],
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

    def post(image0, image1, **params):
        body = {"dataframe_records": [{"image0": image0, "image1": image1}], "params": params}
        return requests.post(f"http://127.0.0.1:{port}/invocations", json=body, timeout=120)

    wait_until(is_up, 300)
    yield post
    process.terminate()
    process.wait(timeout=60)


def encode_text(image):
    return base64.b64encode(cv2.imencode(".png", image)[1].tobytes()).decode()


def predict(matcher, *images, **params):
    """The prediction of the model with this matcher for a request, without a server."""
    from pipeline.served_model import MatcherModel

    model = MatcherModel()
    model.matcher = matcher
    row = pandas.DataFrame([dict(zip(("image0", "image1"), images))])
    defaults = {"threshold": 0.0, "max_keypoints": 1000, "refine": False}
    (prediction,) = model.predict(None, row, {**defaults, **params})
    return prediction


@pytest.mark.parametrize("kind", ["transparent", "turned", "16 bits"])
def test_a_file_is_matched_as_by_the_matcher(images, untrained, tmp_path, kind):
    picture = Image.fromarray(images[0])
    path = tmp_path / "a.png"
    options = {}
    if kind == "transparent":  # the left half
        alpha = np.repeat(np.uint8([[0, 255]]), 120, axis=1).repeat(180, axis=0)
        picture.putalpha(Image.fromarray(alpha))
    elif kind == "turned":
        options["exif"] = Image.Exif()
        options["exif"][image_files.ORIENTATION] = 6
    else:
        picture = Image.fromarray(images[0].astype(np.uint16) * 16)
    picture.save(path, **options)
    prediction = predict(untrained, base64.b64encode(path.read_bytes()).decode(), images[1])
    matcher = dataclasses.replace(untrained, threshold=0.0, refine=False)
    expected = matcher.match(path, images[1])
    np.testing.assert_array_equal(prediction["keypoints0"], expected.keypoints0)
    np.testing.assert_array_equal(prediction["matches"], expected.matches)
    # known values: nothing lies in the transparent half, and positions are those of the file
    x, y = np.asarray(prediction["keypoints0"]).T
    assert len(x) > 50 and (kind != "transparent" or x.min() > 119)
    assert y.max() > (200 if kind == "turned" else 150)


def test_requests_at_once_take_turns_at_the_network(images, untrained):
    threads = []  # that of each call of a layer
    started = threading.Barrier(2)

    def enter(*_args):
        threads.append(threading.get_ident())
        time.sleep(0.01)  # the other request would come meanwhile

    def request(_number):
        started.wait()
        return predict(untrained, *images)

    hooks = [part.register_forward_pre_hook(enter) for part in untrained.model.modules()]
    with ThreadPoolExecutor(2) as pool:
        predictions = list(pool.map(request, range(2)))
    for hook in hooks:
        hook.remove()
    assert len(set(threads)) == 2 and predictions[0] == predictions[1]
    assert threads == sorted(threads, key=threads.index)  # one request after the other


@pytest.mark.slow
def test_a_server_predicts_the_matches_of_the_matcher(post, images):
    expected = Matcher.load(max_keypoints=4096).match(*images)
    assert len(expected.matches) > 50
    for row in (map(encode_text, images), (image.tolist() for image in images)):
        response = post(*row)
        assert response.ok, response.text
        (prediction,) = response.json()["predictions"]
        assert prediction["matches"] == np.asarray(expected.matches).tolist()
        np.testing.assert_allclose(prediction["keypoints1"], expected.keypoints1, atol=1e-5)
        np.testing.assert_allclose(prediction["scores"], expected.scores, atol=1e-5)
        assert len(prediction["refined1"]) == len(prediction["matches"])
    texts = map(encode_text, images)
    response = post(*texts, threshold=0.9, max_keypoints=100, refine=False)
    (prediction,) = response.json()["predictions"]
    assert len(prediction["keypoints0"]) <= 100 and min(prediction["scores"]) > 0.9
    assert prediction["refined1"] is None


WRONG_REQUESTS = (
    ("holiday", {}, "image1"),  # neither base64 nor pixels
    ([[1, 2], [3]], {}, "image1"),
    ([[0.5, 1.0], [0.2, 0.0]], {}, "image1"),  # floats from 0 to 1
    (base64.b64encode(b"GIF89a").decode(), {}, "image1"),
    (None, {"max_keypoints": 0}, "max_keypoints"),
)


@pytest.mark.parametrize(("image", "params", "name"), WRONG_REQUESTS)
def test_a_wrong_request_raises_an_error_of_the_client(images, untrained, image, params, name):
    from mlflow.exceptions import MlflowException

    text = encode_text(images[1])
    with pytest.raises(MlflowException, match=name) as error:
        predict(untrained, text, image or text, **params)
    assert error.value.get_http_status_code() == 400


@pytest.mark.slow
def test_a_server_answers_a_wrong_request_with_code_400(post, images):
    text = encode_text(images[1])
    for image, params, name in WRONG_REQUESTS:
        response = post(text, image or text, **params)
        assert response.status_code == 400 and name in response.json()["message"]
