"""The page of `superglue-match --serve`: real uploads in a real browser, and hostile ones."""

from __future__ import annotations

import base64
import dataclasses
import http.client
import io
import re
import shutil
import socket
import struct
import sys
import threading
import time
import zlib
from typing import Iterator, Tuple

import cv2
import numpy as np
import pytest
from made_scenes import TURN, write_model

from superglue_sift import Matcher, RequestError, serve, sift

pytest.importorskip("flask", reason="needs Flask")


@pytest.fixture(scope="module")
def matcher(tmp_path_factory) -> Matcher:
    return Matcher.load(write_model(tmp_path_factory.mktemp("model") / "m.safetensors"), "cpu")


@pytest.fixture(scope="module")
def views(photo) -> Tuple[bytes, bytes]:
    """Two views of a photograph as PNG."""
    turned = cv2.warpPerspective(photo, TURN, photo.shape[::-1])
    return tuple(cv2.imencode(".png", view)[1].tobytes() for view in (photo, turned))


@pytest.fixture
def client(matcher):
    return serve.make_app(matcher, 8010).test_client()


HOME = "http://127.0.0.1:8010"


def post(client, *files, **options):
    named = {f"image{i}": (io.BytesIO(data), name) for i, (data, name) in enumerate(files)}
    return client.post("/match", data=named, base_url=HOME, **options)


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header promises so many gray pixels, whatever its data holds."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", data or zlib.compress(bytes(width * height + height), 9)),
        (b"IEND", b""),
    ]
    body = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def test_two_images_give_their_matches(client, matcher, views, photo):
    reply = post(client, (views[0], "a.png"), (views[1], "b.png"))
    assert reply.status_code == 200
    found = reply.get_json()
    rows = np.array(found["matches"])
    sure = rows[rows[:, 4] > matcher.threshold]
    expected = matcher.match(photo, cv2.imdecode(np.frombuffer(views[1], np.uint8), cv2.IMREAD_GRAYSCALE))
    assert len(sure) == len(expected.matches) > 30 and found["homography_inliers"] > 30
    np.testing.assert_allclose(sure[:, :2], expected.points0, atol=1e-3)
    for picture in found["pictures"]:
        data = base64.b64decode(picture.partition(",")[2])
        assert cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR).shape == (400, 600, 3)


def test_the_page_finds_keypoints_by_the_extractor_that_was_asked_for(matcher, photo):
    seen = []

    def extractor(gray, most):
        seen.append(most)
        return sift.extract(gray, most)

    own = dataclasses.replace(matcher, extractor=extractor, max_keypoints=64)
    assert serve.answer(own, photo, photo)["keypoints"] == [64, 64] and seen == [64, 64]


@pytest.mark.parametrize(
    "bad, message",
    [
        (b"", "not a JPEG, PNG or WebP"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a JPEG, PNG or WebP"),
        (b"%PDF-1.7", "not a JPEG, PNG or WebP"),
        (b"BM" + bytes(60), "not a JPEG, PNG or WebP"),
        (b"\xff\xd8\xff\xe0" + bytes(100), "damaged|truncated"),
        (png(60_000, 60_000, zlib.compress(b"0")), "too large"),  # a bomb: 3.6 gigapixels in 100 bytes
        (png(9_000, 9_000, zlib.compress(b"0")), "too large: at most 50 megapixels"),
        (b"RIFF\xff\xff\xff\x7fWEBPVP8 ", "truncated WebP"),
    ],
)
def test_what_is_no_sane_image_is_refused_in_one_line(client, views, bad, message):
    for files in (((bad, "a.png"), (views[0], "b.png")), ((views[0], "a.png"), (bad, "b.png"))):
        reply = post(client, *files)
        assert reply.status_code == 400
        found = reply.get_json()["error"]
        assert re.search(message, found) and "\n" not in found


@pytest.mark.parametrize("width, height", [(40_000, 1), (1, 40_000), (1, 1), (100_000, 3)])
def test_an_image_of_few_lines_is_answered(client, views, width, height):
    strip = png(width, height)
    for files in (((strip, "a.png"), (views[0], "b.png")), ((strip, "a.png"), (strip, "b.png"))):
        reply = post(client, *files)
        assert reply.status_code == 200
        data = base64.b64decode(reply.get_json()["pictures"][0].partition(",")[2])
        shown = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        assert max(shown.shape[:2]) == min(max(width, height), serve.SHOWN_SIDE) and min(shown.shape[:2]) == 1


def test_too_many_bytes_are_refused_before_they_are_read(client):
    reply = post(client, (bytes(serve.MAX_BYTES), "a.png"), (b"", "b.png"))
    assert reply.status_code == 413 and "32 MB" in reply.get_json()["error"]


def test_the_name_of_a_file_does_nothing(client, views, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reply = post(client, (views[0], "../../../etc/passwd"), (views[1], "<script>alert(1)</script>.png"))
    assert reply.status_code == 200 and "passwd" not in reply.text and "alert" not in reply.text
    assert list(tmp_path.rglob("*")) == []


def test_other_sites_and_other_names_of_this_machine_are_refused(client, views):
    files = ((views[0], "a.png"), (views[1], "b.png"))
    assert post(client, *files, headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.get("/", base_url="http://evil.example").status_code == 403
    assert client.get("/", base_url=HOME, headers={"Origin": HOME}).status_code == 200
    assert client.get("/etc/passwd", base_url=HOME).status_code == 404
    assert client.get("/match", base_url=HOME).status_code == 405


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def address(matcher) -> Iterator[str]:
    """A running server, as the command starts it."""
    port = free_port()
    threading.Thread(target=serve.run, args=(matcher, port), daemon=True).start()
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"


def test_it_listens_on_this_machine_alone_and_a_taken_port_is_one_line(matcher, address):
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", port)) != 0
    with pytest.raises(RequestError, match=f"--port {port}"):
        serve.run(matcher, port)


def test_a_request_that_breaks_off_ends_nothing(address, views):
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(b"POST /match HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc")
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/")
    assert connection.getresponse().status == 200


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def test_in_a_browser_images_are_matched_and_the_threshold_moves(browser, address, views, tmp_path):
    names = []
    for number, data in enumerate(views):
        names.append(tmp_path / f"{number}.png")
        names[-1].write_bytes(data)
    (tmp_path / "no.png").write_text("no image")
    page = browser.new_page(viewport={"width": 390, "height": 800})
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    for number, name in enumerate(names):
        page.set_input_files(f"#image{number}", name)
    page.wait_for_selector("#picture:visible", timeout=60_000)
    said = page.inner_text("#said")
    shown, every = (int(word) for word in re.findall(r"\d+", said)[:2])
    assert 30 < shown <= every and complaints == []
    page.fill("#threshold", "0.99")
    assert int(page.inner_text("#said").split()[0]) < shown
    page.fill("#threshold", "0")
    assert int(page.inner_text("#said").split()[0]) == every
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_input_files("#image1", tmp_path / "no.png")
    page.wait_for_selector("#error:not(:empty)")
    assert "image1: not a JPEG, PNG or WebP image" in page.inner_text("#error")
    assert not page.is_visible("#picture")
    page.set_input_files("#image1", names[1])
    page.wait_for_selector("#picture:visible", timeout=60_000)
    assert page.inner_text("#error") == ""


def test_without_flask_one_line_says_what_to_install(matcher, monkeypatch):
    monkeypatch.setitem(sys.modules, "flask", None)
    with pytest.raises(RequestError, match=r"pip install 'superglue-sift\[serve\]'"):
        serve.make_app(matcher, 8010)


def test_the_page_loads_nothing_from_elsewhere(client):
    reply = client.get("/", base_url=HOME)
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert "http" not in reply.text
