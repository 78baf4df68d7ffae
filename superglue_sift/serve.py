"""A page for the browser: drop two images, see their matches, move the threshold. On this machine alone.

    superglue-match --serve          then http://127.0.0.1:8010

Listens on 127.0.0.1 only and answers no other name and no other site's page. An upload is at most 32 MB, an image JPEG,
PNG or WebP of at most 50 megapixels by its header, before it is decoded; nothing is kept, and the names of files are
not used. Needs `pip install 'superglue-sift[serve]'`.
"""

from __future__ import annotations

import base64
import dataclasses
import threading
from pathlib import Path
from typing import Any, Dict

import numpy as np

from superglue_sift import drawing, results
from superglue_sift.errors import RequestError
from superglue_sift.images import BadImage, check, declared_size, decode_color
from superglue_sift.matcher import Matcher
from superglue_sift.upright import UPRIGHT

HOST = "127.0.0.1"
MAX_BYTES = 32 << 20  # of a request: both images
MAX_PIXELS = 50_000_000  # of an image
SHOWN_SIDE = 1024  # longer side of an image on the page, pixels


def run(matcher: Matcher, port: int) -> int:
    """Serve until Ctrl-C. Raises RequestError: Flask is missing, or the port is taken."""
    app = make_app(matcher, port)
    from werkzeug.serving import make_server

    try:
        server = make_server(HOST, port, app, threaded=True)
    except (OSError, SystemExit):
        raise RequestError(f"--port {port}: cannot be opened on {HOST}; is it taken? name another") from None
    print(f"http://{HOST}:{server.server_port}  (Ctrl-C ends it)", flush=True)
    server.serve_forever()
    return 0


def library() -> Any:
    """The package Flask. Raises RequestError where it is not installed."""
    try:
        import flask
    except ImportError:
        raise RequestError("--serve needs one more package: pip install 'superglue-sift[serve]'") from None
    return flask


def make_app(matcher: Matcher, port: int) -> Any:
    """The Flask application. Raises RequestError where Flask is not installed."""
    flask = library()
    app = flask.Flask(__name__)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BYTES
    _guard(app, flask, port)
    turn = threading.Lock()  # one match at a time: a second tab waits, memory does not double

    @app.get("/")
    def page() -> str:
        return Path(__file__).with_name("serve.html").read_text(encoding="utf-8")

    @app.post("/match")
    def match() -> Any:
        try:
            files = flask.request.files
            if not {"image0", "image1"} <= set(files):
                raise RequestError("two images are needed")
            with turn:
                images = [image_of(files[name].read(), name) for name in ("image0", "image1")]
                return flask.jsonify(answer(matcher, *images))
        except RequestError as error:
            return flask.jsonify(error=str(error)), 400

    @app.errorhandler(413)
    def too_large(_error: Any) -> Any:
        return flask.jsonify(error=f"too large: both images together may have {MAX_BYTES >> 20} MB"), 413

    return app


def _guard(app: Any, flask: Any, port: int) -> None:
    """Answer this page alone, let it load nothing but itself, and no other page show it."""
    end = "" if port == 80 else f":{port}"  # as browsers send it
    homes = {HOST + end, "localhost" + end}

    @app.before_request
    def only_this_page() -> Any:
        # neither a page of another site nor one that was given this address under another name
        origin = flask.request.headers.get("Origin")
        if flask.request.host in homes and (origin is None or origin in {f"http://{home}" for home in homes}):
            return None
        return flask.jsonify(error=f"only http://{HOST}:{port} may ask"), 403

    @app.after_request
    def nothing_from_elsewhere(response: Any) -> Any:
        rule = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        rule += "img-src data: blob:; connect-src 'self'; frame-ancestors 'none'"
        response.headers["Content-Security-Policy"] = rule
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response


def image_of(data: bytes, name: str) -> np.ndarray:
    """(H, W, 3) uint8 BGR of an upload. Raises RequestError: no JPEG, PNG or WebP, damaged, or too many pixels."""
    if not (data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")) or data[8:12] == b"WEBP"):
        raise RequestError(f"{name}: not a JPEG, PNG or WebP image")
    try:
        size = declared_size(check(data, name), name)
        if size is None or size[0] * size[1] > MAX_PIXELS:
            raise RequestError(f"{name}: too large: at most {MAX_PIXELS // 1_000_000} megapixels")
        return decode_color(data, name, UPRIGHT)
    except BadImage as error:
        raise RequestError(f"{name}: {error.reason}") from None


def answer(matcher: Matcher, image0: np.ndarray, image1: np.ndarray) -> Dict[str, Any]:
    """What the page draws: both pictures as data URLs, and all matches [x0, y0, x1, y1, score] in their pixels.

    deviations: px of the second image as it was given, of each match; None where the position stayed SIFT's.
    """
    found = dataclasses.replace(matcher, threshold=0.0).match(image0, image1)
    shown = [drawing.reduced(image, SHOWN_SIDE) for image in (image0, image1)]
    files = [base64.b64encode(drawing.encode(".jpg", picture)).decode() for picture, _ in shown]
    points = [(p + 0.5) * scale - 0.5 for p, (_, scale) in zip((found.points0, found.points1), shown)]
    rows = np.concatenate([*points, found.scores[:, None]], 1)
    inliers = found.above(matcher.threshold).homography().inliers
    return {
        "pictures": [f"data:image/jpeg;base64,{file}" for file in files],
        "matches": np.round(rows.astype(float), 3).tolist(),
        "keypoints": [len(found.keypoints0), len(found.keypoints1)],
        "threshold": matcher.threshold,
        "deviations": results.aligned_lists(found)["deviations"],
        "homography_inliers": int(inliers.sum()),
    }
