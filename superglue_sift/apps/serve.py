"""Serve a local page for the browser: drop two images, see their matches, move the threshold.

    superglue-match --serve          then http://127.0.0.1:8010

The server listens on 127.0.0.1 only, and refuses other host names and pages of other sites. The
page loads nothing from elsewhere. Uploads are limited to 32 MB, and their names are not used. Only
the features of the last two images are kept, in memory. This needs
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
from superglue_sift.apps.pairing import PICTURE
from superglue_sift.errors import RequestError, check_range, import_extra
from superglue_sift.features.features import Features
from superglue_sift.features.images import UPRIGHT, decode_color
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher

HOST = "127.0.0.1"
PORT = 8010  # or any free one if another program has it
MAX_BYTES = 32 << 20  # maximum size of a request, which has both images
NAMES = ("first image", "second image")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src"
    " 'unsafe-inline'; img-src data: blob:; connect-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def run(matcher: Matcher) -> int:
    """Serve until Ctrl-C. Raises RequestError if Flask is missing."""
    app = make_app(matcher)
    from werkzeug.serving import make_server

    # If another program answers at the port, port 0 asks the system for a free one.
    with socket.socket() as probe:
        is_taken = probe.connect_ex((HOST, PORT)) == 0
    server = make_server(HOST, 0 if is_taken else PORT, app, threaded=True)
    print(f"http://{HOST}:{server.server_port}  (Ctrl-C ends it)", flush=True)
    server.serve_forever()
    return 0


def make_app(matcher: Matcher) -> Any:
    """Create the Flask application. Raises RequestError if Flask is not installed."""
    flask = import_extra("flask", "serve")
    from werkzeug.exceptions import HTTPException

    app = flask.Flask(__name__)
    # Refuse other names of this machine, because another site could take one (DNS rebinding).
    app.config.update(MAX_CONTENT_LENGTH=MAX_BYTES, TRUSTED_HOSTS=[HOST, "localhost"])
    request = flask.request
    # A new threshold for the same two images needs no new keypoints.
    extract = functools.lru_cache(maxsize=2)(functools.partial(_extract, matcher))
    lock = threading.Lock()  # only one match at a time, to save memory

    def steps(images: Sequence[bytes], threshold: float) -> Iterator[Dict[str, Any]]:
        """Yield each step before it begins, and finally the answer."""
        with lock:
            features = []
            for number, (data, name) in enumerate(zip(images, NAMES)):
                yield {"step": f"Finding keypoints in the {name}", "done": number, "of": 4}
                features.append(extract(data, name))
            yield {"step": "Matching", "done": 2, "of": 4}
            # The copy shares the network with the matcher.
            result = dataclasses.replace(matcher, threshold=threshold).match(*features)
            yield {"step": "Drawing", "done": 3, "of": 4}
            yield {**answer_of(result), "threshold": threshold}

    @app.get("/")
    def page() -> str:
        # The page is one file, which loads nothing else.
        text = Path(__file__).with_name("serve.html").read_text(encoding="utf-8")
        return text.replace("MODEL_THRESHOLD", f"{matcher.threshold:.2f}")

    @app.post("/match")
    def match() -> Any:
        images = [request.files[name].read() for name in ("image0", "image1")]
        threshold = request.form.get("threshold", matcher.threshold, float)
        check_range("threshold", threshold, 0, 1)

        # Send one line of JSON for each step, so that the page shows the progress.
        def lines() -> Iterator[str]:
            try:
                for line in steps(images, threshold):
                    yield json.dumps(line) + "\n"
            except RequestError as error:
                yield json.dumps({"error": str(error)}) + "\n"

        return flask.Response(lines(), mimetype="application/x-ndjson")

    @app.before_request
    def refuse_other_sites() -> None:
        # A browser says by `Origin` which page sends a form. Other programs do not send it.
        if request.headers.get("Origin", request.host_url[:-1]) != request.host_url[:-1]:
            flask.abort(403)

    @app.after_request
    def allow_nothing_else(response: Any) -> Any:
        response.headers.update(HEADERS)
        return response

    @app.errorhandler(RequestError)
    @app.errorhandler(HTTPException)
    def say(error: Any) -> Any:
        # HTTP errors have their own code. A wrong request has 400.
        return {"error": str(error)}, getattr(error, "code", 400)

    return app


def _extract(matcher: Matcher, data: bytes, name: str) -> Features:
    """Extract features of an image, with its pixels in colour.

    Raises:
        RequestError: For a bad image.
    """
    features = matcher.extract_file(data, name)
    return features._replace(image=decode_color(data, name, UPRIGHT))


def answer_of(result: MatchResult) -> Dict[str, Any]:
    """Return the answer for the page: a summary, a caption, and the files of the command by name.

    The files are in base64.
    """
    picture = result.show(captions=False)
    files = {
        results.JSON: results.json_of(result),
        results.MATCHES: results.npz_of(result),
        PICTURE: picture.encode(),
    }
    encoded = {name: base64.b64encode(data).decode() for name, data in files.items()}
    return {"summary": result.summarize(), "caption": picture.legend, "files": encoded}
