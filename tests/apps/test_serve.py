"""The page of `superglue-match serve`: its answers, and who may ask."""

import base64
import dataclasses
import io
import json
import re
import socket
import threading
from unittest import mock

import cv2
import numpy as np
import pytest
from waiting import wait_until

from superglue_sift.apps import results, serve

pytest.importorskip("flask", reason="needs Flask")
HOME = "http://127.0.0.1:8010"


@pytest.fixture(scope="module")
def views(photo, turned):
    """Two views of a photograph as PNG."""
    return [cv2.imencode(".png", view)[1].tobytes() for view in (photo, turned)]


@pytest.fixture(scope="module")
def client(untrained):
    return serve.make_app(untrained).test_client()


def post(client, *files, headers=None, url=HOME, **fields):
    images = {f"image{i}": (io.BytesIO(data), "../../a<b>.png") for i, data in enumerate(files)}
    return client.post("/match", data={**images, **fields}, base_url=url, headers=headers)


def read_steps(response):
    """The steps of a response, of which the last has the files."""
    return [json.loads(line) for line in response.text.splitlines()]


def decode_gray(data):
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)


def test_two_images_give_the_steps_and_the_files_of_the_command(client, untrained, views):
    *steps, last = read_steps(post(client, *views, threshold=0.5))
    assert [step["done"] for step in steps] == [0, 1, 2, 3]
    expected = dataclasses.replace(untrained, threshold=0.5).match(*map(decode_gray, views))
    assert last["threshold"] == 0.5 and last["summary"] == expected.summarize()
    files = {name: base64.b64decode(text) for name, text in last["files"].items()}
    report = json.loads(files["matches.json"])
    assert report["matches"] == json.loads(results.make_json(expected))["matches"]
    with np.load(io.BytesIO(files["matches.npz"])) as arrays:
        assert (arrays["matches"] >= 0).sum() == len(expected.matches)
    picture = expected.show(*map(decode_gray, views), captions=False)
    assert cv2.imdecode(np.frombuffer(files["matches.jpg"], np.uint8), 1).shape == (
        picture.pixels.shape
    )
    assert last["caption"] == picture.legend
    assert read_steps(post(client, *views))[-1]["threshold"] == untrained.threshold


def test_a_bad_image_is_named(client, views):
    for files, name in (((b"", views[0]), "first"), ((views[0], b"<svg/>"), "second")):
        assert name in read_steps(post(client, *files))[-1]["error"]


def test_large_incomplete_and_foreign_requests_are_refused(client, untrained, views):
    assert post(client, bytes(serve.MAX_REQUEST_BYTES), b"").status_code == 413
    assert post(client, views[0]).status_code == 400  # one image
    assert post(client, *views, headers={"Origin": "http://evil.example"}).status_code == 403
    assert post(client, *views, url="http://evil.example").status_code == 400
    assert client.get("/match", base_url=HOME).status_code == 405
    page = client.get("/", base_url=HOME, headers={"Origin": HOME})
    assert page.status_code == 200 and "http" not in page.text  # loads nothing from elsewhere
    assert f"{untrained.threshold:.2f}" in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]


def test_the_server_listens_on_a_free_port_of_this_machine_alone(untrained, capfd):
    with socket.socket() as listener:
        listener.bind((serve.HOST, 0))
        listener.listen()
        used_port = listener.getsockname()[1]
        with mock.patch.object(serve, "PORT", used_port):
            threading.Thread(target=serve.serve_page, args=(untrained,), daemon=True).start()
            outputs = []
            wait_until(
                lambda: outputs.append(capfd.readouterr().out) or "http" in "".join(outputs), 10
            )
    port = int(re.search(r"http://127.0.0.1:(\d+)", "".join(outputs)).group(1))
    assert port != used_port
    for host, is_open in ((serve.HOST, True), ("127.0.0.2", False)):
        with socket.socket() as probe:
            assert (probe.connect_ex((host, port)) == 0) == is_open
