"""The page of `superglue-match serve` in a real browser: steps, threshold, errors."""

import shutil
import threading

import cv2
import pytest
from werkzeug.serving import make_server

from superglue_sift.apps import serve

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright (pip install playwright)"
)
expect = playwright.expect
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def address(untrained):
    """The address of a running page."""
    server = make_server(serve.HOST, 0, serve.make_app(untrained), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{serve.HOST}:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as tool:
        # a container has no sandbox of its own, and the page is ours
        started = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser, address):
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.errors = []
    opened.on("pageerror", lambda error: opened.errors.append(str(error)))
    opened.on("console", lambda message: opened.errors.append(message.text))
    opened.goto(address)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def files(photo, turned, tmp_path_factory):
    folder = tmp_path_factory.mktemp("views")
    for name, view in (("a.png", photo), ("b.png", turned)):
        cv2.imwrite(str(folder / name), view)
    (folder / "bad.png").write_bytes(b"no picture")
    return folder


def choose(page, files, second="b.png"):
    for view, name in enumerate(("a.png", second)):
        page.set_input_files(f"#image{view}", str(files / name))
    done = page.locator("#result:visible, #error:not(:empty)")
    expect(done).to_have_count(1, timeout=60_000)


def test_two_images_are_matched_step_by_step(page, files, untrained):
    page.evaluate(
        """() => {
        window.steps = [];
        new MutationObserver(() => steps.push(at("status").textContent)).observe(
            at("status"), {childList: true});
        }"""
    )
    choose(page, files)
    steps = page.evaluate("steps")
    assert "Matching ..." in steps and "Finding keypoints in the first image ..." in steps
    assert page.inner_text("#value") == f"{untrained.threshold:.2f}"
    expect(page.locator("#picture")).to_have_js_property("complete", True)
    assert page.evaluate("at('picture').naturalWidth") == 600 + 8 + 600
    assert page.is_hidden("#bar") and page.errors == []
    with page.expect_download() as download:
        page.click("text=matches.npz")
    assert download.value.suggested_filename == "matches.npz"


def test_the_threshold_changes_the_matches_and_is_reset_to_that_of_the_model(
    page, files, untrained
):
    choose(page, files)
    status = page.locator("#status")
    before = status.inner_text()
    page.locator("#threshold").fill("0.3")
    page.locator("#threshold").dispatch_event("change")
    expect(status).not_to_have_text(before, use_inner_text=True)
    expect(status).to_contain_text("fit one camera motion", timeout=60_000)
    assert page.inner_text("#value") == "0.30"
    page.click("#reset")
    expect(status).to_have_text(before, use_inner_text=True, timeout=60_000)
    assert page.inner_text("#value") == f"{untrained.threshold:.2f}"


def test_a_file_that_is_no_image_is_named(page, files):
    choose(page, files, "bad.png")
    assert "second" in page.inner_text("#error")
    assert page.is_hidden("#bar") and page.is_hidden("#result")
