"""A page for the browser: drop two images, see their matches, move the threshold. Local only.

    superglue-match --serve          then http://127.0.0.1:8010

Listens on 127.0.0.1 only, and refuses other host names and pages of other sites. The page loads
nothing from elsewhere. Uploads are limited to 32 MB; their names are not used. Only the matches of
the last two images are kept, in memory. Needs `pip install 'superglue-sift[serve]'`.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import threading
from pathlib import Path
from typing import Any, Dict, List

from superglue_sift.apps import results
from superglue_sift.errors import RequestError, check_range, import_extra
from superglue_sift.features.features import Features
from superglue_sift.features.images import UPRIGHT, decode_color
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher

HOST = "127.0.0.1"
MAX_BYTES = 32 << 20  # of a request: both images
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src"
    " 'unsafe-inline'; img-src data: blob:; connect-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def run(matcher: Matcher, port: int) -> int:
    """Serve until Ctrl-C. Raises RequestError: Flask is missing, or the port is in use."""
    app = make_app(matcher)
    from werkzeug.serving import make_server

    try:
        server = make_server(HOST, port, app, threaded=True)
    except (OSError, SystemExit):
        raise RequestError(
            f"--port {port}: cannot be opened on {HOST}; if it is in use, name another"
        ) from None
    print(f"http://{HOST}:{server.server_port}  (Ctrl-C ends it)", flush=True)
    server.serve_forever()
    return 0


def make_app(matcher: Matcher) -> Any:
    """Create the Flask application. Raises RequestError if Flask is not installed."""
    flask = import_extra("flask", "serve")
    from werkzeug.exceptions import HTTPException

    app = flask.Flask(__name__)
    # Other names of this machine are refused: pages of other sites could take one (DNS rebinding)
    app.config.update(MAX_CONTENT_LENGTH=MAX_BYTES, TRUSTED_HOSTS=[HOST, "localhost"])
    request = flask.request
    extract = functools.lru_cache(maxsize=1)(functools.partial(extract_both, matcher))
    lock = threading.Lock()  # one match at a time, which bounds memory

    @app.get("/")
    def page() -> str:
        return Path(__file__).with_name("serve.html").read_text(encoding="utf-8")

    @app.post("/match")
    def answer() -> Any:
        images = [request.files[name].read() for name in ("image0", "image1")]
        threshold = request.form.get("threshold", matcher.threshold, float)
        check_range("threshold", threshold, 0, 1)
        with lock:
            found = dataclasses.replace(matcher, threshold=threshold).match(*extract(*images))
            return files_of(found, images, threshold)

    @app.before_request
    def refuse_other_sites() -> None:
        if request.headers.get("Origin", request.host_url[:-1]) != request.host_url[:-1]:
            flask.abort(403)

    @app.after_request
    def allow_nothing_else(response: Any) -> Any:
        response.headers.update(HEADERS)
        return response

    @app.errorhandler(RequestError)
    @app.errorhandler(HTTPException)
    def say(error: Any) -> Any:
        return {"error": str(error)}, getattr(error, "code", 400)

    return app


def extract_both(matcher: Matcher, *files: bytes) -> List[Features]:
    """Features of two images, with their pixels in colour. Raises RequestError for a bad image."""
    sides = []
    for data, name in zip(files, ("first image", "second image")):
        features = matcher.extract_file(data, name)
        sides.append(features._replace(image=decode_color(data, name, UPRIGHT)))
    return sides


def files_of(found: MatchResult, images: Any, threshold: float) -> Dict[str, Any]:
    """For the page: the threshold, a summary, and by name the files of the command, base64."""
    fits = found.fits()
    digests = [hashlib.sha256(data).hexdigest() for data in images]
    made = results.made_from(digests, {"threshold": threshold, "frame": found.frame})
    files = results.files_of(found, fits, dict(zip(("image0", "image1"), digests)))
    files[results.MATCHES] = results.npz_of(found, made)
    encoded = {name: base64.b64encode(data).decode() for name, data in files.items()}
    return {"threshold": threshold, "summary": found.summarize(fits), "files": encoded}
