"""A page for the browser: drop two images, see their matches, move the threshold. Local only.

    superglue-match --serve          then http://127.0.0.1:8010

Listens on 127.0.0.1 only and rejects other host names and pages of other sites. Uploads are limited
to 32 MB, images to JPEG, PNG or WebP of at most 50 megapixels, checked in the header before
decoding. The server keeps no state and ignores file names: matches go to the page, which sends them
back to request a fit, a picture or a file. Needs `pip install 'superglue-sift[serve]'`.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import threading
from pathlib import Path
from typing import Any, Dict, Mapping, Tuple

import numpy as np

from superglue_sift import drawing
from superglue_sift.apps import results
from superglue_sift.errors import RequestError
from superglue_sift.images import UPRIGHT, BadImage, decode_color, open_image
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher

HOST = "127.0.0.1"
MAX_BYTES = 32 << 20  # of a request: both images
MAX_PIXELS = 50_000_000  # of an image
SHOWN_SIDE = 1024  # longer side of an image on the page, pixels
SIDES = {"image0": "first image", "image1": "second image"}


def run(matcher: Matcher, port: int) -> int:
    """Serve until Ctrl-C. Raises RequestError: Flask is missing, or the port is in use."""
    app = make_app(matcher, port)
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


def library() -> Any:
    """Import Flask. Raises RequestError if it is not installed."""
    try:
        import flask
    except ImportError:
        raise RequestError(
            "--serve needs one more package: pip install 'superglue-sift[serve]'"
        ) from None
    return flask


def make_app(matcher: Matcher, port: int) -> Any:
    """Create the Flask application. Raises RequestError if Flask is not installed."""
    flask = library()
    app = flask.Flask(__name__)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BYTES
    app.config["MAX_FORM_MEMORY_SIZE"] = MAX_BYTES  # Flask's default is 0.5 MB
    _guard(app, flask, port)
    lock = threading.Lock()  # one match at a time, which bounds memory

    @app.get("/")
    def page() -> str:
        return page_text()

    @app.post("/match")
    def match() -> Any:
        with lock:
            return flask.jsonify(answer(matcher, *uploads(flask.request.files)))

    @app.post("/fit")
    def fit() -> Any:
        return flask.jsonify(fitted(*sent_back(flask.request.get_data())))

    @app.post("/<any(json, npz):kind>")
    def file(kind: str) -> Any:
        found, threshold, about = sent_back(flask.request.get_data())
        types = {"json": "application/json", "npz": "application/octet-stream"}
        return flask.Response(file_of(kind, found.above(threshold), about), mimetype=types[kind])

    @app.post("/picture")
    def picture() -> Any:
        found, threshold, _ = sent_back(flask.request.form.get("found", "").encode())
        with lock:
            images = tuple(
                image_of(data, name)
                for data, name in zip(uploads(flask.request.files), SIDES.values())
            )
        shown = found.above(threshold)._replace(images=images).show()
        return flask.Response(drawing.encode(".jpg", shown.pixels), mimetype="image/jpeg")

    @app.errorhandler(RequestError)
    def wrong(error: RequestError) -> Any:
        return flask.jsonify(error=str(error)), 400

    @app.errorhandler(413)
    def too_large(_error: Any) -> Any:
        return (
            flask.jsonify(error=f"too large: both images together may have {MAX_BYTES >> 20} MB"),
            413,
        )

    return app


def _guard(app: Any, flask: Any, port: int) -> None:
    """Accept requests of this page only; forbid it to load other content, and other pages to embed
    it.
    """
    end = "" if port == 80 else f":{port}"  # as browsers send it
    homes = {HOST + end, "localhost" + end}

    @app.before_request
    def only_this_page() -> Any:
        # rejects pages of other sites, and DNS rebinding
        origin = flask.request.headers.get("Origin")
        if flask.request.host in homes and (
            origin is None or origin in {f"http://{home}" for home in homes}
        ):
            return None
        return flask.jsonify(error=f"only http://{HOST}:{port} may ask"), 403

    @app.after_request
    def nothing_from_elsewhere(response: Any) -> Any:
        rule = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        rule += "img-src data: blob:; connect-src 'self'; frame-ancestors 'none'"
        response.headers["Content-Security-Policy"] = rule
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response


def page_text() -> str:
    """The page, with the colours of `drawing`."""
    text = Path(__file__).with_name("serve.html").read_text(encoding="utf-8")
    blue, green, red = drawing.RED
    drawn = {
        "red": f"rgb({red}, {green}, {blue})",
        "lines": drawing.LINES,
        "opacity": drawing.OPACITY,
    }
    return text.replace("/*drawing*/null", json.dumps(drawn))


def uploads(files: Mapping[str, Any]) -> Tuple[bytes, bytes]:
    """Both files of a request. Raises RequestError if one is missing."""
    if not set(SIDES) <= set(files):
        raise RequestError("two images are needed")
    return files["image0"].read(), files["image1"].read()


def image_of(data: bytes, name: str) -> np.ndarray:
    """Decode an upload to (H, W, 3) uint8 BGR, upright.

    Raises RequestError: not a JPEG, PNG or WebP, damaged, or too many pixels.
    """
    if not (data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")) or data[8:12] == b"WEBP"):
        raise RequestError(f"{name}: not a JPEG, PNG or WebP image")
    try:
        width, height = open_image(data, name).size
        if width * height > MAX_PIXELS:
            raise RequestError(f"{name}: too large: at most {MAX_PIXELS // 1_000_000} megapixels")
        return decode_color(data, name, UPRIGHT)
    except BadImage as error:
        raise RequestError(f"{name}: {error.reason}") from None


def answer(matcher: Matcher, data0: bytes, data1: bytes) -> Dict[str, Any]:
    """Match two files for the page.

    pictures: data URLs, upright, each `scales` times as large as its image. record:
    `results.record_of` of all matches, whatever their score. points: [x0, y0, x1, y1] of each
    match, pixels of the pictures. fit: see `fitted`. Positions can differ by a tenth of a pixel
    from those of an alignment of only the matches above a threshold.
    """
    named = list(zip((data0, data1), SIDES.values()))
    shown = [drawing.reduced(image_of(data, name), SHOWN_SIDE) for data, name in named]
    sides = [matcher.extract_file(data, name) for data, name in named]
    found = dataclasses.replace(matcher, threshold=0.0).match(*sides)
    about = {
        f"image{side}": hashlib.sha256(data).hexdigest() for side, (data, _) in enumerate(named)
    }
    files = [base64.b64encode(drawing.encode(".jpg", picture)).decode() for picture, _ in shown]
    points = [
        (p + 0.5) * scale - 0.5 for p, (_, scale) in zip((found.points0, found.points1), shown)
    ]
    return {
        "pictures": [f"data:image/jpeg;base64,{file}" for file in files],
        "scales": [scale for _, scale in shown],
        "points": np.round(np.concatenate(points, axis=1).astype(float), 3).tolist(),
        "colours": drawing.css_colours(points[0], shown[0][0].shape[1]),
        "order": drawing.spread(points[0], found.scores, shown[0][0].shape[1::-1]).tolist(),
        "threshold": matcher.threshold,
        "record": results.record_of(found, {}, about),
        "fit": fitted(found, matcher.threshold, about),
    }


def sent_back(body: bytes) -> Tuple[MatchResult, float, Dict[str, str]]:
    """Parse what the page sends back: the `record`, a threshold, and the digests of the images.

    Raises RequestError for other content.
    """
    try:
        content = json.loads(body)
        record = content["record"]
        threshold = float(content["threshold"])
        about = {name: str(record[name])[:64] for name in SIDES}
    except (ValueError, KeyError, TypeError):
        raise RequestError("the page sent something else than matches: load it again") from None
    if not 0.0 <= threshold <= 1.0:
        raise RequestError("threshold: must be between 0 and 1")
    return results.of_record(record), threshold, about


def fitted(found: MatchResult, threshold: float, about: Mapping[str, str]) -> Dict[str, Any]:
    """Fit a homography and a fundamental matrix to the matches above a threshold.

    record: `results.record_of` of these matches. matches: their indices among all; off: whether
    each is an outlier of the better fit; off_means: legend for these, "" without a fit.
    """
    chosen = np.flatnonzero(found.scores > threshold)
    above = found.above(threshold)
    fits = above.fits()
    off, means = above.left_out(fits)
    return {
        "threshold": threshold,
        "record": results.record_of(above, fits, about),
        "matches": chosen.tolist(),
        "off": [] if off is None else off.tolist(),
        "off_means": "" if off is None else means,
    }


def file_of(kind: str, found: MatchResult, about: Mapping[str, str]) -> bytes:
    """A file of matches, "json" or "npz", as the command writes it."""
    if kind == "npz":
        images = about["image0"], about["image1"]
        return results.npz_of(
            found, results.made_from(images, {"threshold": found.threshold, "frame": found.frame})
        )
    return (json.dumps(results.record_of(found, found.fits(), about)) + "\n").encode()
