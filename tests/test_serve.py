"""The page of `superglue-match --serve`: real uploads in a real browser, and hostile ones."""

from __future__ import annotations

import base64
import dataclasses
import http.client
import io
import json
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

from superglue_sift import Matcher, RequestError, drawing, images, sift
from superglue_sift.apps import results, serve
from superglue_sift.geometry import corner_error

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
    body = (
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def matched(client, views, **options) -> dict:
    """The answer of two uploads."""
    reply = post(client, (views[0], "a.png"), (views[1], "b.png"), **options)
    assert reply.status_code == 200
    return reply.get_json()


def ask(client, path, found, threshold, **options):
    return client.post(
        path, json={"record": found["record"], "threshold": threshold}, base_url=HOME, **options
    )


@pytest.fixture(scope="module")
def found(matcher, views):
    return matched(serve.make_app(matcher, 8010).test_client(), views)


def gray(data: bytes) -> np.ndarray:
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)


def test_two_images_give_their_matches(found, matcher, views, photo):
    rows = np.array(found["record"]["matches"])
    points = np.array(found["points"])
    sure = rows[:, 2] > matcher.threshold
    expected = matcher.match(photo, gray(views[1]))
    assert sure.sum() == len(expected.matches) > 30
    np.testing.assert_allclose(points[sure, :2], expected.points0, atol=1e-3)
    assert found["scales"] == [1.0, 1.0] and found["threshold"] == matcher.threshold
    for picture in found["pictures"]:
        data = base64.b64decode(picture.partition(",")[2])
        assert cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR).shape == (400, 600, 3)


def test_a_photograph_of_a_phone_is_shown_upright_and_matched_so(client, photo, views, matcher):
    from PIL import Image

    lying = io.BytesIO()
    exif = Image.Exif()
    exif[images.ORIENTATION] = 6
    Image.fromarray(images.turned(photo, images.inverse(6))).save(lying, "PNG", exif=exif)
    found = matched(client, (lying.getvalue(), views[1]))
    data = base64.b64decode(found["pictures"][0].partition(",")[2])
    assert np.abs(gray(data).astype(int) - photo).mean() < 4
    assert found["record"]["frame"] == "upright" and found["record"]["turned0"] == 6
    assert found["record"]["keypoints0"] == matched(client, views)["record"]["keypoints0"]


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.9, 1.0])
def test_counts_are_those_of_the_threshold(client, found, matcher, views, photo, threshold):
    reply = ask(client, "/fit", found, threshold).get_json()
    expected = dataclasses.replace(matcher, threshold=threshold).match(photo, gray(views[1]))
    counts = {name: int(fit.inliers.sum()) for name, fit in expected.fits().items()}
    assert reply["record"]["matches"] == [
        row for row in found["record"]["matches"] if row[2] > threshold
    ]
    for name, count in counts.items():  # positions are rounded on their way
        assert abs(reply["record"]["inliers"][name] - count) <= 2
    assert [found["record"]["matches"][i] for i in reply["matches"]] == reply["record"]["matches"]
    if threshold < 0.5:
        assert len(reply["off"]) - sum(reply["off"]) == max(reply["record"]["inliers"].values())
        assert corner_error(np.array(reply["record"]["H_0to1"]), TURN, (600, 400)) < 3
    if threshold == 1:
        assert reply["off"] == [] and reply["off_means"] == "" and reply["record"]["H_0to1"] is None


def test_what_is_downloaded_is_what_the_command_writes(
    client, found, matcher, views, photo, tmp_path
):
    expected = dataclasses.replace(matcher, threshold=0.5).match(photo, gray(views[1]))
    record = ask(client, "/json", found, 0.5).get_json()
    results.write_json(tmp_path / "m.json", expected, expected.fits(), {})
    written = json.loads((tmp_path / "m.json").read_text())
    assert set(written) | {"image0", "image1"} == set(record)
    for name in ("keypoints0", "matches", "matches0", "frame", "image_size1"):
        assert record[name] == written[name], name
    # the page aligned all matches at once, and the map around a match comes of its neighbours
    apart = np.abs(np.array(record["aligned1"]) - written["aligned1"])
    assert (apart < 2e-3).mean() > 0.95 and apart.max() < 0.3
    (tmp_path / "m.npz").write_bytes(ask(client, "/npz", found, 0.5).data)
    read = results.read_npz(tmp_path / "m.npz", expected.size0, expected.size1)
    np.testing.assert_array_equal(read.matches, expected.matches)
    np.testing.assert_allclose(read.points1, record["aligned1"], atol=1e-3)


def test_the_picture_is_that_of_the_command(client, found, matcher, views, photo):
    sent = {"found": json.dumps({"record": found["record"], "threshold": 0.5})}
    files = {f"image{i}": (io.BytesIO(data), "a.png") for i, data in enumerate(views)}
    reply = client.post("/picture", data={**sent, **files}, base_url=HOME)
    picture = cv2.imdecode(np.frombuffer(reply.data, np.uint8), cv2.IMREAD_COLOR)
    expected = (
        dataclasses.replace(matcher, threshold=0.5).match(photo, gray(views[1])).show().pixels
    )
    # through JPEG too, which dulls thin lines in bright colours
    expected = cv2.imdecode(
        np.frombuffer(drawing.encode(".jpg", expected), np.uint8), cv2.IMREAD_COLOR
    )
    assert picture.shape == expected.shape
    assert np.abs(picture.astype(int) - expected).mean() < 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.pop("keypoints0"),
        lambda record: record.update(keypoints0=[["x", 1]]),
        lambda record: record.update(matches=[[10**6, 0, 0.9]]),
        lambda record: record.update(matches=[[-1, 0, 0.9]]),
        lambda record: record.update(matches="no"),
        lambda record: record.update(aligned1=[[1.0, 2.0]]),
        lambda record: record.update(aligned1=[[None, None]] * len(record["matches"])),
        lambda record: record.update(image_size0=[1]),
    ],
)
def test_what_is_sent_back_damaged_is_one_line(client, found, damage):
    record = json.loads(json.dumps(found["record"]))
    damage(record)
    for path in ("/fit", "/json", "/npz"):
        reply = ask(client, path, {"record": record}, 0.5)
        assert reply.status_code == 400 and "\n" not in reply.get_json()["error"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"record": 1, "threshold": 0}', b"\xff"])
def test_what_is_no_record_is_one_line(client, body):
    for path in ("/fit", "/json", "/npz", "/picture"):
        reply = client.post(path, data=body, base_url=HOME)
        assert reply.status_code == 400 and reply.get_json()["error"]
    assert client.post("/pickle", data=body, base_url=HOME).status_code in (404, 405)


def test_the_page_finds_keypoints_by_the_extractor_that_was_asked_for(matcher, views):
    seen = []

    def extractor(gray, most):
        seen.append(most)
        return sift.extract(gray, most)

    own = dataclasses.replace(matcher, extractor=extractor, max_keypoints=64)
    record = serve.answer(own, views[0], views[0])["record"]
    assert len(record["keypoints0"]) == len(record["keypoints1"]) == 64 and seen == [64, 64]


@pytest.mark.parametrize(
    "bad, message",
    [
        (b"", "not a JPEG, PNG or WebP"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a JPEG, PNG or WebP"),
        (b"%PDF-1.7", "not a JPEG, PNG or WebP"),
        (b"BM" + bytes(60), "not a JPEG, PNG or WebP"),
        (b"\xff\xd8\xff\xe0" + bytes(100), "damaged|truncated"),
        (
            png(60_000, 60_000, zlib.compress(b"0")),
            "too large",
        ),  # a bomb: 3.6 gigapixels in 100 bytes
        (png(9_000, 9_000, zlib.compress(b"0")), "too large: at most 50 megapixels"),
        (b"RIFF\xff\xff\xff\x7fWEBPVP8 ", "damaged WEBP"),
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
        assert (
            max(shown.shape[:2]) == min(max(width, height), serve.SHOWN_SIDE)
            and min(shown.shape[:2]) == 1
        )


def test_too_many_bytes_are_refused_before_they_are_read(client):
    reply = post(client, (bytes(serve.MAX_BYTES), "a.png"), (b"", "b.png"))
    assert reply.status_code == 413 and "32 MB" in reply.get_json()["error"]


def test_the_name_of_a_file_does_nothing(client, views, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reply = post(
        client, (views[0], "../../../etc/passwd"), (views[1], "<script>alert(1)</script>.png")
    )
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


@pytest.fixture
def files(views, tmp_path):
    """Both views on disk, and what is no image."""
    for number, data in enumerate(views):
        (tmp_path / f"{number}.png").write_bytes(data)
    (tmp_path / "no.png").write_text("no image")
    return [tmp_path / name for name in ("0.png", "1.png", "no.png")]


@pytest.fixture(params=[390, 1280])
def page(request, browser, address):
    """The page in a browser of this width; it must complain of nothing and never be wider than the
    window.
    """
    opened = browser.new_page(viewport={"width": request.param, "height": 800})
    complaints = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(address)
    yield opened
    assert opened.evaluate("document.documentElement.scrollWidth") <= request.param
    # that a request was refused the browser itself notes
    assert [text for text in complaints if "status of 400" not in text] == []
    opened.close()


DROP = """([files, selector]) => {
  const data = new DataTransfer();
  for (const [name, content] of files)
    data.items.add(new File([Uint8Array.from(atob(content), c => c.charCodeAt(0))], name,
        { type: "image/png" }));
  const target = document.querySelector(selector);
  for (const kind of ["dragover", "drop"])
    if (target.dispatchEvent(
        new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true })))
      throw new Error(`the browser itself would handle ${kind}`);
}"""


def drop(page, selector, *paths):
    """Drop files on an element, as a hand would."""
    page.evaluate(
        DROP,
        [[(path.name, base64.b64encode(path.read_bytes()).decode()) for path in paths], selector],
    )


def shown(page) -> Tuple[int, int, int, int]:
    """Matches above the threshold, all, and how many fit a homography and a fundamental matrix."""
    deadline = time.monotonic() + 60
    # "..." until the counts are there
    while not re.search(r"\d+ fit one fundamental", page.inner_text("#said")):
        assert time.monotonic() < deadline, page.inner_text("#said") + page.inner_text("#error")
        page.wait_for_timeout(50)
    numbers = [int(word) for word in re.findall(r"\d+", page.inner_text("#said"))]
    return numbers[0], numbers[1], numbers[2], numbers[3]


def slide(page, value: float) -> None:
    page.fill("#threshold", str(value))


def test_both_files_dropped_anywhere_are_matched_and_counts_follow_the_threshold(page, files):
    drop(page, "h1", files[0], files[1])
    page.wait_for_selector("#picture:visible", timeout=60_000)
    above, every, homography, fundamental = shown(page)
    assert 30 < above <= every and 30 < homography <= above and 30 < fundamental <= above
    assert page.is_visible("#thumb0") and page.inner_text("#name1") == "1.png"
    slide(page, 0.99)
    fewer = shown(page)
    assert fewer[0] < above and fewer[2] < homography and fewer[3] < fundamental
    slide(page, 0)
    assert shown(page)[:2] == (every, every)
    assert "does not fit" in page.inner_text("#legend")
    width, height = page.evaluate("[picture.clientWidth, picture.clientHeight]")
    if page.viewport_size["width"] < 640:  # one above the other
        assert height > width > 340
    else:
        assert width > 1100 and height > 350


def test_one_file_after_the_other_goes_to_the_empty_box_or_the_one_it_is_dropped_on(page, files):
    drop(page, "body", files[1])
    assert page.inner_text("#name0") == "1.png" and "One more image" in page.inner_text("#said")
    drop(page, "body", files[0])
    page.wait_for_selector("#picture:visible", timeout=60_000)
    assert page.inner_text("#name1") == "0.png"
    drop(page, "#name0", files[2])  # no image
    page.wait_for_selector("#error:not(:empty)")
    assert "first image: not a JPEG, PNG or WebP image" in page.inner_text("#error")
    assert not page.is_visible("#picture")
    page.set_input_files("#image0", files[1])
    page.wait_for_selector("#picture:visible", timeout=60_000)
    assert page.inner_text("#error") == ""
    drop(page, "body", *files)
    assert "3 files" in page.inner_text("#error")


def test_the_first_image_is_warped_onto_the_second(page, files):
    page.set_input_files("#image0", files[:2])  # two chosen at once
    page.wait_for_selector("#picture:visible", timeout=60_000)
    page.check("input[value=warp]")
    assert (
        page.is_visible("#stage")
        and not page.is_visible("#picture")
        and page.is_visible("#opacity")
    )
    page.fill("#opacity", "1")
    seen = gray(page.locator("#stage").screenshot())
    second = cv2.resize(gray(files[1].read_bytes()), seen.shape[::-1], interpolation=cv2.INTER_AREA)
    inner = np.s_[
        seen.shape[0] // 4 : -seen.shape[0] // 4, seen.shape[1] // 4 : -seen.shape[1] // 4
    ]
    assert np.abs(seen[inner].astype(int) - second[inner]).mean() < 8, (
        "the warped first image covers the second"
    )
    page.evaluate("above.style.transform = ''")
    unwarped = gray(page.locator("#stage").screenshot())
    assert np.abs(unwarped[inner].astype(int) - second[inner]).mean() > 20
    page.check("input[value=blink]")
    assert page.evaluate("getComputedStyle(above).animationName") == "blink"
    page.check("input[value=matches]")
    assert page.is_visible("#picture") and not page.is_visible("#stage")


def test_json_picture_and_matches_are_downloaded(page, files, tmp_path):
    drop(page, "body", files[0], files[1])
    page.wait_for_selector("#picture:visible", timeout=60_000)
    slide(page, 0.5)
    above = shown(page)[0]
    saved = {}
    for kind in ("json", "npz", "picture"):
        with page.expect_download() as download:
            page.click(f"#get-{kind}")
        saved[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(saved[kind])
    assert len(json.loads(saved["json"].read_text())["matches"]) == above
    with np.load(saved["npz"]) as file:
        assert (file["matches"] >= 0).sum() == above
    assert cv2.imread(str(saved["picture"])).shape[1] == 600 + drawing.GAP + 600


def test_without_flask_one_line_says_what_to_install(matcher, monkeypatch):
    monkeypatch.setitem(sys.modules, "flask", None)
    with pytest.raises(RequestError, match=r"pip install 'superglue-sift\[serve\]'"):
        serve.make_app(matcher, 8010)


def test_the_page_loads_nothing_from_elsewhere(client):
    reply = client.get("/", base_url=HOME)
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert "http" not in reply.text
