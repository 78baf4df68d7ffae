"""Serve a local page for the browser: drop two images, see their matches, move the threshold.

    superglue-match serve          then http://127.0.0.1:8010

The server listens on 127.0.0.1 only, and refuses other host names and requests from pages of other
sites. The page loads nothing from elsewhere. Uploads are limited to 32 MB, and their names are not
used. Only the features of the last two images are kept, in memory. This needs
`pip install 'superglue-sift[serve]'`.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import socket
import threading
from pathlib import Path
from typing import Any, Dict, Iterator, Sequence

from superglue_sift.apps import results
from superglue_sift.apps.pairing import PICTURE_ENDING
from superglue_sift.errors import RequestError, check_range, import_extra
from superglue_sift.features.features import Features
from superglue_sift.features.images import UPRIGHT, decode_color
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher

HOST = "127.0.0.1"
PORT = 8010
MAX_REQUEST_BYTES = 32 << 20  # maximum size of a request, which has both images
IMAGE_NAMES = ("first image", "second image")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src"
    " 'unsafe-inline'; img-src data: blob:; connect-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def serve_page(matcher: Matcher) -> int:
    """Serve the page until Ctrl-C, and print its address.

    Raises:
        RequestError: If Flask is not installed.
    """
    app = make_app(matcher)
    from werkzeug.serving import make_server

    # If another program has the port, port 0 asks the system for a free one.
    with socket.socket() as probe:
        is_taken = probe.connect_ex((HOST, PORT)) == 0
    server = make_server(HOST, 0 if is_taken else PORT, app, threaded=True)
    print(f"http://{HOST}:{server.server_port}  (Ctrl-C ends it)", flush=True)
    server.serve_forever()
    return 0


def make_app(matcher: Matcher) -> Any:
    """Create the Flask application.

    Raises:
        RequestError: If Flask is not installed.
    """
    flask = import_extra("flask", "serve")
    from werkzeug.exceptions import HTTPException

    app = flask.Flask(__name__)
    # Refuse other names of this machine, because another site could take one (DNS rebinding).
    app.config.update(MAX_CONTENT_LENGTH=MAX_REQUEST_BYTES, TRUSTED_HOSTS=[HOST, "localhost"])
    request = flask.request
    # Keypoints are kept, since users try several thresholds on the same two images.
    extract = functools.lru_cache(maxsize=2)(functools.partial(_extract_upload, matcher))
    lock = threading.Lock()  # Only one pair is matched at a time, to save memory.

    def match_in_steps(images: Sequence[bytes], threshold: float) -> Iterator[Dict[str, Any]]:
        """Yield the name of each step before it begins, and finally the answer."""
        with lock:
            features = []
            for number, (data, name) in enumerate(zip(images, IMAGE_NAMES)):
                yield {"step": f"Finding keypoints in the {name}", "done": number, "of": 4}
                features.append(extract(data, name))
            yield {"step": "Matching", "done": 2, "of": 4}
            # A copy, which shares the network, has the threshold of this request.
            result = dataclasses.replace(matcher, threshold=threshold).match(*features)
            yield {"step": "Drawing", "done": 3, "of": 4}
            yield {**make_answer(result), "threshold": threshold}

    @app.get("/")
    def show_page() -> str:
        text = Path(__file__).with_name("serve.html").read_text(encoding="utf-8")
        return text.replace("MODEL_THRESHOLD", f"{matcher.threshold:.2f}")

    @app.post("/match")
    def match_upload() -> Any:
        images = [request.files[name].read() for name in ("image0", "image1")]
        threshold = request.form.get("threshold", matcher.threshold, float)
        check_range("threshold", threshold, 0, 1)

        # The page gets one line of JSON for each step, so that it shows the progress.
        def stream_lines() -> Iterator[str]:
            try:
                for step in match_in_steps(images, threshold):
                    yield json.dumps(step) + "\n"
            except RequestError as error:
                yield json.dumps({"error": str(error)}) + "\n"

        return flask.Response(stream_lines(), mimetype="application/x-ndjson")

    @app.before_request
    def refuse_other_sites() -> None:
        # Browsers name the site of the page in `Origin`. Other programs do not send it.
        if request.headers.get("Origin", request.host_url[:-1]) != request.host_url[:-1]:
            flask.abort(403)

    @app.after_request
    def add_security_headers(response: Any) -> Any:
        response.headers.update(HEADERS)
        return response

    @app.errorhandler(RequestError)
    @app.errorhandler(HTTPException)
    def report_error(error: Any) -> Any:
        # HTTP errors have their own code. Other errors are wrong requests.
        return {"error": str(error)}, getattr(error, "code", 400)

    return app


def _extract_upload(matcher: Matcher, data: bytes, name: str) -> Features:
    """Extract features of an image, and add its pixels in color.

    Args:
        matcher: the matcher.
        data: the bytes of the file.
        name: what an error calls the image.

    Raises:
        RequestError: If the image is bad.
    """
    features = matcher.extract_file(data, name)
    return features._replace(image=decode_color(data, name, UPRIGHT))


def make_answer(result: MatchResult) -> Dict[str, Any]:
    """Return what the page shows, and offers for download.

    Returns:
        The summary, the caption, and the files of `match_folder` in base64, by their endings.
    """
    picture = result.show(captions=False)
    files = {
        results.JSON_ENDING: results.make_json(result),
        results.MATCHES_ENDING: results.make_npz(result),
        PICTURE_ENDING: picture.encode(),
    }
    encoded = {name: base64.b64encode(data).decode() for name, data in files.items()}
    return {"summary": result.summarize(), "caption": picture.legend, "files": encoded}
