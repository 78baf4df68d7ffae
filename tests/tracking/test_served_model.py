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
def ask(tmp_path_factory):
    """A running server: `ask(image0, image1, **params)` is its answer."""
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

    def ask(image0, image1, **params):
        body = {"dataframe_records": [{"image0": image0, "image1": image1}], "params": params}
        return requests.post(f"http://127.0.0.1:{port}/invocations", json=body, timeout=120)

    wait_until(is_up, 300)
    yield ask
    process.terminate()
    process.wait(timeout=60)


def as_text(image):
    return base64.b64encode(cv2.imencode(".png", image)[1].tobytes()).decode()


def predict(matcher, *images, **params):
    """The answer of the model with this matcher to a request, without a server."""
    from pipeline.served_model import MatcherModel

    model = MatcherModel()
    model.matcher = matcher
    row = pandas.DataFrame([dict(zip(("image0", "image1"), images))])
    defaults = {"threshold": 0.0, "max_keypoints": 1000, "refine": False}
    (answer,) = model.predict(None, row, {**defaults, **params})
    return answer


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
    found = predict(untrained, base64.b64encode(path.read_bytes()).decode(), images[1])
    matcher = dataclasses.replace(untrained, threshold=0.0, refine=False)
    expected = matcher.match(path, images[1])
    np.testing.assert_array_equal(found["keypoints0"], expected.keypoints0)
    np.testing.assert_array_equal(found["matches"], expected.matches)
    # known values: nothing lies in the transparent half, and positions are those of the file
    x, y = np.asarray(found["keypoints0"]).T
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
        answers = list(pool.map(request, range(2)))
    for hook in hooks:
        hook.remove()
    assert len(set(threads)) == 2 and answers[0] == answers[1]
    assert threads == sorted(threads, key=threads.index)  # one request after the other


@pytest.mark.slow
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
        assert len(found["refined1"]) == len(found["matches"])
    answer = ask(*map(as_text, images), threshold=0.9, max_keypoints=100, refine=False)
    (fewer,) = answer.json()["predictions"]
    assert len(fewer["keypoints0"]) <= 100 and min(fewer["scores"]) > 0.9
    assert fewer["refined1"] is None


WRONG = (
    ("holiday", {}, "image1: neither base64 nor pixels"),
    ("fête", {}, "image1: neither base64 nor pixels"),
    ([[1, 2], [3]], {}, "image1: must be base64 of an image file, or pixels"),
    ([[[1, 2, 3, 4]]], {}, "image1: must be base64 of an image file, or pixels"),
    (base64.b64encode(b"GIF89a").decode(), {}, "image1: "),
    (None, {"max_keypoints": 0}, "max_keypoints: must be 1 to 4096"),
    (None, {"threshold": 2.0}, "threshold"),
)


@pytest.mark.parametrize(("image", "params", "said"), WRONG)
def test_a_wrong_request_raises_the_reason(images, untrained, image, params, said):
    from mlflow.exceptions import MlflowException

    good = as_text(images[1])
    with pytest.raises(MlflowException, match=said) as caught:
        predict(untrained, good, image or good, **params)
    assert caught.value.get_http_status_code() == 400


@pytest.mark.slow
def test_a_wrong_request_is_answered_with_the_reason(ask, images):
    good = as_text(images[1])
    for image, params, said in WRONG:
        answer = ask(good, image or good, **params)
        assert answer.status_code == 400
        assert said in answer.json()["message"].splitlines()[-1]  # MLflow quotes the request first
