"""The page of `superglue-match --serve`: its answers, and who may ask."""

import base64
import dataclasses
import io
import json
import socket
import threading

import cv2
import numpy as np
import pytest
from made_scenes import TURN
from waiting import wait_until

from superglue_sift import RequestError
from superglue_sift.apps import folder, serve

pytest.importorskip("flask", reason="needs Flask")
HOME = "http://127.0.0.1:8010"


@pytest.fixture(scope="module")
def views(photo):
    """Two views of a photograph as PNG."""
    turned = cv2.warpPerspective(photo, TURN, photo.shape[::-1])
    return [cv2.imencode(".png", view)[1].tobytes() for view in (photo, turned)]


@pytest.fixture(scope="module")
def client(untrained):
    return serve.make_app(untrained).test_client()


def post(client, *files, headers=None, home=HOME, **more):
    named = {f"image{i}": (io.BytesIO(data), "../../a<b>.png") for i, data in enumerate(files)}
    return client.post("/match", data={**named, **more}, base_url=home, headers=headers)


def lines_of(reply):
    """The steps of an answer, of which the last has the files."""
    return [json.loads(line) for line in reply.text.splitlines()]


def gray(data):
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_two_images_give_the_steps_and_the_files_of_the_command(
    client, untrained, views, threshold
):
    more = {"threshold": threshold} if threshold else {}
    *steps, answer = lines_of(post(client, *views, **more))
    assert [step["done"] for step in steps] == [0, 1, 2, 3]
    files = {name: base64.b64decode(text) for name, text in answer["files"].items()}
    own = dataclasses.replace(untrained, threshold=threshold or untrained.threshold)
    expected = own.match(*map(gray, views))
    assert answer["threshold"] == own.threshold
    assert answer["summary"] == expected.summarize()
    record = json.loads(files["matches.json"])
    written = json.loads(folder.json_of(expected, {}))
    for name in ("keypoints0", "matches", "frame", "image_size1"):
        assert record[name] == written[name], name
    with np.load(io.BytesIO(files["matches.npz"])) as arrays:
        assert (arrays["matches"] >= 0).sum() == len(expected.matches)
    picture = expected.show(*map(gray, views), captions=False)
    assert cv2.imdecode(np.frombuffer(files["matches.jpg"], np.uint8), 1).shape == (
        picture.pixels.shape
    )
    assert answer["caption"] == picture.legend


@pytest.mark.parametrize("bad", [b"", b"<svg/>", b"\xff\xd8\xff\xe0" + bytes(100)])
def test_a_bad_image_is_one_line(client, views, bad):
    for files, name in (((bad, views[0]), "first"), ((views[0], bad), "second")):
        assert lines_of(post(client, *files))[-1]["error"].startswith(f"{name} image: ")


def test_what_is_refused(client, untrained, views):
    assert post(client, bytes(serve.MAX_BYTES), b"").status_code == 413
    assert post(client, views[0]).status_code == 400  # one image
    assert post(client, *views, headers={"Origin": "http://evil.example"}).status_code == 403
    assert post(client, *views, home="http://evil.example").status_code == 400
    assert client.get("/match", base_url=HOME).status_code == 405
    page = client.get("/", base_url=HOME, headers={"Origin": HOME})
    assert page.status_code == 200 and "http" not in page.text  # loads nothing from elsewhere
    assert f"The model's own is {untrained.threshold:.2f}." in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]


@pytest.fixture(scope="module")
def port(untrained):
    """The port of a running server, as the command starts it."""
    with socket.socket() as probe:
        probe.bind((serve.HOST, 0))
        number = probe.getsockname()[1]
    threading.Thread(target=serve.run, args=(untrained, number), daemon=True).start()

    def answers():
        with socket.socket() as probe:
            return probe.connect_ex((serve.HOST, number)) == 0

    wait_until(answers, 10)
    return number


def test_it_listens_on_this_machine_alone_and_a_taken_port_is_one_line(untrained, port):
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", port)) != 0
    with pytest.raises(RequestError, match=f"--port {port}"):
        serve.run(untrained, port)
